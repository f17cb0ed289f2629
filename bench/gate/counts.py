"""Limits on counts and sizes: what varies between runs is tested, what cannot vary is compared as it is.

Failed requests by Fisher's exact test, preemptions as rates of rare events, output lengths request by
request, memory by start. Bytes that every start has alike, and quality on fixed tokens, need no statistics.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ..metrics.statistics import Effect, binomial_tails, fisher_tails, p_values, rate_tails
from ..page.page import signed_percent, size, sizes
from ..record.comparable import DISTURBANCE, FAILURE, Difference
from ..record.result import RunData
from .limits import COUNTED, Counted, Limit
from .verdict import FALSE_REGRESSION, Excess, LimitVerdict, Tails

# The peak memory of identical starts varies by 0.2 % (docs/measured/cpu/identical-starts.parquet).
PEAK_MEMORY_CV = 0.005
MIN_REQUESTS = 8
# Above this share of failed requests the speeds are those of the surviving requests.
MOST_FAILED = 0.01


def check_count(limit: Limit, base: Sequence[RunData], new: Sequence[RunData]) -> LimitVerdict:
    """Check a counted quantity of the starts (or single runs) against its limit."""
    counted = limit.quantity
    assert isinstance(counted, Counted)
    before, after = mean_value(counted, base), mean_value(counted, new)
    if after is None or (limit.relative and before is None):
        side = "new" if after is None else "base"
        text = f"{counted.label} has a limit but no value in the {side} run"
        return LimitVerdict.of(limit, text, base=before, new=after)
    value, text = after, f"{counted.label} is {shown(after, counted.unit)}"
    if limit.relative and before is not None:
        value = relative_change(before, after)
        ends = shown(before, counted.unit), shown(after, counted.unit)
        if counted.unit == "bytes":
            ends = sizes(before, after)
        text = f"{counted.label} went from {ends[0]} to {ends[1]} ({signed_percent(value, 2)})"
    test = TESTS.get(counted.key)  # of what varies; other values are compared as they are
    evidence = None if test is None else test(limit, base, new)
    if evidence is None:
        evidence = Excess.of(limit, (value, value))
    elif not limit.at_most:
        evidence = Tails(evidence.as_low, evidence.as_high)
    undecided = f": too few to tell the limit {limit.text}"
    sides = {"base": before, "new": after, "change": change_between(before, after)}
    return LimitVerdict.of(limit, text, evidence, undecided, **sides)


def change_between(before: float | None, after: float | None) -> float | None:
    """The relative change; None without two values, or from 0."""
    return after / before - 1 if before and after is not None else None


def shown(value: float, unit: str) -> str:
    return size(value) if unit == "bytes" else f"{value:,.6g} {unit}".rstrip()


def relative_change(before: float, after: float) -> float:
    if before == 0:
        return 0.0 if after == 0 else math.inf
    return after / before - 1


def mean_value(counted: Counted, starts: Sequence[RunData]) -> float | None:
    """The mean over the starts that have a value; counts of failures and requests are added up."""
    values = [value for start in starts if (value := counted.read(start.result)) is not None]
    if not values:
        return None
    return sum(values) if counted.key in ("failed", "completed") else sum(values) / len(values)


def failures(starts: Sequence[RunData]) -> tuple[int, int]:
    failed = sum(start.result["failed"] or 0 for start in starts)
    return failed, failed + sum(start.result["completed"] or 0 for start in starts)


def rise_of_failures(
    base: Sequence[RunData], new: Sequence[RunData]
) -> tuple[list[str], list[Difference]]:
    """(regressions, conditions that forbid a verdict): a higher share of failures, before any latency is
    compared."""
    before, after = failures(base), failures(new)
    if after[0] * before[1] <= before[0] * after[1]:
        return [], []
    text = f"failed requests rose from {before[0]} to {after[0]} of {after[1]}"
    if fisher_tails(before, after)[0] <= FALSE_REGRESSION:
        return [text], []
    return [], [Difference(FAILURE, f"{text}: too few to tell whether more fail")]


def unfit(
    base: Sequence[RunData], new: Sequence[RunData], sides: tuple[str, str] = ("base", "new")
) -> Difference | None:
    """The condition in the starts themselves that forbids a verdict on speed: failures, or a late client."""
    for side, starts in zip(sides, (base, new), strict=True):
        if any(start.result["llmopt"]["interrupted"] for start in starts):
            return Difference(FAILURE, f"the {side} run was interrupted")
        failed, total = failures(starts)
        if failed > MOST_FAILED * total:
            return Difference(FAILURE, f"{failed} requests failed in the {side} run")
        completed = mean_value(COUNTED["completed"], starts)
        if completed is not None and completed < MIN_REQUESTS:
            return Difference(FAILURE, f"the {side} run has {completed} requests: too few to judge")
        clients = [start.result["llmopt"].get("client") or {} for start in starts]
        reasons = [client["reasons"][0] for client in clients if not client.get("certified", True)]
        if 2 * len(reasons) > len(starts):
            return Difference(DISTURBANCE, f"the client disturbed the {side} run: {reasons[0]}")
    return None


def _failure_tails(limit: Limit, base: Sequence[RunData], new: Sequence[RunData]) -> Tails | None:
    before, after = failures(base), failures(new)
    # A bound on the number of failures, or on none at all, is about these requests and needs no inference.
    if (limit.quantity.key == "failed" and not limit.relative) or after[0] == 0:
        return None
    if limit.relative:
        return Tails(*fisher_tails(before, after, 1 + limit.bound))
    return None if limit.bound == 0 else Tails(*binomial_tails(*after, limit.bound))


def _preemption_tails(
    limit: Limit, base: Sequence[RunData], new: Sequence[RunData]
) -> Tails | None:
    before, after = (
        [start.result["llmopt"]["preemptions"] for start in side] for side in (base, new)
    )
    if len(set(before)) == len(set(after)) == 1 and len(after) > 1:
        return None
    if len(after) > 1:
        allowed = np.array(before) * (1 + limit.bound) if limit.relative else limit.bound
        return _rank_tails(np.array(after) - allowed)
    if not limit.relative or not after[0] or after == before:
        return None
    return Tails(*rate_tails(before[0], after[0], 1 + limit.bound))


def _memory_tails(limit: Limit, base: Sequence[RunData], new: Sequence[RunData]) -> Tails | None:
    key = limit.quantity.key
    before, after = (
        [start.result["llmopt"]["memory"][key] for start in side] for side in (base, new)
    )
    constant = len(set(before)) == len(set(after)) == 1
    if constant and (len(after) > 1 or key != "peak_resident_bytes" or before == after):
        return None
    if None in after or (limit.relative and None in before):
        return None
    allowed = np.log(before) + math.log1p(limit.bound) if limit.relative else math.log(limit.bound)
    excess = np.log(after) - allowed
    if len(after) > 1:
        return _rank_tails(excess)
    sides = 2 if limit.relative else 1
    return _normal_tails(Effect(float(excess[0]), PEAK_MEMORY_CV * math.sqrt(sides), math.inf))


def _rank_tails(excess: np.ndarray) -> Tails:
    above, below = p_values(excess)
    return Tails(float(above), float(below))


def _normal_tails(effect: Effect) -> Tails:
    if effect.standard_error == 0:
        return Tails(float(effect.log_ratio <= 0), float(effect.log_ratio >= 0))
    z = effect.log_ratio / effect.standard_error / math.sqrt(2)
    return Tails(math.erfc(z) / 2, math.erfc(-z) / 2)


def _length_tails(limit: Limit, base: Sequence[RunData], new: Sequence[RunData]) -> Tails | None:
    change = length_change(base, new)
    if change is None or change.standard_error == 0:
        return None
    if not limit.relative:
        lengths = np.array([*mean_lengths(new).values()])
        error = float(lengths.std(ddof=1)) / math.sqrt(len(lengths))
        return _normal_tails(Effect(float(lengths.mean()) - limit.bound, error, math.inf))
    return _normal_tails(replace(change, log_ratio=change.log_ratio - limit.bound))


TESTS = {
    **dict.fromkeys(("error_rate", "failed"), _failure_tails),
    **dict.fromkeys((key for key in COUNTED if key.endswith("_bytes")), _memory_tails),
    "preemptions": _preemption_tails,
    "mean_output_len": _length_tails,
}


def length_change(base: Sequence[RunData], new: Sequence[RunData]) -> Effect | None:
    """The change of the mean output length as a share of the base's, over requests that both sides
    completed; None without their tables."""
    before, after = mean_lengths(base), mean_lengths(new)
    shared = [request for request in before if request in after]
    if len(shared) < 2:
        return None
    differences = np.array([after[request] - before[request] for request in shared])
    mean = float(np.mean([before[request] for request in shared]))
    error = float(differences.std(ddof=1)) / math.sqrt(len(shared))
    return Effect(float(differences.mean()) / mean, error / mean, len(shared) - 1)


def mean_lengths(starts: Sequence[RunData]) -> dict[Any, float]:
    """The mean output length of each request over the passes of all starts."""
    lengths: dict[Any, list[float]] = {}
    for start in starts:
        for request, values in start.by_request("output_len").items():
            lengths.setdefault(request, []).extend(value for value in values if value)
    return {request: float(np.mean(values)) for request, values in lengths.items() if values}
