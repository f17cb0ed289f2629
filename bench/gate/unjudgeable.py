"""Values that cannot be judged: tails of few requests, goodput of other limits, energy without a counter."""

from __future__ import annotations

from collections.abc import Sequence

from ..record.result import RunData
from .limits import Measured
from .start_values import requests_missing, too_few_words

SLO_KEYS = ("request_goodput", "slo_share")
ENERGY_KEYS = ("joules_per_token",)


def unjudgeable(measured: Measured, base: Sequence[RunData], new: Sequence[RunData]) -> str | None:
    """Why a limit on a metric cannot be judged on these starts; None where it can.

    Goodput depends on the limits that it was counted with. Energy has the reason that the meter gave.
    """
    if missing := max(requests_missing(measured, side) for side in (base, new)):
        return too_few_words(measured, missing)
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
