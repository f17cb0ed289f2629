"""Error of the plan's speed, as measured: bands that held 90 % of the held-out deployments most like one.

The bands are factors on a prediction, from rows that no parameter was fitted to; for a model that was not
measured, from fits that had left the row's model out. `tools/plan_error` writes the file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

FEW, MANY = 8, 64
"""Clients up to which a batch is small, and beyond which it is large."""
FEWEST_ROWS = 20
UNKNOWN = "no measurement near this: expect a factor of two"
MEASURES = ("tpot", "ttft", "throughput")
_KEYS = ("engine", "generation", "known", "kind", "regime")
"""Properties that make rows alike; where rows are few, the last ones are given up."""


Known = Literal["model measured", "model not measured"]


def batch_regime(clients: int) -> str:
    """A small, medium or large batch, by the clients."""
    size = "small" if clients <= FEW else "medium" if clients <= MANY else "large"
    return f"{size} batch"


@dataclass(frozen=True, slots=True)
class Likeness:
    """Properties that a deployment's error depends on: engine, GPU generation, whether its model was measured
    in that engine, dense or mixture, and the batch regime."""

    engine: str
    generation: str
    known: Known
    kind: str
    regime: str

    @property
    def band_names(self) -> list[str]:
        """Names of the bands that cover it, the closest first. Engine, generation and `known` stay."""
        parts = [getattr(self, name) for name in _KEYS]
        return ["|".join(parts[:length]) for length in range(len(parts), 2, -1)]


@dataclass(frozen=True, slots=True)
class ErrorBand:
    """Factors on the predicted TPOT, TTFT and throughput that held 90 % of `num_rows` held-out rows, which
    were alike in `alike`."""

    tpot: tuple[float, float]
    ttft: tuple[float, float]
    throughput: tuple[float, float]
    num_rows: int
    alike: str

    @property
    def text(self) -> str:
        """The band of TPOT in words."""
        low, high = self.tpot
        return f"{100 * (low - 1):+.0f} to {100 * (high - 1):+.0f} %, {self.num_rows} rows"


@cache
def _file() -> Mapping[str, Mapping[str, Any]]:
    path = Path(__file__).with_name("error_bands.json")
    return json.loads(path.read_text(encoding="utf-8"))["bands"]


def error_band(
    likeness: Likeness, bands: Mapping[str, Mapping[str, Any]] | None = None
) -> ErrorBand | None:
    """The band of the held-out rows most like a deployment; None where none is like it."""
    known = _file() if bands is None else bands
    for key in likeness.band_names:
        if entry := known.get(key):
            low_high = (tuple(entry[measure]) for measure in MEASURES)
            return ErrorBand(*low_high, entry["rows"], key.replace("|", ", "))  # type: ignore[arg-type]
    return None
