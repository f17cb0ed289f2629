"""Evidence on a metric: paired starts by a sequential rank test, two single runs by Student's t.

A start is a fresh process that loads the weights and makes a block of passes. Starts of the base and of the
new build alternate, so that each pair saw the machine in the same state. Passes of one start share its
addresses, caches and clocks, so they count as one value: the median over its undisturbed passes, or a
percentile over all their requests. If the passes of a pair took turns, the change is the mean over them, or
the median for CPU time.

A single run is one start, judged over its passes, paired if they took turns: how far two starts of the
same build differ is assumed, and a note says so. Paired starts measure it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import NormalDist
from typing import Any

import numpy as np

from ..metrics.statistics import (
    Effect,
    centre_interval,
    effect_of_level,
    effect_of_pairs,
    effect_of_runs,
    hodges_lehmann,
    requests_for_percentile,
)
from ..record.result import RunData, value_of_pass
from .limits import MEASURED, GateOutcome, Limit, Measured
from .verdict import (
    FALSE_PASS,
    FALSE_REGRESSION,
    FIRST_LOOK,
    POWER,
    Evidence,
    Excess,
    MeasuredVerdict,
    OperatingCurve,
    PairedExcess,
    SequentialPlan,
    operating_points,
    pairs_to_settle,
)

WAITING = "waiting_seconds"
TAILS = {"p90": 90.0, "p95": 95.0, "p99": 99.0}
SLO_KEYS = ("request_goodput", "slo_share")
ENERGY_KEYS = ("joules_per_token",)
MIN_PAIRS_FOR_CURVE = 5


def judge_in_starts(
    limit: Limit, base: Sequence[RunData], new: Sequence[RunData], plan: SequentialPlan
) -> tuple[MeasuredVerdict, OperatingCurve | None] | str:
    """The verdict on a limited metric over pairs of starts, with its operating curve; text if it cannot be
    judged."""
    measured = limit.quantity
    assert isinstance(measured, Measured)
    if why := unjudgeable(measured, base, new):
        return why
    paired = paired_changes(limit, base, new)
    if paired is None:
        return f"{measured.label} has a limit but no value in every start"
    before, after, changes = paired
    sign = 1 if limit.at_most else -1
    centre = hodges_lehmann(changes)
    low, high = centre_interval(changes, FALSE_PASS)
    shown = centre, low, high
    if not limit.relative:
        # The limit is on the value; the change from the base is shown next to it.
        moves = after - before if limit.is_share else np.log(after / before)
        shown = hodges_lehmann(moves), *centre_interval(moves, FALSE_PASS)
    evidence = PairedExcess(sign * changes - limit.allowed, plan)
    outcome, num_pairs = evidence.decided
    more, undecided = None, ""
    if np.isfinite(high - low):
        error = (high - low) / 2 / NormalDist().inv_cdf(1 - FALSE_PASS)
        levels = (FALSE_REGRESSION / max(plan.num_limits, 1), FALSE_PASS)
        more = pairs_to_settle(sign * centre - limit.allowed, error, len(changes), levels)
        reach = (limit.as_share(high) - limit.as_share(low)) / 2
        undecided = f" ± {reach:.1%}" if limit.relative else ""
    undecided += f": {len(changes)} pairs of starts do not tell the limit {limit.text}"
    sides = float(np.median(before)), float(np.median(after))
    verdict = _verdict(
        limit,
        evidence,
        undecided,
        sides,
        shown,
        num_pairs=num_pairs,
        pairs_to_settle=more if outcome is GateOutcome.NO_VERDICT else None,
    )
    return verdict, operating_curve(limit, evidence)


def _verdict(
    limit: Limit,
    evidence: Evidence,
    undecided: str,
    sides: tuple[float, float],
    change: tuple[float, float, float],
    **more: Any,
) -> MeasuredVerdict:
    """The verdict on a metric between its values of both `sides`; its `change` (estimate, low, high) is a
    logarithm, or a share for waiting time."""
    what, as_share = limit.quantity, limit.as_share
    size, direction = as_share(change[0]), "higher" if change[0] > 0 else "lower"
    wall = "of the wall time " if limit.is_share else ""
    text = f"{what.label} is {abs(size):.1%} {wall}{direction}"
    if not limit.relative:
        text = f"{what.label} is {sides[1]:,.4g} {what.unit}"
    low, high = as_share(change[1]), as_share(change[2])
    return MeasuredVerdict.of(
        limit,
        text,
        evidence,
        undecided,
        base=sides[0],
        new=sides[1],
        interval=(low, high),
        change=size,
        worse=as_share(change[0] if limit.at_most else -change[0]),
        low=low,
        high=high,
        allowed=as_share(limit.allowed) if limit.relative else None,
        **more,
    )


def operating_curve(limit: Limit, paired: PairedExcess) -> OperatingCurve | None:
    """The chance of each verdict by the true change, at the noise of the pairs; None for few pairs."""
    if len(paired.excess) < MIN_PAIRS_FOR_CURVE:
        return None
    residuals, what = paired.excess - hodges_lehmann(paired.excess), limit.quantity
    points = tuple(
        replace(point, worse=limit.as_share(point.worse))
        for point in operating_points(residuals, limit.allowed, paired.plan)
    )
    return OperatingCurve(what.key, what.label, limit.text, paired.plan.looks[-1], points)


def undisturbed(passes: Sequence[Mapping[str, Any]]) -> list[int]:
    """Numbers of the passes to use: those not rejected by their own evidence; all if all were rejected."""
    kept = [number for number, run in enumerate(passes) if not run.get("disturbed")]
    return kept or list(range(len(passes)))


def value_of_start(start: RunData, key: str) -> float | None:
    """Median of a metric over the undisturbed passes of a start; None without a value."""
    passes = start.result["llmopt"]["runs"]
    values = [value_of_pass(passes[number], key) for number in undisturbed(passes)]
    known = [value for value in values if value is not None]
    return float(np.median(known)) if known else None


def tail_of_start(start: RunData, measured: Measured) -> float | None:
    """A percentile over all requests of a start's undisturbed passes."""
    kept = set(undisturbed(start.result["llmopt"]["runs"]))
    values = [value for _, run, value in start.column(measured.column or "") if run in kept]
    tail = TAILS[measured.statistic or ""]
    return float(np.percentile(values, tail)) if values else value_of_start(start, measured.key)


