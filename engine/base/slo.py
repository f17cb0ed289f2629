"""Service-level objectives: the grammar of limits on latencies, and the search for the highest load within.

A benchmark's `--slo` and `--goodput` measure loads, a plan's `--slo` simulates them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ...quant.base.errors import BadInput

SLO_METRICS = ("ttft", "tpot", "e2el")
SLO_SHARE = 0.95
PRECISION = 0.05
MAX_DOUBLINGS = 10
_ALIASES = {"e2e": "e2el"}
_MILLISECONDS = {"": 1.0, "us": 1e-3, "ms": 1.0, "s": 1e3, "m": 60e3, "min": 60e3}


def parse_slo(words: Iterable[str], option: str = "--goodput") -> dict[str, float]:
    """`["ttft:200", "tpot:20ms"]`, or one text with both, as {metric: milliseconds}.

    A number may have a unit (us, ms, s, min); without one it is in milliseconds. `e2e` is `e2el`.

    Raises:
        BadInput: a word that is not `metric:time` with a metric of `SLO_METRICS`.
    """
    limits: dict[str, float] = {}
    for word in " ".join(words).replace(",", " ").split():
        name, _, value = word.partition(":")
        metric = _ALIASES.get(name, name)
        found = re.fullmatch(r"([\d.]+(?:e-?\d+)?)([a-z]*)", value.lower())
        try:
            limit = float(found[1]) * _MILLISECONDS[found[2]] if found else math.nan
        except (ValueError, KeyError):
            limit = math.nan
        if metric not in SLO_METRICS or not limit >= 0:
            raise BadInput(
                f"{option} {word!r}: write metric:milliseconds, or a time with its unit, with a metric of "
                f"{', '.join(SLO_METRICS)}, such as ttft:200, tpot:20ms or e2el:30s"
            )
        limits[metric] = limit
    return limits


def required_slo(text: str) -> dict[str, float]:
    """The limits of an `--slo`, which names at least one.

    Raises:
        BadInput: it names none, or is malformed.
    """
    if limits := parse_slo((text,), "--slo"):
        return limits
    raise BadInput('--slo names no limit: write such as "ttft:200 tpot:50" or "ttft:1s tpot:20ms"')


@dataclass(frozen=True, slots=True)
class SloResult:
    """Result of a search.

    Attributes:
        best: the highest load that met the limits; None when the lowest did not.
        failed: the lowest load above it that was measured and failed; None when none failed.
    """

    best: float | None
    failed: float | None


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


def highest_count(
    keeps: Callable[[float], bool], most: int, first: int = 1, precision: float = 0.0
) -> SloResult:
    """Double from `first` up to `most` until a count fails, or halve it until one does not, then bisect to
    adjacent counts, or to within `precision`."""
    good, bad = max(1, min(first, most)), None
    while not keeps(good):
        if good == 1:
            return SloResult(None, 1)
        good, bad = good // 2, good
    while bad is None and good < most:
        tried = min(good * 2, most)
        if keeps(tried):
            good = tried
        else:
            bad = tried
    while bad is not None and bad - good > max(1, precision * good):
        middle = (good + bad) // 2
        if keeps(middle):
            good = middle
        else:
            bad = middle
    return SloResult(good, bad)
