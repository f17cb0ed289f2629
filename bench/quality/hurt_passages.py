"""Passages that lost most: runs of positions with the highest KL divergence, as text with a value a token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from .positions import QualitySeries

NUM_PASSAGES = 5
PASSAGE_TOKENS = 40


class Decodes(Protocol):
    """The tokenizer interface needed here."""

    def decode(self, token_ids: Sequence[int], /) -> Any: ...


def hurt_passages(series: QualitySeries, tokenizer: Decodes) -> list[dict[str, Any]] | None:
    """The runs of up to 40 positions with the largest sums of KL divergence, which do not overlap.

    None without a reference; none where the models are the same.
    """
    kl = series.column("kl")
    if kl is None:
        return None
    windows, positions = series.needed("window"), series.needed("position")
    token_ids = series.needed("token_id")
    passages = []
    for begin, end in worst_runs(kl, windows):
        passages.append(
            {
                "window": int(windows[begin]),
                "position": int(positions[begin]),
                "mean_kl_nats": float(kl[begin:end].mean()),
                "tokens": [str(tokenizer.decode([int(token)])) for token in token_ids[begin:end]],
                "kl_nats": [round(float(value), 5) for value in kl[begin:end]],
            }
        )
    return passages


def worst_runs(
    values: np.ndarray,
    windows: np.ndarray,
    *,
    count: int = NUM_PASSAGES,
    length: int = PASSAGE_TOKENS,
) -> list[tuple[int, int]]:
    """Ranges of at most `length` positions of one window with the largest positive sums, in that order."""
    total = np.concatenate([[0.0], np.cumsum(values, dtype=np.float64)])
    last = np.concatenate([np.flatnonzero(np.diff(windows)) + 1, [len(windows)]])
    begins = np.arange(len(values))
    ends = np.minimum(begins + length, last[np.searchsorted(last, begins, side="right")])
    sums = total[ends] - total[begins]
    runs: list[tuple[int, int]] = []
    for index in np.argsort(-sums, kind="stable"):
        begin, end = int(begins[index]), int(ends[index])
        if len(runs) == count or sums[index] <= 0:
            break
        if all(end <= other or begin >= stop for other, stop in runs):
            runs.append((begin, end))
    return runs
