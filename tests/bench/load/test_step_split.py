"""Breakdown of a decode step: parts of a real engine, and the explanation from hand-made numbers."""

from __future__ import annotations

from typing import Any, get_args

import pytest
from llmopt.bench.load.inprocess import (
    PART_OF,
    InjectedDelay,
    mean_split,
)
from llmopt.bench.metrics.step_words import PARTS, reason_in_words, split_sentence
from llmopt.bench.options.options import BenchOptions
from llmopt.bench.page.page import ReportTable
from llmopt.bench.report.parts import shared
from llmopt.bench.session.target_sessions import EngineSession
from llmopt.engine.config.config import SpeculationConfig
from llmopt.engine.execution.step import Phase
from llmopt.engine.execution.step_loop import StepTrace
from llmopt.engine.kernels.attention.dispatch import native_attention

from tests.support.page_parts import tables_of

from ...support.simulated_clock import SAMPLE_SECONDS, simulated_clock

RECORDS = native_attention().reason is None
OPTIONS = BenchOptions(
    num_prompts=4, num_runs=1, output_len=6, quality=False, num_threads=1, max_concurrency=4
)


def split_table(results: dict[str, Any]) -> ReportTable | None:
    return next(iter(tables_of("step_split", results, **shared())), None)


@pytest.mark.parametrize("overlapped", [False, True])
def test_the_parts_of_a_real_step_add_up_and_a_slowed_sampler_shows(overlapped: bool) -> None:
    options = OPTIONS.model_copy(
        update={"slowdown": 50.0, "slowdown_where": "sampler", "async_scheduling": overlapped}
    )
    with simulated_clock():
        session = EngineSession(options)  # captures steps of the clock's times
        assert session.run_pass()
        split = session.finish().result["llmopt"]["step_split"]
    assert set(split["parts_ms"]) == set(PARTS) and split["num_steps"] == 5
    assert split["step_ms"] == pytest.approx(sum(split["parts_ms"].values()))
    assert all(spent > 0 for part, spent in split["parts_ms"].items() if part != "rest")
    # The sampler was slowed on purpose: it shows, and stays slowed.
    assert split["parts_ms"]["sampling"] == pytest.approx(50e3 * SAMPLE_SECONDS, rel=0.1)
    assert session.engine.hook == InjectedDelay("sample", 50.0) and session.engine.recorder is None
    engine = session.engine
    for owner, name in (
        (engine, "step"),
        (engine.scheduler, "schedule"),
        (engine.runner._sampler, "begin"),
    ):
        assert name not in vars(owner)


@pytest.mark.parametrize("eager", [False, True])
def test_the_split_says_whether_steps_are_replayed(eager: bool) -> None:
    session = EngineSession(OPTIONS.model_copy(update={"enforce_eager": eager}))
    assert session.run_pass()
    result = session.finish().result
    split = result["llmopt"]["step_split"]
    replayed = RECORDS and not eager
    assert split["replayed_steps"] == (5 if replayed else 0)
    assert (split_sentence(result) or "").endswith(
        "captured graph in 100 % of the steps." if replayed else "The forward pass is eager."
    )


def test_drafting_is_a_part_of_steps_that_speculate() -> None:
    session = EngineSession(OPTIONS.model_copy(update={"speculation": SpeculationConfig("ngram")}))
    assert session.run_pass()
    result = session.finish().result
    parts = result["llmopt"]["step_split"]["parts_ms"]
    assert set(parts) == {*PARTS, "drafting"} and parts["drafting"] > 0
    table = split_table({"a": result})
    assert table is not None and "drafting" in [row[0] for row in table.rows]


def trace(seconds: float, phases: dict[Phase, float], *, replayed: bool) -> StepTrace:
    counts = dict.fromkeys(
        ("prefill_tokens", "decode_tokens", "num_rows", "num_preemptions", "kv_blocks_used"), 1
    )
    return StepTrace(
        start=0.0,
        schedule_seconds=0.0,
        execute_seconds=0.0,
        update_seconds=0.0,
        step_seconds=seconds,
        kv_slots_unfilled=0,
        replayed=replayed,
        phases=phases,
        **counts,
    )


