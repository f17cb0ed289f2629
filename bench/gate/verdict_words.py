"""Sentences of a verdict: each metric's own, and what is undecided and how much would settle it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from statistics import NormalDist

from .counts import Check
from .judge import Delta
from .limits import Outcome

POWER = 0.8
# Beyond this many times the pairs at hand, the change is as good as at the limit.
MOST_TIMES_AS_MANY = 30
# With fewer pairs the signed-rank interval at 5 % a side is unbounded.
MIN_PAIRS = 5
Row = Delta | Check


def pairs_to_settle(
    distance: float, error: float, pairs: int, levels: tuple[float, float]
) -> int | None:
    """How many more pairs would settle a limit with a chance of 80 %, if the estimate is the truth; None if
    the estimate is too near the limit.

    Args:
        distance: of the estimate beyond the limit; negative is within.
        error: its standard error after `pairs` pairs.
        levels: of regression and pass.
    """
    if distance == 0 or not math.isfinite(error):
        return None
    level = levels[0] if distance > 0 else levels[1]
    reach = NormalDist().inv_cdf(1 - level) + NormalDist().inv_cdf(POWER)
    needed = pairs * (reach * error / distance) ** 2
    # The levels of the looks so far are spent, so at least another block of two pairs.
    more = max(2, math.ceil(needed - pairs))
    return more if more <= MOST_TIMES_AS_MANY * pairs else None


def settle_words(undecided: Sequence[Delta], *, by_starts: bool) -> str:
    """What would settle the undecided limits, as the end of a sentence."""
    if not by_starts:
        return "paired starts would settle it: llmopt compare --run base=… --run new=…"
    more = [delta.pairs_to_settle for delta in undecided]
    known = [value for value in more if value is not None]
    if any(
        value is None and delta.num_pairs < MIN_PAIRS
        for value, delta in zip(more, undecided, strict=True)
    ):
        return f"fewer than {MIN_PAIRS} pairs of starts do not say how many would settle it"
    if len(known) < len(more):
        near = names(delta.label for delta in undecided if delta.pairs_to_settle is None)
        return f"no reasonable number of starts would settle {near}: the change is at the limit"
    return f"about {max(known)} more starts of each side would settle it"


def overall_words(
    rows: Sequence[Row], others: Sequence[str], *, by_starts: bool
) -> tuple[str, ...]:
    """Reasons of no verdict: the undecided limits, what would settle them, and the limits that are kept."""
    open_rows = [row for row in rows if row.outcome is Outcome.NO_VERDICT]
    kept = [row.label for row in rows if row.outcome is Outcome.PASS]
    reasons = [row.reason for row in open_rows] + list(others)
    noisy = [row for row in open_rows if isinstance(row, Delta)]
    if noisy:
        reasons.append(settle_words(noisy, by_starts=by_starts))
    if kept and reasons:
        words = "keeps its limit" if len(kept) == 1 else "keep their limits"
        reasons.append(f"{names(kept)} {words}")
    return tuple(reasons)


def names(labels: Iterable[str]) -> str:
    """`A, B and C`."""
    *first, last = list(labels)
    return f"{', '.join(first)} and {last}" if first else last
