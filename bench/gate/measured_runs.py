"""Evidence on a metric of two single runs: Student's t over their passes, paired where they took turns.

A single run is one start: how far two starts of the same build differ is assumed, and said. Paired starts
measure it (`measured_starts`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from ..metrics.statistics import (
    Effect,
    effect_of_level,
    effect_of_pairs,
    effect_of_runs,
)
from ..record.result import RunData, value_of_pass
from .limits import MEASURED, Limit, Measured
from .measured_starts import WAITING, change_words, undisturbed, unjudgeable
from .sequential import FALSE_PASS, FALSE_REGRESSION
from .verdict import Change, Excess, LimitFinding

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
# A run beside a background load L varies by this share of ln(1 / (1 - L)), from the 59 recorded passes
# beside 0.36 to 0.6 (docs/measured/cpu/identical-runs.parquet): they are 2 % slower in the median, with a
# deviation of 11 %.
BACKGROUND_SHARE = 0.16
# Background load above this is named in the notes.
BUSY = 0.05


def find_in_runs(
    limit: Limit, base: RunData, new: RunData, *, num_limits: int, same: bool = False
) -> LimitFinding | str:
    """The change of a metric between two single runs; text where it cannot be judged.

    A pass needs the 95 % bound of the worsening within the limit, a regression the bound at 1 %, divided over
    `num_limits` limits, beyond it. `same`: base and new are the same run, so they differ by exactly nothing.
    """
    measured = limit.quantity
    assert isinstance(measured, Measured)
    if why := unjudgeable(measured, [base], [new]):
        return why
    before, after = values_of(measured, base), values_of(measured, new)
    if not before or not after:
        return f"{measured.label} {NO_VALUE}"
    is_share = measured.key == WAITING
    relative = float if is_share else math.expm1
    change = Effect(0.0, 0.0, math.inf) if same else effect_between(measured, base, new)
    effect = change if limit.relative else effect_of_bound(measured, limit, new)
    sign = 1 if limit.at_most else -1
    slower, allowed = sign * effect.log_ratio, limit.allowed(is_share=is_share)
    reach = effect.half_width(1 - FALSE_PASS)
    width = change.half_width(1 - FALSE_PASS)
    sides = centre_of(measured, before), centre_of(measured, after)
    said = f"{measured.label} {change_words(relative(change.log_ratio), is_share)}"
    if not limit.relative:
        said = f"{measured.label} is {sides[1]:,.4g} {measured.unit}"
    return LimitFinding(
        said,
        Excess(
            slower - effect.half_width(1 - FALSE_REGRESSION / num_limits) - allowed,
            slower + reach - allowed,
        ),
        f" ± {relative(reach):.1%}: too noisy to tell the limit {limit.text}",
        change=Change(
            *sides,
            value=relative(change.log_ratio),
            worse=relative(sign * change.log_ratio),
            low=relative(change.log_ratio - width),
            high=relative(change.log_ratio + width),
            allowed=relative(allowed) if limit.relative else None,
        ),
    )


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
    return [(one, other) for one, other in pairs if one and other]


def centre_of(measured: Measured, values: Sequence[float]) -> float:
    return float(np.mean(values)) if measured.key == WAITING else geometric_mean(values)


def effect_of_bound(measured: Measured, limit: Limit, new: RunData) -> Effect:
    """Distance of the new run's metric from a limit on its value."""
    values = values_of(measured, new)
    if measured.key != WAITING:
        return effect_of_level(values, limit.bound)
    error = float(np.std(values, ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else math.inf
    return Effect(float(np.mean(values)) - limit.bound, error, len(values) - 1 or math.inf)


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


def background_error(data: RunData) -> float:
    """Standard error, as a logarithm, that background load adds to a run whose passes carry no evidence of
    their own.

    Where they do, disturbed passes are left out, and load that did not disturb them excuses nothing.
    """
    passes = data.result["llmopt"]["runs"]
    if any(one.get("disturbed") is not None for one in passes):
        return 0.0
    worst = 0.95  # at 1 the run could not have finished
    return -BACKGROUND_SHARE * math.log1p(-min(other_load(data), worst))


def effect_between(measured: Measured, base: RunData, new: RunData) -> Effect:
    """The change of a metric with its uncertainty: paired or unpaired, with or without request data."""
    before, after = values_of(measured, base), values_of(measured, new)
    if measured.key == WAITING:
        return _effect_on_waiting(before, after, values_of(MEASURED["duration"], base))
    if is_paired(base, new) and len(pairs := values_of_pairs(measured, base, new)) > 1:
        return effect_of_pairs([one for one, _ in pairs], [other for _, other in pairs])
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
    known = math.hypot(START_CV * math.sqrt(2), background_error(base), background_error(new))
    return effect.with_error(known)


def _effect_on_waiting(
    before: Sequence[float], after: Sequence[float], walls: Sequence[float]
) -> Effect:
    """The change of waiting time as a share of the base's wall time."""
    wall = float(np.mean(walls)) if walls else math.nan
    counts = len(before), len(after)
    variance = sum(
        float(np.var(side, ddof=1)) / len(side) for side in (before, after) if len(side) > 1
    )
    error = math.sqrt(variance) / wall if min(counts) > 1 else FEW_PASSES_CV
    change = (float(np.mean(after)) - float(np.mean(before))) / wall
    return Effect(change, math.hypot(error, START_CV * math.sqrt(2)), max(sum(counts) - 2, 1))


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
