"""Judging one limit on two runs: kept, violated, or undecidable (statistical test and interference)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ..metrics.statistics import (
    CONFIDENCE,
    Effect,
    effect_of_level,
    effect_of_pairs,
    effect_of_runs,
)
from ..page.text import size
from ..record.run_data import RunData
from .gate import Counted, Limit, Measured, Outcome

# False-alarm probability of one gate, divided over its limits (family-wise error rate).
FALSE_ALARMS = 0.02
RESAMPLES = 500
# From this many passes on, the measured spread between passes is used; it includes the spread over requests,
# as every pass sends the same prompts. With fewer passes, at least the assumed spread: tails are heavy.
RUNS_THAT_SHOW_SPREAD = 3
FEW_PASSES_CV = 0.12
# Restarting the same model changes its speed (addresses, caches, clock state, other virtual machines), and
# averaging over the passes of one start does not remove that. In the recorded starts this variance is about
# as large as that between passes, and never below the second number.
START_VARIANCES = 1.0
START_CV = 0.015
# Background load above this is named as the reason of a missing verdict.
BUSY = 0.05


@dataclass(frozen=True, slots=True)
class Delta:
    """The outcome of a limit on a measured metric, with the change and its confidence interval.

    `change` is relative to the base; `worse` is the same as a slowdown: positive is worse. `low` and
    `high` bound `change` with 90 % confidence (95 % on each side). `allowed` is the limit in terms of
    `worse`, or None where the limit is on the value itself.
    """

    key: str
    label: str
    unit: str
    base: float
    new: float
    change: float
    worse: float
    low: float
    high: float
    limit: str
    allowed: float | None
    outcome: Outcome
    reason: str


@dataclass(frozen=True, slots=True)
class Check:
    """The outcome of a limit on a deterministic quantity, or on a score with its 95 % interval: of the value,
    or of its change where the limit is relative."""

    key: str
    label: str
    unit: str
    base: float | None
    new: float | None
    limit: str
    outcome: Outcome
    reason: str
    interval: tuple[float | None, float | None] | None = None


def check(counted: Counted, limit: Limit, base: RunData, new: RunData) -> Check:
    """Check a deterministic quantity against its limit."""
    before, after = counted.read(base.result), counted.read(new.result)
    words = (counted.key, counted.label, counted.unit, before, after, limit.text)
    if after is None or (limit.relative and before is None):
        side = "new" if after is None else "base"
        reason = f"{counted.label} has a limit but no value in the {side} run"
        return Check(*words, Outcome.NO_VERDICT, reason)
    value, said = after, f"{counted.label} is {shown(after, counted.unit)}"
    if limit.relative and before is not None:
        value = _relative(before, after)
        said = f"{counted.label} went from {shown(before, counted.unit)} to "
        said += f"{shown(after, counted.unit)} ({value * 100:+.2f} %)"
    if value <= limit.bound if limit.at_most else value >= limit.bound:
        return Check(*words, Outcome.PASS, said)
    return Check(*words, Outcome.REGRESSION, f"{said}, beyond the limit {limit.text}")


def shown(value: float, unit: str) -> str:
    """A deterministic value with its unit, as text."""
    return size(value) if unit == "bytes" else f"{value:,.6g} {unit}".rstrip()


def _relative(before: float, after: float) -> float:
    if before == 0:
        return 0.0 if after == 0 else math.inf
    return after / before - 1


def judge(
    measured: Measured,
    limit: Limit,
    base: RunData,
    new: RunData,
    *,
    num_limits: int,
    same: bool = False,
) -> Delta | None:
    """Test a measured metric against its limit; None where a run has no value for it.

    Violated: beyond the limit, and significantly worse than no change at the level divided over
    `num_limits` limits. Kept: within the limit, with enough precision to detect a violation. `same`: base and
    new are the same run, so the difference is exactly zero.
    """
    before, after = base.values(measured.key), new.values(measured.key)
    if not before or not after:
        return None
    change = Effect(0.0, 0.0, math.inf) if same else effect_between(measured, base, new)
    effect = change if limit.relative else effect_of_level(after, limit.bound)
    sign = 1 if limit.at_most else -1
    allowed = sign * math.log1p(limit.bound) if limit.relative else 0.0
    slower = sign * effect.log_ratio
    reach = effect.half_width(CONFIDENCE)
    alarm = effect.half_width(1 - FALSE_ALARMS / num_limits)
    excused, hidden = (0.0, 0.0) if same else interference(base, new, relative=limit.relative)
    direction = "higher" if change.relative > 0 else "lower"
    said = f"{measured.label} is {abs(change.relative):.1%} {direction}"
    if not limit.relative:
        said = f"{measured.label} is {geometric_mean(after):,.4g} {measured.unit}"
    unclear = reach + hidden
    if slower > allowed and slower - alarm - excused > min(allowed, 0.0):
        outcome, reason = Outcome.REGRESSION, f"{said}, beyond the limit {limit.text}"
    elif slower + unclear <= allowed or (
        limit.relative and slower <= allowed and unclear <= allowed
    ):
        outcome, reason = Outcome.PASS, said
    else:
        outcome = Outcome.NO_VERDICT
        reason = f"{said} ± {math.expm1(reach):.1%}: too noisy to tell the limit {limit.text}"
        if busy := busy_words(base, new):
            reason += f" ({busy})"
    return Delta(
        key=measured.key,
        label=measured.label,
        unit=measured.unit,
        base=geometric_mean(before),
        new=geometric_mean(after),
        change=change.relative,
        worse=math.expm1(sign * change.log_ratio),
        low=math.expm1(change.log_ratio - change.half_width(CONFIDENCE)),
        high=math.expm1(change.log_ratio + change.half_width(CONFIDENCE)),
        limit=limit.text,
        allowed=math.expm1(allowed) if limit.relative else None,
        outcome=outcome,
        reason=reason,
    )


def geometric_mean(values: Sequence[float]) -> float:
    return float(np.exp(np.mean(np.log(values))))


def is_paired(base: RunData, new: RunData) -> bool:
    """Whether the passes of the two runs were interleaved (paired), so that both saw the same machine."""
    pairs = [side.result["llmopt"]["arms"] for side in (base, new)]
    passes = [side.result["llmopt"]["runs"] for side in (base, new)]
    return bool(pairs[0]) and pairs[0] == pairs[1] and len(passes[0]) == len(passes[1]) > 1


def other_load(data: RunData) -> float:
    """Background load: fraction of the CPUs used by other processes, mean over passes; 0 where unknown."""
    loads = [run.get("other_load") for run in data.result["llmopt"]["runs"]]
    known = [load for load in loads if load is not None]
    return sum(known) / len(known) if known else 0.0


def interference(base: RunData, new: RunData, *, relative: bool) -> tuple[float, float]:
    """(slowdown that background load may have caused in `new`, slowdown it may have masked in `base`), as
    logarithms.

    If other processes use a fraction L of the CPUs, 1 − L is left: they may account for a slowdown of up to
    1 / (1 − L). Paired runs saw the same background load, so no correction is made.
    """
    if relative and is_paired(base, new):
        return 0.0, 0.0
    worst = 0.95  # at 1 the run could not have finished
    excused = -math.log1p(-min(other_load(new), worst))
    return excused, -math.log1p(-min(other_load(base), worst)) if relative else 0.0


def busy_words(base: RunData, new: RunData) -> str | None:
    """Background load of each run as text; None where it was low."""
    if is_paired(base, new):
        return None
    loads = {side: other_load(data) for side, data in (("base", base), ("new", new))}
    busy = [
        f"{load:.0%} of the CPUs during the {side} run"
        for side, load in loads.items()
        if load > BUSY
    ]
    if not busy:
        return None
    return f"background load: {', '.join(busy)}; --against interleaves the runs"


def effect_between(measured: Measured, base: RunData, new: RunData) -> Effect:
    """The change of a metric with its uncertainty: paired or unpaired, with or without request data."""
    before, after = base.values(measured.key), new.values(measured.key)
    if is_paired(base, new) and len(before) == len(after) > 1:
        return effect_of_pairs(before, after)
    error = 0.0
    if measured.column is not None and min(len(before), len(after)) < RUNS_THAT_SHOW_SPREAD:
        percentile = percentile_of(measured.statistic)
        tables = (base.by_request(measured.column), new.by_request(measured.column))
        error = paired_error(*tables, percentile=percentile)
    effect = effect_of_runs(
        before,
        after,
        error,
        between=START_VARIANCES,
        assumed_cv=FEW_PASSES_CV,
        believed=RUNS_THAT_SHOW_SPREAD,
    )
    return effect.with_error(START_CV * math.sqrt(2))


def percentile_of(statistic: str | None) -> float:
    """The percentile of a statistic; the mean is treated as the median."""
    digits = (statistic or "").removeprefix("p")
    return float(digits) if digits.isdigit() else 50.0


def paired_error(
    base: Mapping[str, Sequence[float]],
    new: Mapping[str, Sequence[float]],
    *,
    percentile: float = 50.0,
    seed: int = 0,
) -> float:
    """Bootstrap standard error of the mean log ratio of a percentile, resampling requests in pairs.

    The same requests are resampled on both sides, so that differences between prompts cancel.
    """
    shared = [request for request in base if request in new]
    passes_base = min((len(base[r]) for r in shared), default=0)
    passes_new = min((len(new[r]) for r in shared), default=0)
    if len(shared) < 2 or not passes_base or not passes_new:
        return 0.0
    tables = [
        np.array([side[request][:passes] for request in shared]).T
        for side, passes in ((base, passes_base), (new, passes_new))
    ]
    rng = np.random.default_rng(seed)
    draws = rng.integers(0, len(shared), size=(RESAMPLES, len(shared)))
    logs = [
        np.log(np.percentile(table[:, draws], percentile, axis=-1)).mean(axis=0) for table in tables
    ]
    return float((logs[1] - logs[0]).std(ddof=1))