def paired_changes(
    limit: Limit, base: Sequence[RunData], new: Sequence[RunData]
) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
    """(values of the base's starts, of the new ones, the change of the limited metric in each pair), in the
    order of the pairs; None if a start has no value. The change is log(new / base), or log(new / bound) for a
    limit on the value itself; for waiting time the difference as a share of the base's wall time."""
    measured = limit.quantity
    assert isinstance(measured, Measured)
    is_tail = measured.statistic in TAILS
    read = tail_of_start if is_tail else lambda start, what: value_of_start(start, what.key)
    after = [read(start, measured) for start in new]
    before = [read(start, measured) for start in base]
    if None in after or None in before:
        return None
    values, known = np.array(after, float), np.array(before, float)
    if limit.is_share:
        walls = np.array([value_of_start(start, "duration") for start in base], float)
        changes = (values - known) / walls if limit.relative else values - limit.bound
    elif not limit.relative:
        changes = np.log(values) - math.log(limit.bound)
    else:
        changes = np.log(values) - np.log(known)
        if not is_tail:
            changes = [
                _change_by_passes(old, now, measured.key, change)
                for old, now, change in zip(base, new, changes, strict=True)
            ]
    changes = np.array(changes, float)
    return (known, values, changes) if np.isfinite(changes).all() else None


def _change_by_passes(base: RunData, new: RunData, key: str, otherwise: float) -> float:
    """The change over the passes of a pair that took turns, from the last one on, as cold ones may be left
    out at the beginning; `otherwise` if they did not."""
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
    return change_of_passes(logs, key) if logs else otherwise


def change_of_passes(logs: Sequence[float], key: str) -> float:
    """The mean of the changes of a pair's passes; the median for CPU time: a pass that still warms up, on all
    threads, takes several times its CPU time at hardly more than its wall time."""
    return float(np.median(logs) if key == "cpu_seconds" else np.mean(logs))


def unjudgeable(measured: Measured, base: Sequence[RunData], new: Sequence[RunData]) -> str | None:
    """Why a limit on a metric cannot be judged on these starts; None if it can. A tail needs requests.
    Goodput depends on the limits that it was counted with. Energy has the meter's reason."""
    if measured.statistic in TAILS:  # order statistics have to bound it from above
        needed = requests_for_percentile(TAILS[measured.statistic])
        completed = (sum(start.result["completed"] or 0 for start in side) for side in (base, new))
        if (missing := needed - min(completed)) > 0:
            return f"{measured.label} needs {needed} requests a side: {missing} more"
    key = measured.key
    if key in SLO_KEYS:
        limits = [sorted({_slo_words(start) for start in side}) for side in (base, new)]
        if limits[0] != limits[1] or len(limits[0]) > 1 or limits[0] == ["none"]:
            sides = [" or ".join(side) for side in limits]
            return (
                f"{key} needs the same --goodput in both runs (base: {sides[0]}, new: {sides[1]})"
            )
    if key in ENERGY_KEYS:
        for name, side in (("base", base), ("new", new)):
            for start in side:
                if not start.values(key):
                    energy = start.result["llmopt"].get("energy") or {}
                    reason = energy.get("cpu_reason") or "it has none"
                    return f"{key} has a limit, but the {name} run has no energy: {reason}"
    return None


