"""Hardware facts: microcode and clocks as systems tell them, NVML's settings, and the fingerprint."""

from __future__ import annotations

from pathlib import Path

from llmopt.bench.machine.environment import (
    cpu_max_mhz,
    driver_facts,
    fingerprint,
    hardware_facts,
    microcode,
)

from .test_energy_and_cost import FakeNvml, _set

INTEL = "processor\t: 0\nmodel name\t: Xeon\nmicrocode\t: 0x2b000571\n\nprocessor\t: 1\nmicrocode\t: 0x2b000571\n"
ARM = "processor\t: 0\nCPU implementer\t: 0x41\nCPU variant\t: 0x3\nCPU revision\t: 1\n"


class Card(FakeNvml):
    """A card that has a clock setting for its SMs and none for its memory."""

    def __getattr__(self, name: str):
        if name == "nvmlDeviceGetApplicationsClock":
            return lambda _, which, out: _set(out, 1980) if which == 1 else 3
        return super().__getattr__(name)


class OldCard(FakeNvml):
    """A driver without the call for application clocks."""

    def __getattr__(self, name: str):
        if name == "nvmlDeviceGetApplicationsClock":
            raise AttributeError(name)
        return super().__getattr__(name)


def test_microcode_is_read_where_there_is_one(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    assert microcode(cpuinfo) is None
    for text, revision in ((INTEL, "0x2b000571"), (ARM, "0x3r1"), ("processor: 0\n", None)):
        cpuinfo.write_text(text)
        assert microcode(cpuinfo) == revision


def test_clock_limits_and_governors_are_facts(tmp_path: Path) -> None:
    assert cpu_max_mhz(tmp_path) is None
    for core, limit in enumerate((3_500_000, 2_100_000)):
        folder = tmp_path / f"devices/system/cpu/cpu{core}/cpufreq"
        folder.mkdir(parents=True)
        (folder / "scaling_max_freq").write_text(f"{limit}\n")
        (folder / "scaling_governor").write_text("performance\n")
    facts = hardware_facts("cpu", cpuinfo=tmp_path / "none", sys=tmp_path)
    assert (facts["cpu_max_mhz"], facts["cpu_governor"]) == (3500, "performance")
    assert "microcode" not in facts and "gpu" not in facts


def test_the_fingerprint_is_of_the_parts_and_not_of_the_moment() -> None:
    facts = hardware_facts("cpu")
    assert facts == hardware_facts("cpu") and facts["cpu_cores"] > 0 and facts["memory_gib"] > 0
    parts = {"cpu_model": "A CPU", "microcode": "0x1", "cpu_cores": 2, "memory_gib": 16}
    assert len(fingerprint(parts)) == 16
    for key, value in (
        ("cpu_model", "B"),
        ("microcode", "0x2"),
        ("cpu_cores", 4),
        ("memory_gib", 8),
    ):
        assert fingerprint({**parts, key: value}) != fingerprint(parts)


def test_settings_of_a_card_are_facts() -> None:
    assert driver_facts(0, Card()) == {
        "gpu_driver": "580.1",
        "gpu_power_limit_watts": 350.0,
        "gpu_sm_mhz": 1980,
    }
    assert "gpu_sm_mhz" not in driver_facts(0, OldCard())
    # No such card: what it is set to is unknown.
    assert set(driver_facts(1, Card()).values()) == {None}
