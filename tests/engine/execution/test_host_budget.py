"""The host's budget for a decode step with the model stubbed, in calls of functions: no machine changes those."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import pytest
from llmopt.engine.execution import decode_inputs
from llmopt.engine.scheduling.step_plan import DecodeRows

from ...support.host_budget import BLOCK_SIZE, begin, calls_of_steps, stubbed_engine
from ...support.native_paths import native_paths

CONTEXT = 32
PER_ROW = (8.0, 12.0)
"""Python's and C's functions that a row may call in a step: of scheduling, inputs, tokens and outputs."""
PER_STEP = {"cpu": (90, 40), "gpu": (140, 110)}
"""Those of a step whatever its rows, where operations on a GPU's static inputs are calls too."""


def calls(loop: str, batch: int) -> tuple[float, float]:
    """Of a mean step, over all phases of a block."""
    engine = stubbed_engine(loop, batch, CONTEXT, BLOCK_SIZE)
    begin(engine, batch, CONTEXT, BLOCK_SIZE)
    counted = calls_of_steps(engine, BLOCK_SIZE)
    engine.close()
    return counted


@pytest.mark.parametrize("loop", PER_STEP)
def test_a_decode_step_stays_in_its_budget_of_calls(
    loop: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if loop == "cpu" and not native_paths():
        pytest.skip("the budget is that of a step of C kernels")
    # A clock in C, whose calls count once, also where a plugin has replaced `perf_counter`.
    monkeypatch.setattr("time.perf_counter", time.thread_time)
    few, many = calls(loop, 4), calls(loop, 20)
    per_row = [(b - a) / 16 for a, b in zip(few, many, strict=True)]
    per_step = [a - 4 * row for a, row in zip(few, per_row, strict=True)]
    assert all(count <= limit for count, limit in zip(per_row, PER_ROW, strict=True)), per_row
    assert all(count <= limit for count, limit in zip(per_step, PER_STEP[loop], strict=True)), (
        per_step
    )
    assert per_row[0] > 1, "the rows were counted"


def test_rows_are_made_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = stubbed_engine("cpu", 3, CONTEXT, BLOCK_SIZE)
    begin(engine, 3, CONTEXT, BLOCK_SIZE)

    def refuse(self: Any, place: int) -> None:
        raise AssertionError("a step that goes on from the one before made a row")

    monkeypatch.setattr(DecodeRows, "_row", refuse)
    assert all(len(engine.step()) == 3 for _ in range(BLOCK_SIZE))
    engine.close()


def test_nothing_but_new_blocks_is_copied_to_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = stubbed_engine("gpu", 2, CONTEXT, 2 * BLOCK_SIZE)
    begin(engine, 2, CONTEXT, 2 * BLOCK_SIZE)
    copied: list[list[list[int]]] = []
    packed = decode_inputs.packed

    def watched(lists: Sequence[Sequence[int]], device: Any) -> Any:
        copied.append([list(items) for items in lists])
        return packed(lists, device)

    monkeypatch.setattr(decode_inputs, "packed", watched)
    monkeypatch.setattr(decode_inputs, "to_device", None)
    for _ in range(BLOCK_SIZE):
        engine.step()
    # The two sequences are at different places of a block: each takes one, in a step of its own.
    assert sorted(rows for _, _, rows, _ in copied) == [[0], [1]]
    assert all(len(items) == 1 for lists in copied for items in lists)
    engine.close()