def test_phases_add_up_to_the_parts() -> None:
    first: dict[Phase, float] = {"schedule": 1e-3, "forward": 4e-3, "sample": 1e-3, "update": 1e-3}
    second: dict[Phase, float] = {"forward": 2e-3, "fetch_tokens": 1e-3, "prepare_inputs": 1e-3}
    split = mean_split([trace(9e-3, first, replayed=True), trace(5e-3, second, replayed=False)])
    assert split["parts_ms"] == pytest.approx(
        {
            "scheduling": 1,
            "preparing": 0.5,
            "kernels": 3,
            "sampling": 1,
            "detokenizing": 0,
            "rest": 1.5,
        }
    )
    assert (split["num_steps"], split["replayed_steps"]) == (2, 1)
    assert split["step_ms"] == pytest.approx(7)
    assert set(PART_OF) == set(get_args(Phase))


def split_of(**parts_ms: float) -> dict[str, Any]:
    parts = dict.fromkeys(PARTS, 0.1) | parts_ms
    return {"num_steps": 9, "step_ms": sum(parts.values()), "parts_ms": parts}


def result(kernels: float, weights: int) -> dict[str, Any]:
    return {
        "llmopt": {
            "step_split": split_of(kernels=kernels),
            "memory": {"weight_bytes": weights},
            "roofline": {"ceilings": {"bandwidth": 1e9}},
        }
    }


def test_the_explanation() -> None:
    base, slower, faster = result(1.5, 1_000_000), result(2.5, 400_000), result(0.9, 400_000)
    # 600,000 bytes at 1e9 bytes a second are 0.6 ms of a step of 2 ms.
    said = reason_in_words(base, slower) or ""
    assert "take 0.600 ms to read" in said and "30.0 % of the base's decode step of 2.00 ms" in said
    assert "1.00 ms longer; most of it is kernels (+1.00 ms): dequantization" in said
    assert "0.60 ms shorter; most of it is kernels (-0.60 ms)." in (
        reason_in_words(base, faster) or ""
    )
    assert reason_in_words(slower, base) is None
    # Of several small moves none is most of it, and one against the whole explains nothing.
    faster["llmopt"]["step_split"] = split_of(kernels=1.3, preparing=0.0, sampling=0.0)
    assert "0.40 ms shorter; most of it is kernels (-0.20 ms)." in (
        reason_in_words(base, faster) or ""
    )
    faster["llmopt"]["step_split"] = split_of(kernels=2.5, preparing=0.0, sampling=0.0) | {
        "step_ms": 1.0
    }
    assert "1.00 ms shorter; the largest part of it is preparing" in (
        reason_in_words(base, faster) or ""
    )
    base["llmopt"]["step_split"] |= {"replayed_steps": 9}
    slower["llmopt"]["step_split"] |= {"replayed_steps": 0}
    assert "replayed from captured graphs, this one is eager." in (
        reason_in_words(base, slower) or ""
    )
    # A sentence of longer steps beside a table of a shorter TPOT explains nothing.
    tpots = ({"median_tpot_ms": 2.0}, {"median_tpot_ms": 1.9})
    assert reason_in_words(base | tpots[0], slower | tpots[1]) is None
    assert reason_in_words(base | tpots[1], slower | tpots[0])
    base["llmopt"]["step_split"] = None
    assert reason_in_words(base, slower) is None
    assert split_table({"a": base}) is None and split_sentence(base) is None


def test_the_table_and_the_sentence() -> None:
    table = split_table({"a": result(1.5, 1), "b": result(2.5, 1)})
    assert table is not None and list(table.header) == ["ms of a decode step", "a", "b", ""]
    assert [row[1:3] for row in table.rows if row[0] == "kernels"] == [["1.50", "2.50"]]
    assert table.rows[-1][:3] == ["whole step", "2.00", "3.00"]
    assert (split_sentence(result(1.5, 1)) or "").startswith(
        "Of the 2.00 ms of a decode step 75 % go to kernels"
    )
