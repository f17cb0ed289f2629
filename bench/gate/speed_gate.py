"""How limits on speed decide on a busy machine: with all others, where the machine can tell, alone, or not.

Load does not disturb quality and memory. A speed that the machine cannot tell need not withhold the verdict
on them: `auto` leaves undecided speeds out, and a regression of speed still counts. `off` leaves every speed
out, `only` everything else.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from ..metrics.statistics import smallest_visible_change
from ..record.comparable import DISTURBANCE, PROMPTS, Difference
from ..record.result import RunData
from .aspects import SPEED, aspect_of
from .limits import MEASURED, GateOutcome, Limit, Measured
from .verdict import LimitVerdict, MeasuredVerdict

GateSpeed = Literal["auto", "off", "only"]
PROCESSOR = "instructions", "cpu_seconds"
"""Metrics that other programs disturb least, the steadiest first."""
MOST_PASSES = 240


def decides(verdict: LimitVerdict, gate_speed: GateSpeed | None) -> bool:
    """Return True if the limit takes part in the outcome."""
    is_time = isinstance(verdict, MeasuredVerdict)
    if gate_speed == "auto":
        return not is_time or verdict.outcome is not GateOutcome.NO_VERDICT
    if gate_speed == "only":
        return is_time or aspect_of(verdict.key) == SPEED
    return gate_speed is None or not is_time


def forbids(gap: Difference | str, gate_speed: GateSpeed | None) -> bool:
    """Return True if a condition, or lack of evidence, on speed withholds the outcome. Failed requests and an
    interrupted run always do."""
    if gate_speed in (None, "only"):
        return True
    conditions = (DISTURBANCE, PROMPTS) if gate_speed == "off" else (DISTURBANCE,)
    return isinstance(gap, Difference) and gap.condition not in conditions


def is_hosted_runner() -> bool:
    """Return True on a virtual machine of GitHub, which shares its processors with other jobs.

    Source: docs.github.com/en/actions/reference/variables-reference, RUNNER_ENVIRONMENT (read 2026-11-29).
    """
    return os.environ.get("RUNNER_ENVIRONMENT") == "github-hosted"


def by_processor(limits: Sequence[Limit], *runs: RunData) -> tuple[Limit, ...]:
    """The limits with those on changes of wall-clock speed replaced by one on the processor's work, which has
    the tightest of their shares, and one on waiting, which that does not see. They stay where a run has no
    such count."""
    clocks = [limit for limit in limits if _is_relative_time(limit)]
    counted = (key for key in PROCESSOR if all(run.values(key) for run in runs))
    key = next(counted, None)
    if key is None or not clocks:
        return tuple(limits)
    share = min(map(allowed_worsening, clocks))
    others = [limit for limit in limits if limit not in clocks]
    keys = (name for name in (key, "waiting_seconds") if all(run.values(name) for run in runs))
    return (*others, *(Limit(MEASURED[name], True, share, relative=True) for name in keys))


def _is_relative_time(limit: Limit) -> bool:
    return isinstance(limit.quantity, Measured) and limit.relative


def allowed_worsening(limit: Limit) -> float:
    """The share by which a relative limit lets a metric get worse: 0.05 of `<=+5%`, 0.053 of `>=-5%`."""
    return limit.bound if limit.at_most else 1 / (1 + limit.bound) - 1


@dataclass(frozen=True, slots=True)
class SpeedReach:
    """The smallest change that this machine tells under a limit on speed.

    Attributes:
        smallest: worsening that the planned passes show with a chance of 80 %.
        passes: passes that would tell the limit; None beyond 240.
    """

    label: str
    limit: str
    smallest: float
    planned: int
    passes: int | None

    @property
    def is_told(self) -> bool:
        return self.passes is not None and self.passes <= self.planned

    @property
    def words(self) -> str:
        text = (
            f"{self.label} {self.limit}: {self.planned} passes tell a change of {self.smallest:.1%}"
        )
        if self.is_told:
            return text + ", so the limit is decided"
        if self.passes is None:
            return text + f", and {MOST_PASSES} would not tell the limit"
        return text + f"; the limit needs {self.passes} passes"

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "is_told": self.is_told, "words": self.words}


def speed_reach(limits: Sequence[Limit], run: RunData, planned: int) -> list[SpeedReach]:
    """The reach of each relative limit on speed, by the noise between successive passes of `run`, which is
    that of passes in turns."""
    reaches = []
    for limit in filter(_is_relative_time, limits):
        values = run.values(limit.quantity.key)
        if len(values) < 2:
            continue
        steps = np.diff(np.log(values))
        cv = math.sqrt(float(np.mean(steps**2)) / 2)
        allowed = allowed_worsening(limit)
        enough = (n for n in range(2, MOST_PASSES + 1) if smallest_visible_change(cv, n) <= allowed)
        smallest = smallest_visible_change(cv, planned)
        reaches.append(
            SpeedReach(limit.quantity.label, limit.text, smallest, planned, next(enough, None))
        )
    return reaches
