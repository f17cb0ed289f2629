"""Energy counters, prices and the state of the machine, against files and libraries made by hand."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import pytest
from llmopt.bench.machine.environment import cpu_clocks, governors, machine_state, temperatures
from llmopt.bench.machine.machine_meter import (
    CpuTimes,
    EnergyMeter,
    Reading,
    machine_busy_seconds,
    other_load,
    read_rapl,
)
from llmopt.bench.metrics.run_statistics import cost_part
from llmopt.engine.base.host import CLOCK_SM, Nvml


def powercap(root: Path, **joules: float) -> Path:
    for name, value in joules.items():
        folder = root / name.replace("_", ":").replace("intel:rapl", "intel-rapl")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "energy_uj").write_text(f"{int(value * 1e6)}\n")
        (folder / "max_energy_range_uj").write_text("1000000000\n")
    return root


def test_rapl_counts_sockets_once(tmp_path: Path) -> None:
    root = powercap(tmp_path, intel_rapl_0=10, intel_rapl_0_0=4, intel_rapl_1=5)
    reading, reason = read_rapl(root)
    assert dict(reading.joules) == {"intel-rapl:0": 10, "intel-rapl:1": 5} and reason is None
    later, _ = read_rapl(powercap(tmp_path, intel_rapl_0=12, intel_rapl_1=2))
    # The second counter began again at 1000 J.
    assert reading.until(later) == pytest.approx(2 + 997)


def test_a_missing_counter_says_why(tmp_path: Path) -> None:
    assert "missing" in (read_rapl(tmp_path / "none")[1] or "")
    assert "no RAPL package" in (read_rapl(tmp_path)[1] or "")
    meter = EnergyMeter("cpu", powercap=tmp_path / "none")
    meter.start()
    meter.stop()
    part = meter.part(100, 100)
    assert part["cpu_joules"] is None and "missing" in part["cpu_reason"]
    assert part["gpu_joules"] is None and part["gpu_reason"] == "the engine runs on the CPU"
    assert part["joules"] is part["joules_per_million_output_tokens"] is None


class FakeNvml:
    """libnvidia-ml with one card whose energy counter moves by 500 J a reading."""

    def __init__(self) -> None:
        self.millijoules = 0

    def __getattr__(self, name: str) -> Any:
        return {
            "nvmlInit_v2": lambda: 0,
            "nvmlDeviceGetHandleByIndex_v2": lambda index, _: 0 if index == 0 else 6,
            "nvmlDeviceGetTotalEnergyConsumption": self._energy,
            "nvmlDeviceGetTemperature": lambda *_: 3,  # not supported
            "nvmlDeviceGetClockInfo": lambda _, which, out: _set(out, 1410 + which),
            "nvmlDeviceGetEnforcedPowerLimit": lambda _, out: _set(out, 350_000),
            "nvmlSystemGetDriverVersion": lambda out, _: _text(out, b"580.1"),
            "nvmlDeviceGetCount_v2": lambda out: _set(out, 1),
            "nvmlDeviceGetName": lambda _, out, __: _text(out, b"NVIDIA H200"),
            "nvmlDeviceGetMemoryInfo": lambda _, out: setattr(out._obj, "total", 2**37) or 0,
        }[name]

    def _energy(self, _: Any, out: Any) -> int:
        self.millijoules += 500_000
        return _set(out, self.millijoules)


def _set(out: Any, value: int) -> int:
    out._obj.value = value
    return 0


def _text(out: Any, value: bytes) -> int:
    ctypes.memmove(out, value + b"\0", len(value) + 1)
    return 0


def test_energy_of_passes_adds_up_per_million_tokens(tmp_path: Path) -> None:
    powercap(tmp_path, intel_rapl_0=10)
    meter = EnergyMeter("cuda", powercap=tmp_path, nvml=Nvml(0, FakeNvml()))
    for end in (13, 20):
        meter.start()
        powercap(tmp_path, intel_rapl_0=end)
        meter.stop()
    part = meter.part(input_tokens=2000, output_tokens=1000)
    assert part["cpu_joules"] == pytest.approx(10) and part["gpu_joules"] == pytest.approx(1000)
    assert part["joules_per_million_output_tokens"] == pytest.approx(1010 / 1000 * 1e6)
    assert part["joules_per_million_input_tokens"] == pytest.approx(1010 / 2000 * 1e6)


def test_nvml_readings_that_are_not_there_are_none() -> None:
    card = Nvml(0, FakeNvml())
    assert card.temperature_celsius() is None and card.clock_mhz(CLOCK_SM) == 1411
    assert card.power_limit_watts() == 350 and card.driver() == "580.1"
    assert (card.count(), card.name(), card.memory_bytes()) == (1, "NVIDIA H200", 2**37)
    with pytest.raises(OSError, match="no GPU 1"):
        Nvml(1, FakeNvml())


def test_counters_that_changed_give_no_energy() -> None:
    assert Reading({"a": 1.0}, {"a": None}).until(Reading({"a": 0.5}, {"a": None})) is None
    assert Reading({"a": 1.0}, {"a": None}).until(Reading({}, {})) is None


def test_cost_by_hand() -> None:
    part = cost_part(3.6, seconds=100, input_tokens=4_000_000, output_tokens=1_000_000)
    assert part["usd"] == pytest.approx(0.1)
    assert part["usd_per_million_output_tokens"] == pytest.approx(0.1)
    assert part["usd_per_million_input_tokens"] == pytest.approx(0.025)
    assert part["usd_per_million_total_tokens"] == pytest.approx(0.02)
    assert cost_part(1.0, 1.0, 0, 0)["usd_per_million_output_tokens"] is None


def test_background_load_excludes_our_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stat = tmp_path / "stat"
    stat.write_text("cpu 100 0 50 1000 7 1 2 3 0 0\ncpu0 1 1 1 1 1 1 1 1 0 0\n")
    assert machine_busy_seconds(stat) == pytest.approx(1.56)
    assert machine_busy_seconds(tmp_path / "none") is None
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    before, after = CpuTimes(0.0, 5.0, 1.0), CpuTimes(10.0, 21.0, 11.0)
    assert other_load(before, after) == pytest.approx(6 / 10 / 2)
    assert other_load(before, CpuTimes(0.01, 5.0, 1.0)) is None
    assert other_load(CpuTimes(0.0, None, 0.0), after) is None


def test_state_of_the_machine(tmp_path: Path) -> None:
    for number, governor in enumerate(("performance", "powersave")):
        folder = tmp_path / f"devices/system/cpu/cpu{number}/cpufreq"
        folder.mkdir(parents=True)
        (folder / "scaling_governor").write_text(governor + "\n")
        zone = tmp_path / f"class/thermal/thermal_zone{number}"
        zone.mkdir(parents=True)
        (zone / "temp").write_text(f"{(40 + number) * 1000}\n")
    (tmp_path / "cpuinfo").write_text("model name : x\ncpu MHz : 800.5\ncpu MHz\t: 3000\n")
    assert governors(tmp_path) == "performance, powersave"
    assert temperatures(tmp_path) == 41
    assert cpu_clocks(tmp_path / "cpuinfo") == [800.5, 3000]
    state = machine_state("cpu", tmp_path / "empty")
    assert state["governor"] is None and len(state["load_average"]) == 3 and "gpu" not in state
