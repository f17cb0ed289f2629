"""Pooling of prompts: shares of each step's hidden states, joined to a vector."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..scheduling.outputs import RequestOutput
from ..scheduling.request import Request
from ..scheduling.scheduler import Scheduler
from ..scheduling.step_plan import DecodeRows, ScheduledRow, StepPlan
from .step import StepLayout, StepResult

Logits = Callable[[torch.Tensor], torch.Tensor]

_SHARES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "mean": lambda states: states.sum(dim=0, dtype=torch.float32),
    "max": lambda states: states.amax(dim=0),
    "cls": lambda states: states[0],
    "last": lambda states: states[-1],
}


def pooled_rows(
    layout: StepLayout, hidden: torch.Tensor, width: int | None, logits: Logits
) -> dict[str, list[float]]:
    """The share of each pooled row of the step, by sequence: a sum, a maximum or a state, float32 [width].

    `hidden` [tokens, ...] holds the final states in its first `width` columns; None: it holds logits. One
    copy to the host brings them all. Rows that contribute nothing have no entry.
    """
    names: list[str] = []
    shares: list[torch.Tensor] = []
    for row, begin in zip(layout.rows, layout.begins, strict=True):
        if row.pooling is None or not _contributes_to_vector(row):
            continue
        rows = hidden[begin : begin + row.num_tokens]
        if row.pooling.token_ids:
            share = logits(rows[-1:])[0, list(row.pooling.token_ids)]
        else:
            share = _SHARES[row.pooling.mode](rows[:, :width])
        names.append(row.sequence_id)
        shares.append(share.float())
    if not shares:
        return {}
    values = torch.cat(shares).cpu().split([share.numel() for share in shares])
    return {name: share.tolist() for name, share in zip(names, values, strict=True)}


def _contributes_to_vector(row: ScheduledRow) -> bool:
    """Whether the tokens of a row count: the first for cls, the last for last."""
    assert row.pooling is not None
    if row.pooling.mode == "cls":
        return row.start == 0
    return row.pooling.mode != "last" or row.end == row.num_prompt_tokens


@dataclass(slots=True)
class _Pooled:
    request: Request
    vector: list[float]


class PooledPrompts:
    """The vectors of pooled prompts that are being computed, by sequence.

    A prompt may take several steps, and starts again after a preemption: a row from position 0 drops what
    there was.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._pooled: dict[str, _Pooled] = {}

    def keep(self, plan: StepPlan, result: StepResult) -> None:
        """Take the shares of a step, before the scheduler's update ends its requests."""
        if isinstance(plan.rows, DecodeRows):
            return
        for row in plan.rows:
            if row.pooling is None or (request := self._scheduler.request_of(row)) is None:
                continue
            pooled = self._pooled.get(row.sequence_id)
            if pooled is None or row.start == 0:
                pooled = self._pooled[row.sequence_id] = _Pooled(request, [])
            share = result.pooled.get(row.sequence_id)
            if share is not None:
                pooled.vector = _joined(row.pooling.mode, pooled.vector, share)

    def outputs(self, plan: StepPlan) -> list[RequestOutput]:
        """The outputs of the prompts that a step completed."""
        if not self._pooled:
            return []
        ended = [row for row in plan.rows if row.pooling is not None and _is_last(row)]
        return [
            _output(row, pooled)
            for row in ended
            if (pooled := self._pooled.pop(row.sequence_id, None)) is not None
        ]

    def forget(self, sequence_id: str) -> None:
        """Drop an aborted prompt."""
        self._pooled.pop(sequence_id, None)


def _is_last(row: ScheduledRow) -> bool:
    return row.end == row.num_prompt_tokens


def _joined(mode: str, before: list[float], share: list[float]) -> list[float]:
    if not before:
        return share
    if mode == "mean":
        return [a + b for a, b in zip(before, share, strict=True)]
    return [*map(max, before, share)] if mode == "max" else share


def _output(row: ScheduledRow, pooled: _Pooled) -> RequestOutput:
    request = pooled.request
    vector = pooled.vector
    if row.pooling is not None and row.pooling.mode == "mean":
        vector = [value / row.num_prompt_tokens for value in vector]
    return RequestOutput(
        request_id=request.request_id,
        index=0,
        new_token_ids=(),
        text="",
        logprobs=None,
        prompt_logprobs=None,
        finish_reason=request.finish_reason,
        stop_reason=None,
        num_prompt_tokens=request.num_prompt_tokens,
        num_cached_tokens=request.num_cached_tokens,
        num_output_tokens=0,
        times=request.times,
        pooled=tuple(vector),
    )
