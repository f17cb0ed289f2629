"""Speed, quality and memory of a comparison: a verdict each, with its quantity and the interval.

The verdict is that of the limits on the aspect. Where none is on it, the interval of its usual quantity says
whether the new side is better, worse, equal or undecided, which decides nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Self

from ..metrics.metrics import higher_is_better
from ..page.page import number, signed_percent, size, sizes
from .limits import DEPTH_KEY, MEASURED, PREFIX, SCORED, GateOutcome
from .verdict import Interval, LimitVerdict, MeasuredVerdict, between

ASPECTS = SPEED, QUALITY, MEMORY = "speed", "quality", "memory"
Moved = tuple[tuple[str, str, str], tuple[float, float], float, Interval]
"""Key, label and unit of a quantity, its values of both sides, and its relative change with the interval."""


@dataclass(frozen=True, slots=True)
class AspectVerdict:
    """The verdict on one aspect: an outcome of the gate if the aspect has a limit or cannot be judged; else
    `better`, `worse`, `equal`, `undecided` or `not measured`. `limit` is the limit that decided, in gate
    syntax; `interval` is that of the relative change, or with `is_of_value` of the new value; `reason` is
    given without a value."""

    aspect: str
    verdict: str
    limit: str | None = None
    label: str = ""
    unit: str = ""
    base: float | None = None
    new: float | None = None
    change: float | None = None
    interval: Interval | None = None
    is_of_value: bool = False
    reason: str = ""

    @classmethod
    def of_limits(
        cls, aspect: str, outcome: GateOutcome, verdicts: Sequence[LimitVerdict], reason: str
    ) -> Self:
        """By the first limit with the outcome; by `reason` where none has it."""
        decided = next((verdict for verdict in verdicts if verdict.outcome is outcome), None)
        if decided is None:
            return cls(aspect, outcome.value, reason=reason)
        same = ("limit", "label", "unit", "base", "new", "change", "interval")
        known = {name: getattr(decided, name) for name in same}
        is_change = isinstance(decided, MeasuredVerdict) or decided.limit.endswith("%")
        reason = decided.reason if decided.new is None else ""
        return cls(aspect, outcome.value, is_of_value=not is_change, reason=reason, **known)

    @classmethod
    def without_limit(cls, aspect: str, moved: Moved | str) -> Self:
        """By the interval of the change of one quantity, or the reason that it is not measured."""
        if isinstance(moved, str):
            return cls(aspect, "not measured", reason=moved)
        names, sides, change, interval = moved
        low = -math.inf if interval[0] is None else interval[0]
        high = math.inf if interval[1] is None else interval[1]
        if not higher_is_better(names[0]):
            low, high = -high, -low
        word = "equal" if low == high == 0 else "better" if low > 0 else "undecided"
        word = "worse" if high < 0 else word
        return cls(aspect, word, None, *names[1:], *sides, change, interval)

    @property
    def words(self) -> str:
        """The quantity, its change with the interval, and the limit, as a clause."""
        if self.new is None:
            return self.reason
        base, new = sizes(self.base, self.new)
        if self.unit != "bytes":
            base, new = _number(self.base), _number(self.new)
        value = size if self.unit == "bytes" else _number
        unit = "" if self.unit in ("", "bytes", "share") else f" {self.unit}"
        text = f"{self.label} {new}{unit}"
        if self.is_of_value:
            text += between(self.interval, value)
        elif self.change is not None:
            signed = partial(signed_percent, digits=2 if self.aspect == QUALITY else 1)
            text = f"{self.label} {signed(self.change)}{between(self.interval, signed)}"
            text += f", {base} to {new}{unit}"
        return text if self.limit is None else f"{text}; limit {self.limit}"

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "words": self.words}


def _number(value: float | None) -> str:
    """With two decimals; below 10 with four, as scores need them."""
    return number(value, 2 if value is None or abs(value) >= 10 else 4)


def aspect_of(key: str) -> str:
    """The aspect that a quantity of the gate belongs to; counts of requests belong to speed."""
    if key in SCORED or key.startswith(PREFIX) or DEPTH_KEY.fullmatch(key):
        return QUALITY
    return MEMORY if key not in MEASURED and key.endswith("_bytes") else SPEED


def aspects_of(
    verdicts: Sequence[LimitVerdict],
    quality: Mapping[str, Any],
    memory: Mapping[str, Any],
    *,
    faults: Sequence[str],
    gaps: Sequence[str],
    speed: MeasuredVerdict | str,
) -> tuple[AspectVerdict, ...]:
    """The verdicts on speed, quality and memory, by their limits if they have some. `faults` and `gaps` are
    other reasons for a regression of speed or no verdict on it; `speed` is shown without a limit on one."""
    moved: dict[str, Moved | str] = {
        QUALITY: _moved_quality(quality),
        MEMORY: _moved_memory(memory),
    }
    if isinstance(speed, str):
        moved[SPEED] = speed
    else:  # one metric of both runs, which no limit is on
        names, sides = (speed.key, speed.label, speed.unit), (speed.base, speed.new)
        moved[SPEED] = names, sides, speed.change, (speed.low, speed.high)
    aspects = []
    for aspect in ASPECTS:
        mine = [verdict for verdict in verdicts if aspect_of(verdict.key) == aspect]
        outcomes = [verdict.outcome for verdict in mine]
        if aspect == SPEED:
            outcomes += [GateOutcome.REGRESSION for _ in faults]
            outcomes += [GateOutcome.NO_VERDICT for _ in gaps]
        if not outcomes:
            aspects.append(AspectVerdict.without_limit(aspect, moved[aspect]))
            continue
        outcome, reason = GateOutcome.of(outcomes), "; ".join(faults or gaps)
        aspects.append(AspectVerdict.of_limits(aspect, outcome, mine, reason))
    return tuple(aspects)


def _moved_quality(quality: Mapping[str, Any]) -> Moved | str:
    """The change of perplexity on the same tokens, of `quality_changes`."""
    if not quality or None in quality["perplexity"]:
        return "no quality in both runs"
    change = quality["perplexity_change"]
    if change is None:
        return "the runs scored different tokens"
    interval = tuple(quality["perplexity_change_interval"] or (change, change))
    return ("perplexity", "Perplexity", ""), tuple(quality["perplexity"]), change, interval


def _moved_memory(memory: Mapping[str, Any]) -> Moved | str:
    """The change of the bytes of the weights as served, of `memory_changes`."""
    base, new = memory.get("served_weight_bytes", (None, None))
    if not base or not new:
        return "no bytes of weights in both runs"
    change = new / base - 1
    return ("weight_bytes", "Weights as served", "bytes"), (base, new), change, (change, change)
