"""Comparability of two runs: hardware facts, servers, and results from before these were recorded."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from llmopt.bench.gate.compare import RunData, compare
from llmopt.bench.gate.limits import GateOutcome
from llmopt.bench.record.comparable import (
    CONDITIONS,
    IGNORED,
    MACHINE,
    UNKNOWN,
    VARIED,
    Difference,
    differs_by,
    incomparable,
    place_of,
    unknown_facts,
)
from llmopt.bench.record.run_record import IDENTITY as IDENTITY_FIELDS
from llmopt.bench.report.comparison import verdict_of

from tests.support.run_results import IDENTITY, result_of

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
    assert incomparable(base, new) == [Difference(MACHINE, f"not the same {MACHINE} ({said})")]
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
    assert differs_by(old, new) == ("server version: 0.29.0 against 0.30.0",)
    verdict = compare(RunData(old), RunData(new))
    assert verdict.differs_by == ("server version: 0.29.0 against 0.30.0",)
    moved = server(3, "A100", "0.29.0")
    (difference,) = incomparable(old, moved)
    assert difference.said == "not the same machine and its limits (GPU: H100 and A100)"


def test_a_server_that_does_not_say_its_gpu_is_in_the_words_of_the_verdict() -> None:
    old, new = server(1, None, None), server(2, None, "0.30.0")
    verdict = compare(RunData(old), RunData(new))
    assert "the server's GPU is unknown in both runs" in verdict.sentence
    assert "server version: unknown against 0.30.0" in verdict.differs_by
    assert unknown_facts(server(3, "H100", None), new) == (
        "the server's GPU is unknown in the new run",
    )


def test_the_docs_list_what_the_code_lists() -> None:
    """Both lists are data in one place, and the docs show them: a change of one is a change of the other."""
    page = (Path(__file__).parents[3] / "docs" / "measuring.md").read_text(encoding="utf-8")
    section = page.split("### What makes runs comparable")[1].split("\n### ")[0]
    for heading, listed in (("condition", CONDITIONS), ("may differ", VARIED)):
        table = section.split(f"| {heading} | fields |")[1].split("\n\n")[0].splitlines()[2:]
        rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table]
        assert {name: tuple(re.findall("`([^`]+)`", fields)) for name, fields in rows} == listed


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"engine": {"block_size": 16, "cpu_activations": 8}}, "activation bits: none against 8"),
        ({"engine": {"block_size": 16, "kv_cache_dtype": "fp8"}}, "KV dtype: none against fp8"),
        ({"engine": {"block_size": 32}}, "block_size: 16 against 32"),
        ({"model": "other.gguf", "model_hash": "sha256:2"}, "model: stories3M against other.gguf"),
        (
            {"model": "/a/folder/that/is/long/enough/to/be/cut/m.gguf"},
            "model: stories3M against m.gguf",
        ),
        ({"model_hash": "sha256:2"}, "weights: sha256:1 against sha256:2"),
        ({"quantization": "gguf"}, "quantization: none against gguf"),
        ({"dtype": "bfloat16"}, "dtype: float32 against bfloat16"),
    ],
)
def test_what_the_user_varies_is_listed_and_forbids_nothing(
    changed: dict[str, Any], said: str
) -> None:
    base, new = result(1), result(2, **changed)
    verdict = compare(RunData(base), RunData(new))
    assert verdict.differs_by == (said,) and verdict.conditions == ()
    assert verdict.outcome is GateOutcome.PASS and len(verdict.deltas) == 4


@pytest.mark.parametrize(
    ("condition", "changed", "said"),
    [
        ("prompts and their lengths", {"workload_sha256": "b"}, "workload: aaaa"),
        ("arrival or concurrency", {"load": {"max_concurrency": 4}}, "max_concurrency: 8 and 4"),
        # Of one side alone: the parentheses were empty once.
        (
            "arrival or concurrency",
            {"load": {"max_concurrency": 8, "duration": 9.0}},
            "duration: none and 9.0",
        ),
        ("sampling and seeds", {"load": {"max_concurrency": 8, "seed": 1}}, "seed: none and 1"),
        (MACHINE, {"engine": {"block_size": 16, "num_threads": 2}}, "threads: none and 2"),
        (MACHINE, {"device": "cuda:0"}, "device: cpu and cuda:0"),
        (MACHINE, {"machine": "B"}, "machine: A CPU, 2 CPUs and B"),
    ],
)
def test_another_condition_forbids_every_verdict_and_is_named(
    condition: str, changed: dict[str, Any], said: str
) -> None:
    verdict = compare(RunData(result(1)), RunData(result(2, **changed)))
    assert verdict.outcome is GateOutcome.NO_VERDICT and verdict.deltas == ()
    assert verdict.conditions == verdict.decided_by == (condition,) and condition in CONDITIONS
    assert verdict.sentence.startswith(f"not the same {condition} (") and said in verdict.sentence
    assert {(one.verdict, one.words) for one in verdict.aspects} == {
        ("no verdict", verdict.reasons[0])
    }


def test_a_field_on_neither_list_is_a_condition() -> None:
    """A new fact of a result passes silently nowhere: not at the top, not in the load, and not as a fact of the
    hardware. Among the engine's options it is one of them, and is listed."""
    base = result(1, tides="low", hardware=GPU)
    assert place_of("tides") == (True, UNKNOWN)
    verdict = compare(RunData(base), RunData(result(2, tides="high", hardware=GPU)))
    assert verdict.conditions == (UNKNOWN,) and "tides: low and high" in verdict.sentence
    without = compare(RunData(result(3, hardware=GPU)), RunData(base))
    assert without.conditions == (UNKNOWN,) and "tides: none and low" in without.sentence
    assert place_of("load.tides") == (True, "arrival or concurrency")
    assert place_of("hardware.tides") == (True, MACHINE)
    assert place_of("engine.tides") == (False, "engine options")
    for key in IDENTITY_FIELDS:
        assert place_of(key)[1] != UNKNOWN or place_of(f"{key}.x")[1] != UNKNOWN or key in IGNORED


def test_an_engine_here_is_compared_with_a_server_on_the_same_machine() -> None:
    """Another engine is what one compares; what a client cannot see of a server is unknown."""
    here = result(1, hardware={**GPU, "gpu": None}, machine="A CPU, 2 CPUs")
    served = {"target": "http", "device": "behind a server", "machine": "client: A CPU, 2 CPUs"}
    there = result(2, hardware={"gpu": None}, engine={"backend": "openai"}, **served)
    assert incomparable(here, there) == incomparable(there, here) == []
    assert "target: in-process against http" in differs_by(here, there)
    assert "CPU model, microcode" in unknown_facts(here, there)[0]
    on_gpu = result(3, hardware={"gpu": "H100"}, engine={"backend": "openai"}, **served)
    assert [one.condition for one in incomparable(here, on_gpu)] == [MACHINE]
    elsewhere = {**served, "machine": "client: B, 2 CPUs"}
    (difference,) = incomparable(here, result(4, hardware={"gpu": None}, engine={}, **elsewhere))
    assert difference.said.endswith("(machine: A CPU, 2 CPUs and client: B, 2 CPUs)")