def _slo_words(start: RunData) -> str:
    slo = start.result["llmopt"].get("slo") or {}
    limits = sorted((slo.get("limits_ms") or {}).items())
    return " ".join(f"{metric}:{limit:g}" for metric, limit in limits) or "none"


NO_VALUE = "has a limit but no value in both runs"
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
# A run next to a background load L varies by this share of ln(1 / (1 - L)), from the 59 recorded passes
# next to 0.36 to 0.6 (docs/measured/cpu/identical-runs.parquet): they are 2 % slower in the median, with a
# deviation of 11 %.
BACKGROUND_SHARE = 0.16
# Background load above this is named in the notes.
BUSY = 0.05


def judge_in_runs(
    limit: Limit, base: RunData, new: RunData, *, num_limits: int, same: bool = False
) -> MeasuredVerdict | str:
    """The verdict on a limited metric between two single runs; text if it cannot be judged. A pass needs the
    95 % bound of the worsening within the limit, a regression the bound at 1 %, divided over `num_limits`
    limits, beyond it. `same`: base and new are the same run, so their difference is exactly 0."""
    measured = limit.quantity
    assert isinstance(measured, Measured)
    if why := unjudgeable(measured, [base], [new]):
        return why
    before, after = values_of(measured, base), values_of(measured, new)
    if not before or not after:
        return f"{measured.label} {NO_VALUE}"
    change = Effect(0.0, 0.0, math.inf) if same else effect_between(measured, base, new)
    effect = change if limit.relative else effect_of_bound(measured, limit, new)
    slower = effect.log_ratio if limit.at_most else -effect.log_ratio
    excess = slower - limit.allowed
    reach, width = effect.half_width(1 - FALSE_PASS), change.half_width(1 - FALSE_PASS)
    bounds = (change.log_ratio - width, change.log_ratio + width)
    low, high = map(limit.as_share, bounds)
    shown = (high - low) / 2 if limit.relative else math.expm1(reach)
    level = FALSE_REGRESSION / num_limits
    # A bound on the value itself has no change that could be seen, nor has a demanded gain.
    visible = None
    if limit.relative and limit.allowed >= 0:
        power = effect.half_width(1 - level) + effect.half_width(POWER)
        visible = limit.as_share(limit.allowed + power)
    more = pairs_to_settle(excess, effect.standard_error, 1, (level, FALSE_PASS))
    return _verdict(
        limit,
        Excess(excess - effect.half_width(1 - level), excess + reach),
        f" ± {shown:.1%}: too noisy to tell the limit {limit.text}",
        (value_of_run(measured, base), value_of_run(measured, new)),
        (change.log_ratio, *bounds),
        # Pairs of starts are a test of their own, which begins anew.
        pairs_to_settle=more and max(more, FIRST_LOOK),
        visible=visible,
    )


def value_of_run(measured: Measured, data: RunData) -> float:
    """The value that the run's own table and report show, over all its passes; else the mean of the
    undisturbed passes, geometric but for waiting time."""
    # The whole run's duration is not that of a pass.
    recorded = None if measured.key == "duration" else data.result.get(measured.key)
    values = values_of(measured, data)
    if recorded or measured.key == WAITING:
        return recorded or float(np.mean(values))
    return float(np.exp(np.mean(np.log(values))))


def values_of(measured: Measured, data: RunData) -> list[float]:
    """The metric in each undisturbed pass that has it. Only waiting time may be 0."""
    passes = data.result["llmopt"]["runs"]
    values = [value_of_pass(passes[number], measured.key) for number in undisturbed(passes)]
    return [value for value in values if value or (value == 0 and measured.key == WAITING)]


def values_of_pairs(measured: Measured, base: RunData, new: RunData) -> list[tuple[float, float]]:
    """The metric in both passes of each pair in which neither was disturbed; all pairs if there is none."""
    sides = [data.result["llmopt"]["runs"] for data in (base, new)]
    kept = set(undisturbed(sides[0])) & set(undisturbed(sides[1])) or set(range(len(sides[0])))
    pairs = [[value_of_pass(side[n], measured.key) for side in sides] for n in sorted(kept)]
    return [(before, after) for before, after in pairs if before and after]


