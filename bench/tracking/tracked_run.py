"""What a tracker is given of a finished run: parameters, metrics, and the folder as its artifacts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """A run in a tracker's terms.

    Attributes:
        params: what was measured and how, as text, nested keys joined by dots.
        metrics: finite numbers only.
        folder: the run folder, logged whole.
    """

    name: str
    params: Mapping[str, str]
    metrics: Mapping[str, float]
    folder: Path


class Tracker(Protocol):
    """A place where runs are logged."""

    name: str

    def log(self, run: TrackedRun) -> str:
        """Log a run; returns where it is, for people."""
        ...


def of_result(result: Mapping[str, Any], folder: Path) -> TrackedRun:
    """The tracked run of a `result.json`: its identity as parameters, every number of its top level as a
    metric, and of `llmopt` the quality, memory, energy, SLO share and server metrics."""
    ours = result["llmopt"]
    server = ours.get("server_metrics") or {}
    parts = {
        "quality": ours.get("quality") or {},
        "memory": ours.get("memory") or {},
        "energy": ours.get("energy") or {},
        "slo": {"share": (ours.get("slo") or {}).get("share")},
        "prefix_cache_hit_rate": ours.get("prefix_cache_hit_rate"),
        "preemptions": ours.get("preemptions"),
        "server": {"counters": server.get("counters"), "gauges": server.get("gauges")},
    }
    top = {key: value for key, value in result.items() if key != "llmopt"}
    params = flattened({**ours["identity"], "label": result.get("label"), "run_id": ours["run_id"]})
    return TrackedRun(
        ours["name"],
        {key: str(value) for key, value in params.items() if value is not None},
        numbers({**top, **parts}),
        folder,
    )


def of_sweep(record: Mapping[str, Any], folder: Path) -> TrackedRun:
    """The tracked run of a load sweep or SLO search: the figures of its knee."""
    kind = record["kind"]
    knee = next((p for p in record["points"] if p[kind] == record["knee"]), {})
    slo = record.get("slo") or {}
    params = flattened({**record["identity"], "swept": kind})
    return TrackedRun(
        record["name"],
        {key: str(value) for key, value in params.items() if value is not None},
        numbers({"knee": {**knee, "load": record["knee"]}, "slo": {"best": slo.get("best")}}),
        folder,
    )


def flattened(part: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """Nested mappings as one, keys joined by dots."""
    flat: dict[str, Any] = {}
    for key, value in part.items():
        inner = f"{path}.{key}" if path else str(key)
        flat |= flattened(value, inner) if isinstance(value, Mapping) else {inner: value}
    return flat


def numbers(part: Mapping[str, Any]) -> dict[str, float]:
    """The finite numbers of nested mappings."""
    return {
        key: float(value)
        for key, value in flattened(part).items()
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    }
