"""Verdict of paired starts: one number per start and metric, paired log ratios, Student's t.

A start is a fresh process that loads the weights and makes a block of passes. Starts of the base and of the
new build alternate, so that each pair saw the same mood of the machine; passes of one start share its
addresses, caches and clocks, so they count as one value, their median.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ...quant.base.errors import BadInput
from ..metrics.statistics import Effect
from ..record.run_data import RunData
from .compare import (
    Comparison,
    QualityGate,
    failed_more,
    incomparable,
    judge_quality,
    memory_changes,
    remarks,
)
from .gate import Limit, Measured, Outcome
from .judge import Check, Delta, check

# Probability that a gate of several limits reports a regression that is none, and that a limit passes
# although the metric is worse by it.
FALSE_REGRESSION = 0.01
FALSE_PASS = 0.05
MIN_PAIRS = 4


def judge_starts(
    base: Sequence[RunData],
    new: Sequence[RunData],
    *,
    limits: Sequence[Limit],
    quality: QualityGate | None = None,
    max_pairs: int,
    final: bool = False,
) -> Comparison:
    """Judge the starts `new` against the starts `base`, of which `base[i]` and `new[i]` are a pair.

    Args:
        max_pairs: how many pairs there can be at most.
        final: no more pairs follow.

    Raises:
        BadInput: no pairs, or starts without a partner.
    """
    if not base or len(base) != len(new):
        raise BadInput(
            f"starts: {len(base)} of the base and {len(new)} of the new build, not pairs"
        )
    num_pairs = len(base)
    is_last = final or num_pairs >= max_pairs
    blank = Comparison(Outcome.NO_VERDICT, (), base[0].name, new[0].name, 0.0, num_pairs=num_pairs)
    notes = remarks(base[0].result, new[0].result)
    if blocking := [
        reason
        for a, b in zip(base, new, strict=True)
        for reason in incomparable(a.result, b.result)
    ]:
        return replace(blank, reasons=tuple(dict.fromkeys(blocking)), notes=notes)
    changes, faults, gaps = judge_quality(base[0].result, new[0].result, quality or QualityGate())
    memory = memory_changes(base[0].result, new[0].result)
    num_measured = sum(isinstance(limit.quantity, Measured) for limit in limits)
    deltas: list[Delta] = []
    checks: list[Check] = []
    for limit in limits:
        if not isinstance(limit.quantity, Measured):
            checks.append(check(limit.quantity, limit, base[0], new[0]))
            continue
        delta = judge_pairs(limit.quantity, limit, base, new, num_limits=num_measured)
        if delta is None:
            gaps.append(f"{limit.quantity.label} has a limit but no value in every start")
        else:
            deltas.append(delta)
    faults += [
        reason
        for a, b in zip(base, new, strict=True)
        if (reason := failed_more(a.result, b.result))
    ][:1]
    rows = [*deltas, *checks]
    broken = [row.reason for row in rows if row.outcome is Outcome.REGRESSION] + faults
    unclear = [row.reason for row in rows if row.outcome is Outcome.NO_VERDICT] + gaps
    undecided = any(delta.outcome is Outcome.NO_VERDICT for delta in deltas)
    comparison = replace(
        blank,
        deltas=tuple(deltas),
        checks=tuple(checks),
        quality=changes,
        memory=memory,
        notes=notes,
        settled=is_last or bool(broken) or not undecided,
    )
    if broken:
        return replace(comparison, outcome=Outcome.REGRESSION, reasons=tuple(broken))
    if unclear:
        return replace(comparison, outcome=Outcome.NO_VERDICT, reasons=tuple(unclear))
    said = f"all {len(limits)} limits are kept" if len(limits) > 1 else "the limit is kept"
    return replace(comparison, outcome=Outcome.PASS, reasons=(said,))


def value_of_start(start: RunData, key: str) -> float | None:
    """A metric's median over the undisturbed passes of a start; over all of them if all were disturbed."""
    passes = start.result["llmopt"]["runs"]
    kept = [one for one in passes if not one.get("disturbed")] or passes
    values = [value for one in kept if (value := one.get(key)) is not None]
    return float(np.median(values)) if values else None


def paired_differences(
    measured: Measured, limit: Limit, base: Sequence[RunData], new: Sequence[RunData]
) -> np.ndarray | None:
    """The change of each pair: log(new / base), or log(new / bound) for a limit on the value itself.

    Waiting time is near 0, so its change is relative to the wall time of the base.
    """
    before = [value_of_start(start, measured.key) for start in base]
    after = [value_of_start(start, measured.key) for start in new]
    if None in after or (None in before and limit.relative):
        return None
    values = np.asarray(after, float)
    if measured.key == "waiting_seconds" and limit.relative:
        walls = np.asarray([value_of_start(start, "duration") for start in base], float)
        return (values - np.asarray(before, float)) / walls
    return np.log(values) - (
        np.log(np.asarray(before, float)) if limit.relative else math.log(limit.bound)
    )


def judge_pairs(
    measured: Measured,
    limit: Limit,
    base: Sequence[RunData],
    new: Sequence[RunData],
    *,
    num_limits: int,
) -> Delta | None:
    """One limit on the pairs: non-inferiority within the limit, or worse than the limit; else undecided."""
    changes = paired_differences(measured, limit, base, new)
    if changes is None or not np.isfinite(changes).all():
        return None
    is_linear = measured.key == "waiting_seconds" and limit.relative
    sign = 1 if limit.at_most else -1
    bound = limit.bound if is_linear else math.log1p(limit.bound) if limit.relative else 0.0
    allowed = sign * bound
    count = len(changes)
    error = float(changes.std(ddof=1)) / math.sqrt(count) if count > 1 else math.inf
    effect = Effect(float(changes.mean()), error, count - 1)
    slower = sign * effect.log_ratio
    share = (lambda value: value) if is_linear else math.expm1
    outcome, reach = Outcome.NO_VERDICT, math.inf
    if count >= MIN_PAIRS:
        reach = effect.half_width(1 - FALSE_PASS)
        if slower - effect.half_width(1 - FALSE_REGRESSION / num_limits) > allowed:
            outcome = Outcome.REGRESSION
        elif slower + reach <= allowed:
            outcome = Outcome.PASS
    said = f"{measured.label} changes by {share(effect.log_ratio):+.1%}"
    if outcome is Outcome.REGRESSION:
        said += f", beyond the limit {limit.text}"
    elif outcome is Outcome.NO_VERDICT:
        said += f" ± {share(reach):.1%}" if math.isfinite(reach) else ""
        said += f": {count} pairs of starts do not tell the limit {limit.text}"
    before = [value_of_start(start, measured.key) or 0.0 for start in base]
    after = [value_of_start(start, measured.key) or 0.0 for start in new]
    low, high = effect.log_ratio - reach, effect.log_ratio + reach
    return Delta(
        key=measured.key,
        label=measured.label,
        unit=measured.unit,
        base=float(np.median(before)),
        new=float(np.median(after)),
        change=share(effect.log_ratio),
        worse=share(slower),
        low=share(low) if math.isfinite(low) else -1.0,
        high=share(high) if math.isfinite(high) else math.inf,
        limit=limit.text,
        allowed=share(allowed) if limit.relative else None,
        outcome=outcome,
        reason=said,
    )
