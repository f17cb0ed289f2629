"""The limits that decide under `--gate-speed`: by default all of them.

Load does not disturb quality and memory, so a speed that a busy machine cannot tell need not withhold the
verdict on them: `auto` leaves out undecided speeds, and a regression of speed still counts. `off` leaves out
every speed, `only` everything else.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..metrics.statistics import smallest_visible_change
from ..record.comparable import DISTURBANCE, PROMPTS, Difference
from ..record.result import RunData
from .aspects import SPEED, aspect_of
from .gate_options import GateSpeed
from .limits import MEASURED, GateOutcome, Limit, Measured
from .verdict import LimitVerdict, MeasuredVerdict

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


def withholds_outcome(gap: Difference | str, gate_speed: GateSpeed | None) -> bool:
    """Return True if a gap in what was measured of speed leaves the comparison without an outcome.

    A text says which evidence is missing; under `auto` and `off` it does not count. Failed requests and an
    interrupted run always do.
    """
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
    """Replace limits on changes of wall-clock speed by one on the processor's work and one on waiting, which
    that work does not include. Both take the tightest bound replaced. Without such counts the limits stay."""
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


def is_disturbed(data: RunData) -> bool:
    return all(run.get("disturbed") for run in data.result["llmopt"]["runs"])


def speed_reach(limits: Sequence[Limit], run: RunData, planned: int) -> list[dict[str, Any]]:
    """The smallest change that `planned` passes tell under each relative limit on speed, at a power of 80 %,
    and the passes that would tell the limit (None beyond 240), in numbers and `words`. The noise is that of
    successive passes of `run`, as of passes in turns."""
    reaches, disturbed = [], is_disturbed(run)
    condition = " while other programs load this machine as now" if disturbed else ""
    for limit in filter(_is_relative_time, limits):
        values = run.values(limit.quantity.key)
        if len(values) < 2:
            continue
        cv = math.sqrt(float(np.mean(np.diff(np.log(values)) ** 2)) / 2)
        allowed, counts = allowed_worsening(limit), range(2, MOST_PASSES + 1)
        passes = next((n for n in counts if smallest_visible_change(cv, n) <= allowed), None)
        smallest = smallest_visible_change(cv, planned)
        name = f"{limit.quantity.label} {limit.text}"
        enough = f"enough for the limit{condition}"
        ending = enough if smallest <= allowed else f"the limit needs {passes}"
        if passes is None:
            ending = f"{MOST_PASSES} would not tell the limit"
        text = f"{name}: {planned} passes tell a change of {smallest:.1%}, {ending}"
        reach = {"limit": name, "smallest": smallest, "passes": passes, "words": text}
        reaches.append(reach | {"is_told": smallest <= allowed and not disturbed})
    return reaches
