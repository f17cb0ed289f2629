"""Verdict of paired starts: non-inferiority within each limit, or regression beyond it, by a sequential
rank test.

A start is a fresh process that loads the weights and makes a block of passes. Starts of the base and of the
new build alternate, so that each pair saw the same mood of the machine; passes of one start share its
addresses, caches and clocks, so they count as one value.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import NormalDist

import numpy as np

from ...quant.base.errors import BadInput
from ..metrics.statistics import centre_interval, hodges_lehmann
from ..record.comparable import incomparable, unknown_facts
from ..record.result import RunData
from .compare import (
    Comparison,
    checks_of,
    conclude,
    memory_changes,
    other_lengths,
    remarks,
    scored_start,
)
from .counts import failure_words
from .judge import Delta, change_words
from .limits import Limit, Measured, Outcome, with_waiting
from .quality_checks import QualityGate, quality_changes
from .sequential import (
    CODES,
    FALSE_PASS,
    FALSE_REGRESSION,
    OperatingCurve,
    OperatingPoint,
    SequentialPlan,
    decide,
    operating_points,
)
from .start_values import PairedChanges, paired_changes
from .unjudgeable import unjudgeable
from .verdict_words import pairs_to_settle

MIN_PAIRS_FOR_CURVE = 5


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

    It may be asked after every pair: the test knows its looks, and their errors add up to those it states.

    Args:
        max_pairs: how many pairs there can be at most.
        final: no more pairs follow.

    Raises:
        BadInput: no pairs, or starts without a partner.
    """
    if not base or len(base) != len(new):
        raise BadInput(f"starts: {len(base)} of the base and {len(new)} of the new build, no pairs")
    limits = with_waiting(limits)
    num_measured = sum(isinstance(limit.quantity, Measured) for limit in limits)
    last = len(base) if final else max(max_pairs, len(base))
    plan = SequentialPlan(max(max_pairs, len(base)), num_measured, last)
    comparison = Comparison(
        Outcome.NO_VERDICT,
        (),
        base[0].name,
        new[0].name,
        0.0,
        notes=remarks(base[0].result, new[0].result),
        num_pairs=len(base),
        unknown=unknown_facts(base[0].result, new[0].result),
    )
    blocking = [
        reason
        for a, b in zip(base, new, strict=True)
        for reason in incomparable(a.result, b.result)
    ]
    if blocking:
        return replace(comparison, reasons=tuple(dict.fromkeys(blocking)))
    scored = scored_start(base), scored_start(new)
    faults: list[str] = []
    gaps: list[str] = []
    if failed := failure_words(base, new):
        (faults if failed[0] is Outcome.REGRESSION else gaps).append(failed[1])
    if (reason := other_lengths(base, new)) and num_measured:
        gaps.append(reason)
    rows: list[Delta | str] = []
    curves: list[OperatingCurve] = []
    for limit in limits:
        if isinstance(limit.quantity, Measured):
            row, curve = judge_limit(limit.quantity, limit, base, new, plan)
            rows.append(row)
            curves += [curve] if curve else []
    deltas = tuple(row for row in rows if isinstance(row, Delta))
    gaps += [row for row in rows if isinstance(row, str)]
    comparison = replace(
        comparison,
        deltas=deltas,
        checks=checks_of([*limits, *(quality.limits if quality else ())], base, new),
        quality=quality_changes(*scored),
        memory=memory_changes(scored[0].result, scored[1].result),
        curves=tuple(curves),
    )
    said = f"all {len(limits)} limits are kept" if len(limits) > 1 else "the limit is kept"
    comparison = conclude(comparison, faults, gaps, said)
    waits = any(delta.outcome is Outcome.NO_VERDICT for delta in deltas)
    is_over = final or len(base) >= max_pairs
    return replace(
        comparison, settled=is_over or not waits or comparison.outcome is Outcome.REGRESSION
    )


def judge_limit(
    measured: Measured,
    limit: Limit,
    base: Sequence[RunData],
    new: Sequence[RunData],
    plan: SequentialPlan,
) -> tuple[Delta | str, OperatingCurve | None]:
    """One measured limit on the pairs, and its operating curve; text if it cannot be judged."""
    if why := unjudgeable(measured, base, new):
        return why, None
    paired = paired_changes(limit, base, new)
    if paired is None:
        return f"{measured.label} has a limit but no value in every start", None
    sign = 1 if limit.at_most else -1
    allowed = 0.0
    if limit.relative:
        allowed = sign * (limit.bound if paired.is_share else math.log1p(limit.bound))
    excess = sign * paired.changes - allowed
    code, pairs = decide(excess, plan)
    delta = _delta(measured, limit, paired, allowed, CODES[int(code)], plan)
    delta = replace(delta, num_pairs=int(pairs))
    if len(excess) < MIN_PAIRS_FOR_CURVE:
        return delta, None
    residuals = excess - hodges_lehmann(excess)
    points = tuple(
        OperatingPoint(
            paired.relative(worse),
            found[Outcome.PASS],
            found[Outcome.REGRESSION],
            found[Outcome.NO_VERDICT],
            mean_pairs,
        )
        for worse, found, mean_pairs in operating_points(residuals, allowed, plan)
    )
    curve = OperatingCurve(measured.key, measured.label, limit.text, plan.looks[-1], points)
    return delta, curve


def _delta(
    measured: Measured,
    limit: Limit,
    paired: PairedChanges,
    allowed: float,
    outcome: Outcome,
    plan: SequentialPlan,
) -> Delta:
    """The change with its 90 % interval and its sentence."""
    sign = 1 if limit.at_most else -1
    change = hodges_lehmann(paired.changes)
    low, high = centre_interval(paired.changes, FALSE_PASS)
    relative = paired.relative
    said = f"{measured.label} {change_words(relative(change), paired.is_share)}"
    shown, lowest, highest = change, low, high
    if not limit.relative:
        # The limit is on the value; the change from the base is shown beside it.
        moves = paired.new - paired.base if paired.is_share else np.log(paired.new / paired.base)
        shown, (lowest, highest) = hodges_lehmann(moves), centre_interval(moves, FALSE_PASS)
        said = f"{measured.label} is {float(np.median(paired.new)):,.4g} {measured.unit}"
    more = None
    if outcome is Outcome.REGRESSION:
        said += f", beyond the limit {limit.text}"
    elif outcome is Outcome.NO_VERDICT:
        if np.isfinite(high - low):
            error = (high - low) / 2 / NormalDist().inv_cdf(1 - FALSE_PASS)
            levels = (FALSE_REGRESSION / max(plan.num_limits, 1), FALSE_PASS)
            more = pairs_to_settle(sign * change - allowed, error, len(paired.changes), levels)
            said += f" ± {(relative(high) - relative(low)) / 2:.1%}" if limit.relative else ""
        said += f": {len(paired.changes)} pairs of starts do not tell the limit {limit.text}"
    return Delta(
        key=measured.key,
        label=measured.label,
        unit=measured.unit,
        base=float(np.median(paired.base)),
        new=float(np.median(paired.new)),
        change=relative(shown),
        worse=relative(sign * shown),
        low=relative(lowest),
        high=relative(highest),
        limit=limit.text,
        allowed=relative(allowed) if limit.relative else None,
        outcome=outcome,
        reason=said,
        pairs_to_settle=more,
    )
