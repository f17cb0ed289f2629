"""Pooling of a step's hidden states: each pooled row's share of its prompt's vector."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..scheduling.step_plan import ScheduledRow
from .step_layout import StepLayout

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
        if row.pooling is None or not _contributes(row):
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


def _contributes(row: ScheduledRow) -> bool:
    """Whether the tokens of a row count: the first for cls, the last for last."""
    assert row.pooling is not None
    if row.pooling.mode == "cls":
        return row.start == 0
    return row.pooling.mode != "last" or row.end == row.num_prompt_tokens
