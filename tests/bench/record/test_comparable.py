"""Comparability of two runs: hardware facts, servers, and results from before these were recorded."""

from __future__ import annotations

from typing import Any

import pytest
from llmopt.bench.gate.compare import RunData, compare
from llmopt.bench.gate.limits import GateOutcome
from llmopt.bench.record.comparable import incomparable, server_changes, unknown_facts
from llmopt.bench.report.comparison import verdict_of

from tests.support.history_runs import IDENTITY, result_of

GPU = {
    "fingerprint": "f",
    "cpu_model": "A CPU",
    "microcode": "0x1",
    "gpu": "NVIDIA H100",
    "gpu_driver": "580.1",
    "gpu_power_limit_watts": 700.0,
    "gpu_sm_mhz": 1980,
}


def result(number: int = 1, **identity: Any) -> dict[str, Any]:
    """A result as it was recorded before there were hardware facts, with these parts of the identity."""
    recorded = {key: value for key, value in IDENTITY.items() if key != "hardware"}
    made = result_of(number, 2.0, identity={**recorded, **identity})
    made["llmopt"] |= {"arms": None, "slowdown": 1.0, "quality": None}
    return made


@pytest.mark.parametrize(
    ("fact", "value", "said"),
    [
        ("microcode", "0x2", "microcode: 0x1 and 0x2"),
        ("cpu_model", "B", "CPU model: A CPU and B"),
        ("fingerprint", "g", "fingerprint: f and g"),
        ("gpu_driver", "590.2", "GPU driver: 580.1 and 590.2"),
        ("gpu_power_limit_watts", 350.0, "GPU power limit watts: 700.0 and 350.0"),
        ("gpu_sm_mhz", 1410, "GPU sm mhz: 1980 and 1410"),
    ],
)
def test_other_hardware_is_not_comparable(fact: str, value: Any, said: str) -> None:
    base, new = result(1, hardware=GPU), result(2, hardware={**GPU, fact: value})
    assert incomparable(base, base) == []
    assert incomparable(base, new) == [f"the hardware or its settings differ ({said})"]
    verdict = compare(RunData(base), RunData(new))
    assert verdict.outcome is GateOutcome.NO_VERDICT and said in verdict.sentence


def test_what_one_side_lacks_is_unknown_and_not_another() -> None:
    known = result(1, hardware=GPU)
    no_driver = result(2, hardware={**GPU, "gpu_driver": None})
    assert incomparable(known, no_driver) == []
    assert unknown_facts(known, no_driver) == (
        "the machine's GPU driver is unknown in the new run",
    )
    fewer = result(3, hardware={key: GPU[key] for key in GPU if key != "microcode"})
    assert unknown_facts(fewer, known) == ("the machine's microcode is unknown in the base run",)
    assert unknown_facts(known, result(4, hardware=GPU)) == ()


def test_results_without_hardware_still_compare() -> None:
    old, other, new = result(1), result(2), result(3, hardware=GPU)
    for pair, said in (
        ((old, other), "the hardware is unknown: neither result says what it ran on"),
        ((old, new), "the hardware of the base run is unknown: its result does not say"),
        ((new, old), "the hardware of the new run is unknown: its result does not say"),
    ):
        assert incomparable(*pair) == []
        verdict = compare(*map(RunData, pair))
        assert verdict.outcome is not GateOutcome.REGRESSION
        assert verdict.sentence.endswith(said) and said in verdict_of(verdict).sentence
        assert verdict.as_dict()["unknown"] == [said]
    assert unknown_facts(old, old) == ()


def clock_notes(base: dict[str, Any], new: dict[str, Any]) -> list[str]:
    return [note for note in compare(RunData(base), RunData(new)).notes if "MHz" in note]


def test_clocks_that_differ_under_load_are_said() -> None:
    base, cool, hot = result(1, hardware=GPU), result(2, hardware=GPU), result(3, hardware=GPU)
    for run, clock in ((base, 1980), (cool, 1935), (hot, 1410)):
        run["llmopt"]["environment"]["after"] = {"gpu": {"sm_mhz": clock}}
    assert not clock_notes(base, cool)
    (note,) = clock_notes(base, hot)
    assert "1980 MHz after the base run and 1410 after the new one" in note


def server(number: int, gpu: str | None, version: str | None) -> dict[str, Any]:
    said = {"model": "org/model", "version": version}
    return result(number, target="http", hardware={"gpu": gpu}, server=said)


def test_a_server_may_be_upgraded_but_not_moved() -> None:
    old, new = server(1, "H100", "0.29.0"), server(2, "H100", "0.30.0")
    assert incomparable(old, new) == [] and unknown_facts(old, new) == ()
    assert server_changes(old, new) == ["server version: 0.29.0 against 0.30.0"]
    assert "server version: 0.29.0 against 0.30.0" in compare(RunData(old), RunData(new)).notes
    moved = server(3, "A100", "0.29.0")
    assert incomparable(old, moved) == ["the hardware or its settings differ (GPU: H100 and A100)"]


def test_a_server_that_does_not_say_its_gpu_is_in_the_words_of_the_verdict() -> None:
    old, new = server(1, None, None), server(2, None, "0.30.0")
    verdict = compare(RunData(old), RunData(new))
    assert "the server's GPU is unknown in both runs" in verdict.sentence
    assert "server version: unknown against 0.30.0" in verdict.notes
    assert unknown_facts(server(3, "H100", None), new) == (
        "the server's GPU is unknown in the new run",
    )
