"""The engine's steps in a result: totals, table and figure."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from llmopt.bench.metrics.trace import (
    LoadPass,
    StepRecord,
    in_pass,
    step_trace_part,
    write_steps,
)
from llmopt.bench.report.figures import _rate, steps_svg
from llmopt.engine.execution.step_loop import StepTrace

from tests.support.page_parts import sections_of


def step(start: float, prefill: int = 0, decode: int = 2, blocks: int = 5, **other) -> StepTrace:
    return StepTrace(
        start=start,
        schedule_seconds=0.01,
        execute_seconds=0.08,
        update_seconds=0.01,
        step_seconds=0.11,
        prefill_tokens=prefill,
        decode_tokens=decode,
        num_rows=2,
        num_preemptions=other.pop("preempted", 0),
        kv_blocks_used=blocks,
        kv_slots_unfilled=4,
        replayed=not prefill,
    )


@pytest.fixture
def one() -> LoadPass:
    seen = [StepRecord(0.5, 0.6, 2, 2, decode_only=False)]
    steps = [step(100.5, prefill=30, decode=0), step(100.7, preempted=1), step(100.9, blocks=9)]
    one = LoadPass([], 1.2, seen)
    one.engine_steps = in_pass(steps, one)
    return one


def test_times_count_from_the_start_of_the_pass(one):
    assert [s.start for s in one.engine_steps] == pytest.approx([0.5, 0.7, 0.9])
    assert in_pass([], one) == []


def test_totals(one):
    part = step_trace_part([one, one], block_size=8)
    assert part is not None
    assert (part["num_steps"], part["prefill_tokens"], part["decode_tokens"]) == (6, 60, 8)
    assert part["execute_seconds"] == pytest.approx(0.48)
    assert (part["preemptions"], part["peak_kv_blocks"], part["mean_rows"]) == (2, 9, 2)
    assert part["kv_unfilled_share"] == pytest.approx(12 / (19 * 8))
    (section,) = sections_of("step_totals", part)
    assert re.search(r"80\.0.% of their time", section.paragraphs[0])
    assert step_trace_part([LoadPass([], 1.0)], 8) is None


def test_the_table_has_every_step_of_every_pass(one, tmp_path: Path):
    write_steps(tmp_path / "steps.parquet", [one, one])
    table = pq.read_table(tmp_path / "steps.parquet").to_pydict()
    assert table["run"] == [0, 0, 0, 1, 1, 1]
    assert table["prefill_tokens"] == [30, 0, 0] * 2
    assert table["replayed"] == [False, True, True] * 2 and "phases" not in table
    write_steps(tmp_path / "none.parquet", [LoadPass([], 1.0)])
    assert not (tmp_path / "none.parquet").exists()


def test_the_area_under_the_rate_is_the_tokens():
    starts, ends = np.array([0.1, 0.4, 0.45]), np.array([0.3, 0.45, 0.9])
    edges = np.linspace(0, 1, 8)
    rate = _rate([30, 4, 9], starts, ends, edges)
    assert (rate * np.diff(edges)).sum() == pytest.approx(43)
    assert rate[-1] * (edges[-1] - edges[-2]) == pytest.approx(9 * (0.9 - 6 / 7) / 0.45)


def test_the_figure_draws_both_kinds_and_the_preemption(one):
    svg = steps_svg(one)
    words = re.sub(r"<[^>]+>", " ", svg)
    assert {"decode", "prefill", "preemption", "KV blocks"} <= {
        *re.findall(r"decode|prefill|preemption|KV blocks", words)
    }
    one.engine_steps = [s for s in one.engine_steps if not s.num_preemptions]
    assert "preemption" not in steps_svg(one)
