"""SLO search: the highest load that meets latency limits, found by bisection."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ...quant.base.errors import BadInput
from .sweep import Sweep, SweepTarget

PRECISION = 0.05
SHARE = 0.95
# Fraction of the serial rate: there requests hardly overlap, so a failure there is a failure at any rate.
LOWEST_RATE = 0.25
MAX_DOUBLINGS = 10
RULE = (
    "a load keeps the limits if the given share of all requests, failed ones counted as misses, meets "
    "every limit; a rate must also be kept up with, and its TTFT and end-to-end time count from when a "
    "request was due"
)


@dataclass(frozen=True, slots=True)
class SloResult:
    """Result of a search.

    Attributes:
        best: the highest load that met the limits; None when the lowest did not.
        failed: the lowest load above it that was measured and failed; None when none failed.
    """

    best: float | None
    failed: float | None


@dataclass(frozen=True, slots=True)
class SloSearch:
    """A search: its limits, result and sweep."""

    sweep: Sweep
    limits: str
    share: float
    found: SloResult

    def as_dict(self) -> dict[str, Any]:
        """The record of the sweep with the result of the search under `slo`."""
        said = self.sweep.as_dict()
        said["slo"] = {
            "limits": self.limits,
            "share": self.share,
            "by": self.sweep.kind,
            "best": self.found.best,
            "lowest_failed": self.found.failed,
            "precision": PRECISION if self.sweep.kind == "rate" else 1,
            "rule": RULE,
        }
        return said


def search_slo(sweep_target: SweepTarget, limits: str, share: float) -> SloSearch:
    """Find the highest rate (to within 5 %) or concurrency (exactly) that meets the limits.

    `limits` are also the goodput limits of the sweep target. Rates start at a quarter of the serial rate.

    Raises:
        BadInput: an option is invalid.
        KeyboardInterrupt: interrupted; an unfinished search has no result.
    """
    if not 0 < share <= 1:
        raise BadInput(f"--slo-share is {share}: it must be above 0 and at most 1")

    def keeps(load: float) -> bool:
        point = sweep_target.measure(sweep_target.kind, load)
        return point["kept_up"] and point["good_share"] is not None and point["good_share"] >= share

    if sweep_target.kind == "rate":
        found = highest_rate(keeps, sweep_target.serial_rate() * LOWEST_RATE)
    else:
        found = highest_count(keeps, sweep_target.max_requests)
    assert sweep_target.sweep is not None
    return SloSearch(sweep_target.sweep, limits, share, found)


def highest_rate(keeps: Callable[[float], bool], lowest: float) -> SloResult:
    """Double from `lowest` until a rate fails, then bisect geometrically to 5 %."""
    if not keeps(lowest):
        return SloResult(None, lowest)
    good, bad = lowest, math.inf
    for _ in range(MAX_DOUBLINGS):
        if not keeps(good * 2):
            bad = good * 2
            break
        good *= 2
    if math.isinf(bad):
        return SloResult(good, None)
    while bad / good > 1 + PRECISION:
        middle = math.sqrt(good * bad)
        if keeps(middle):
            good = middle
        else:
            bad = middle
    return SloResult(good, bad)


def highest_count(keeps: Callable[[float], bool], most: int) -> SloResult:
    """Double from 1 up to `most` until a count fails, then bisect to adjacent counts."""
    if not keeps(1):
        return SloResult(None, 1)
    good, bad = 1, None
    while good < most:
        tried = min(good * 2, most)
        if not keeps(tried):
            bad = tried
            break
        good = tried
    while bad is not None and bad - good > 1:
        middle = (good + bad) // 2
        if keeps(middle):
            good = middle
        else:
            bad = middle
    return SloResult(good, bad)