def effect_of_bound(measured: Measured, limit: Limit, new: RunData) -> Effect:
    """Distance of the new run's metric from a limit on its value."""
    values = values_of(measured, new)
    if measured.key != WAITING:
        return effect_of_level(values, limit.bound)
    error = float(np.std(values, ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else math.inf
    return Effect(float(np.mean(values)) - limit.bound, error, len(values) - 1 or math.inf)


def is_paired(base: RunData, new: RunData) -> bool:
    """True if the passes of the two runs were interleaved (paired), so that both saw the same machine."""
    pairs = [side.result["llmopt"]["arms"] for side in (base, new)]
    passes = [side.result["llmopt"]["runs"] for side in (base, new)]
    return bool(pairs[0]) and pairs[0] == pairs[1] and len(passes[0]) == len(passes[1]) > 1


def other_load(data: RunData) -> float:
    """Background load: fraction of the CPUs used by other processes, mean over passes; 0 if unknown."""
    passes = data.result["llmopt"]["runs"]
    known = [load for run in passes if (load := run.get("other_load")) is not None]
    return sum(known) / len(known) if known else 0.0


def background_error(data: RunData) -> float:
    """Standard error, as a logarithm, that background load adds to a run without evidence of its passes. With
    evidence disturbed passes are left out, and load that did not disturb them excuses nothing."""
    if any(run.get("disturbed") is not None for run in data.result["llmopt"]["runs"]):
        return 0.0
    worst = 0.95  # at 1 the run could not have finished
    return -BACKGROUND_SHARE * math.log1p(-min(other_load(data), worst))


def effect_between(measured: Measured, base: RunData, new: RunData) -> Effect:
    """The change of a metric with its uncertainty: paired or unpaired, with or without request data."""
    before, after = values_of(measured, base), values_of(measured, new)
    if measured.key == WAITING:  # as a share of the base's wall time
        walls, counts = values_of(MEASURED["duration"], base), (len(before), len(after))
        wall = float(np.mean(walls)) if walls else math.nan
        several = [side for side in (before, after) if len(side) > 1]
        variance = sum(float(np.var(side, ddof=1)) / len(side) for side in several)
        error = math.sqrt(variance) / wall if min(counts) > 1 else FEW_PASSES_CV
        change = (float(np.mean(after)) - float(np.mean(before))) / wall
        total = math.hypot(error, START_CV * math.sqrt(2))
        return Effect(change, total, max(sum(counts) - 2, 1))
    if is_paired(base, new) and len(pairs := values_of_pairs(measured, base, new)) > 1:
        return effect_of_pairs(*zip(*pairs, strict=True))
    error = 0.0
    if measured.column is not None and min(len(before), len(after)) < RUNS_THAT_SHOW_SPREAD:
        digits = (measured.statistic or "").removeprefix("p")
        percentile = float(digits) if digits.isdigit() else 50.0  # the mean is taken as the median
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
    known = math.hypot(START_CV * math.sqrt(2), background_error(base), background_error(new))
    return effect.with_error(known)


def paired_error(
    base: Mapping[str, Sequence[float]],
    new: Mapping[str, Sequence[float]],
    *,
    percentile: float = 50.0,
) -> float:
    """Bootstrap standard error of the mean log ratio of a percentile, resampling requests in pairs. The same
    requests are resampled on both sides, so that differences between prompts cancel."""
    shared = [request for request in base if request in new]
    passes_base = min((len(base[r]) for r in shared), default=0)
    passes_new = min((len(new[r]) for r in shared), default=0)
    if len(shared) < 2 or not passes_base or not passes_new:
        return 0.0
    tables = [
        np.array([side[request][:passes] for request in shared], float).T
        for side, passes in ((base, passes_base), (new, passes_new))
    ]
    # Chunks that were read at once have a gap of 0: no shorter than the shortest that was seen.
    least = min(table[table > 0].min(initial=np.inf) for table in tables)
    if np.isinf(least):
        return 0.0
    rng = np.random.default_rng(0)
    draws = rng.integers(0, len(shared), size=(RESAMPLES, len(shared)))
    percentiles = [np.percentile(table[:, draws], percentile, axis=-1) for table in tables]
    logs = [np.log(np.maximum(values, least)).mean(axis=0) for values in percentiles]
    return float((logs[1] - logs[0]).std(ddof=1))
