"""Evidence on a metric of paired starts: a value per start and a change per pair, for a sequential rank test.

A start is a fresh process that loads the weights and makes a block of passes. Starts of the base and of the
new build alternate, so that each pair saw the same mood of the machine; passes of one start share its
addresses, caches and clocks, so they count as one value: the median over its undisturbed passes; a percentile
over requests is taken of all of them together. If the passes of a pair took turns, the change is the mean
over them, which the mood of the machine, that neighbouring passes share, leaves alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np

from ..metrics.statistics import centre_interval, hodges_lehmann, requests_for_percentile
from ..record.result import RunData, value_of_pass
from .limits import GateOutcome, Limit, Measured
from .sequential import (
    FALSE_PASS,
    FALSE_REGRESSION,
    OperatingCurve,
    OperatingPoint,
    SequentialPlan,
    operating_points,
)
from .verdict import Change, LimitFinding, PairedExcess, pairs_to_settle

WAITING = "waiting_seconds"
TAILS = {"p90": 90.0, "p95": 95.0, "p99": 99.0}
SLO_KEYS = ("request_goodput", "slo_share")
ENERGY_KEYS = ("joules_per_token",)
MIN_PAIRS_FOR_CURVE = 5


def find_in_starts(
    limit: Limit, base: Sequence[RunData], new: Sequence[RunData], plan: SequentialPlan
) -> LimitFinding | str:
    """The changes of a metric over pairs of starts; text where it cannot be judged."""
    measured = limit.quantity
    assert isinstance(measured, Measured)
    if why := unjudgeable(measured, base, new):
        return why
    paired = paired_changes(limit, base, new)
    if paired is None:
        return f"{measured.label} has a limit but no value in every start"
    sign, relative = 1 if limit.at_most else -1, paired.relative
    allowed = limit.allowed(is_share=paired.is_share)
    centre = hodges_lehmann(paired.changes)
    low, high = centre_interval(paired.changes, FALSE_PASS)
    said = f"{measured.label} {change_words(relative(centre), paired.is_share)}"
    shown, lowest, highest = centre, low, high
    if not limit.relative:
        # The limit is on the value; the change from the base is shown beside it.
        moves = paired.new - paired.base if paired.is_share else np.log(paired.new / paired.base)
        shown, (lowest, highest) = hodges_lehmann(moves), centre_interval(moves, FALSE_PASS)
        said = f"{measured.label} is {float(np.median(paired.new)):,.4g} {measured.unit}"
    more, undecided = None, ""
    if np.isfinite(high - low):
        error = (high - low) / 2 / NormalDist().inv_cdf(1 - FALSE_PASS)
        levels = (FALSE_REGRESSION / max(plan.num_limits, 1), FALSE_PASS)
        more = pairs_to_settle(sign * centre - allowed, error, len(paired.changes), levels)
        undecided = f" ± {(relative(high) - relative(low)) / 2:.1%}" if limit.relative else ""
    return LimitFinding(
        said,
        PairedExcess(sign * paired.changes - allowed, plan),
        f"{undecided}: {len(paired.changes)} pairs of starts do not tell the limit {limit.text}",
        change=Change(
            float(np.median(paired.base)),
            float(np.median(paired.new)),
            value=relative(shown),
            worse=relative(sign * shown),
            low=relative(lowest),
            high=relative(highest),
            allowed=relative(allowed) if limit.relative else None,
            pairs_to_settle=more,
        ),
    )


def operating_curve(limit: Limit, paired: PairedExcess) -> OperatingCurve | None:
    """The chance of each verdict by the true change, at the noise of the pairs; None for few of them."""
    if len(paired.excess) < MIN_PAIRS_FOR_CURVE:
        return None
    is_share = limit.quantity.key == WAITING
    allowed = limit.allowed(is_share=is_share)
    residuals = paired.excess - hodges_lehmann(paired.excess)
    points = tuple(
        OperatingPoint(
            worse if is_share else math.expm1(worse),
            found[GateOutcome.PASS],
            found[GateOutcome.REGRESSION],
            found[GateOutcome.NO_VERDICT],
            mean_pairs,
        )
        for worse, found, mean_pairs in operating_points(residuals, allowed, paired.plan)
    )
    what = limit.quantity
    return OperatingCurve(what.key, what.label, limit.text, paired.plan.looks[-1], points)


def change_words(change: float, is_share: bool) -> str:
    """A change as text; of waiting time it is a share of the base's wall time."""
    direction = "higher" if change > 0 else "lower"
    return f"is {abs(change):.1%} {'of the wall time ' if is_share else ''}{direction}"


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


def unjudgeable(measured: Measured, base: Sequence[RunData], new: Sequence[RunData]) -> str | None:
    """Why a limit on a metric cannot be judged on these starts; None where it can.

    A tail needs requests. Goodput depends on the limits that it was counted with. Energy has the reason that
    the meter gave.
    """
    if missing := max(requests_missing(measured, side) for side in (base, new)):
        needed = requests_for_percentile(TAILS[measured.statistic or ""])
        return f"{measured.label} needs {needed} requests a side: {missing} more"
    key = measured.key
    if key in SLO_KEYS:
        limits = [sorted({_limits(start) for start in side}) for side in (base, new)]
        if limits[0] != limits[1] or len(limits[0]) > 1 or limits[0] == ["none"]:
            said = [" or ".join(side) for side in limits]
            return f"{key} needs the same --goodput in both runs (base: {said[0]}, new: {said[1]})"
    if key in ENERGY_KEYS:
        for name, side in (("base", base), ("new", new)):
            for start in side:
                if not start.values(key):
                    energy = start.result["llmopt"].get("energy") or {}
                    reason = energy.get("cpu_reason") or "it has none"
                    return f"{key} has a limit, but the {name} run has no energy: {reason}"
    return None


def _limits(start: RunData) -> str:
    slo = start.result["llmopt"].get("slo") or {}
    limits = sorted((slo.get("limits_ms") or {}).items())
    return " ".join(f"{metric}:{limit:g}" for metric, limit in limits) or "none"
