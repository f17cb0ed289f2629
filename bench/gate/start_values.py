"""Paired changes of starts: one number per start and metric, one change per pair.

A start's value is the median over its undisturbed passes; a percentile over requests is taken of all of them
together. If the passes of a pair took turns, the change is the mean over them, which the mood of the
machine, that neighbouring passes share, leaves alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..metrics.statistics import requests_for_percentile
from ..record.result import RunData, value_of_pass
from .limits import Limit, Measured

WAITING = "waiting_seconds"
TAILS = {"p90": 90.0, "p95": 95.0, "p99": 99.0}


@dataclass(frozen=True, slots=True)
class PairedChanges:
    """The change of a metric in each pair, in the order of the pairs.

    Attributes:
        base, new: the values of the starts.
        changes: log(new / base), log(new / bound) for a limit on the value itself; of waiting time, which
            is near 0, the difference as a share of the base's wall time.
        is_share: whether `changes` are shares instead of logarithms.
    """

    base: np.ndarray
    new: np.ndarray
    changes: np.ndarray
    is_share: bool

    def relative(self, change: float) -> float:
        """A change as a share: 0.05 is 5 % more."""
        return change if self.is_share else math.expm1(change)


def undisturbed(passes: Sequence[Mapping[str, Any]]) -> list[int]:
    """Numbers of the passes to use: those not rejected by their own evidence; all if all were rejected."""
    kept = [number for number, one in enumerate(passes) if not one.get("disturbed")]
    return kept or list(range(len(passes)))


def value_of_start(start: RunData, key: str) -> float | None:
    """A metric's median over the undisturbed passes of a start; None without a value."""
    passes = start.result["llmopt"]["runs"]
    values = [value_of_pass(passes[number], key) for number in undisturbed(passes)]
    known = [value for value in values if value is not None]
    return float(np.median(known)) if known else None


def tail_of_start(start: RunData, measured: Measured) -> float | None:
    """A percentile over all requests of a start's undisturbed passes."""
    table = start.requests or {}
    if measured.column not in table or "run" not in table:
        return value_of_start(start, measured.key)
    kept = set(undisturbed(start.result["llmopt"]["runs"]))
    rows = zip(table["run"], table[measured.column], strict=True)
    values = [value for number, value in rows if number in kept and value is not None]
    return float(np.percentile(values, TAILS[measured.statistic or ""])) if values else None


def requests_missing(measured: Measured, starts: Sequence[RunData]) -> int:
    """How many more requests a percentile needs before order statistics bound it from above; 0 if none."""
    if measured.statistic not in TAILS:
        return 0
    completed = sum(start.result["completed"] for start in starts)
    return max(0, requests_for_percentile(TAILS[measured.statistic]) - completed)


def too_few_words(measured: Measured, missing: int) -> str:
    """Why a percentile has no verdict, and how many requests would do."""
    needed = requests_for_percentile(TAILS[measured.statistic or ""])
    return f"{measured.label} needs {needed} requests a side: {missing} more"


def paired_changes(
    limit: Limit, base: Sequence[RunData], new: Sequence[RunData]
) -> PairedChanges | None:
    """The changes that a measured limit is about; None if a start has no value."""
    measured = limit.quantity
    assert isinstance(measured, Measured)
    is_tail = measured.statistic in TAILS
    read = tail_of_start if is_tail else lambda start, what: value_of_start(start, what.key)
    after = [read(start, measured) for start in new]
    before = [read(start, measured) for start in base]
    if None in after or None in before:
        return None
    values, known = np.array(after, float), np.array(before, float)
    is_share = measured.key == WAITING
    if is_share:
        walls = np.array([value_of_start(start, "duration") for start in base], float)
        changes = (values - known) / walls if limit.relative else values - limit.bound
    elif not limit.relative:
        changes = np.log(values) - math.log(limit.bound)
    else:
        changes = np.log(values) - np.log(known)
        if not is_tail:
            changes = [
                _change_by_passes(one, other, measured.key, change)
                for one, other, change in zip(base, new, changes, strict=True)
            ]
    changes = np.array(changes, float)
    return PairedChanges(known, values, changes, is_share) if np.isfinite(changes).all() else None


def _change_by_passes(base: RunData, new: RunData, key: str, otherwise: float) -> float:
    """The mean change over the passes of a pair that took turns, from the last one on, as cold ones may be
    left out at the beginning; `otherwise` if they did not."""
    pair = base.result["llmopt"]["arms"]
    if not pair or pair != new.result["llmopt"]["arms"]:
        return otherwise
    passes = [side.result["llmopt"]["runs"][::-1] for side in (base, new)]
    pairs = [
        (value_of_pass(before, key), value_of_pass(after, key))
        for before, after in zip(*passes, strict=False)
        if not before.get("disturbed") and not after.get("disturbed")
    ]
    logs = [math.log(after / before) for before, after in pairs if before and after]
    return float(np.mean(logs)) if logs else otherwise
