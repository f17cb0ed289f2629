"""Error of predictions: factors that held nine of ten measured rows that were left out of the fit.

A band is that of the rows most like a deployment: by engine, GPU generation, whether its model was fitted in
that engine, dense or mixture, and the batch regime. Where no row is like it, the band is that of whole GPU
generations and engines that were left out (`NOTHING_LIKE_IT`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

from .step_parameters import Factors, OwnRows, Table

FEW, MANY = 8, 64
"""Clients up to which a batch is small, and beyond which it is large."""
FEWEST_ROWS = 20
MEASURES = ("tpot", "ttft", "throughput")
NOTHING_LIKE_IT = "nothing like it"
WIDEST = 6.0
"""Highest over lowest factor beyond which a band is told as an order of magnitude, not as an interval."""
_KEYS = ("engine", "generation", "known", "kind", "regime")
"""Properties that make rows alike; where rows are few, the last ones are given up."""

Known = Literal["model measured", "model not measured", "GPU not measured"]


def batch_regime(clients: float) -> str:
    size = "small" if clients <= FEW else "medium" if clients <= MANY else "large"
    return f"{size} batch"


@dataclass(frozen=True, slots=True)
class Likeness:
    """Properties that a deployment's error depends on: engine, GPU generation, whether its GPU was measured
    and its model in that engine, dense or mixture, and the batch regime."""

    engine: str
    generation: str
    known: Known
    kind: str
    regime: str

    @property
    def band_names(self) -> list[str]:
        parts = [getattr(self, name) for name in _KEYS]
        return ["|".join(parts[:length]) for length in range(len(parts), 2, -1)]


@dataclass(frozen=True, slots=True)
class ErrorBand:
    """Factors on the predicted TPOT, TTFT and throughput that held 90 % of `num_rows` rows, which were alike
    in `alike`. `num_rows` is 0 where no measured row is like the deployment."""

    tpot: Factors
    ttft: Factors
    throughput: Factors
    num_rows: int
    alike: str
    own: bool = False

    @property
    def is_near(self) -> bool:
        return self.own or self.num_rows > 0

    @property
    def text(self) -> str:
        rows = f"{self.num_rows} rows" if self.is_near else "no measurement near it"
        return f"{spelled(self.tpot)}, {self.alike if self.own else rows}"

    @property
    def words(self) -> str:
        """The bands of TPOT and TTFT in a sentence."""
        errors = f"{spelled(self.tpot)} in TPOT, {spelled(self.ttft)} in TTFT"
        if self.own:
            return f"{self.alike} moved TPOT and TTFT and leave {errors}, 9 times in 10"
        if not self.is_near:
            return (
                f"no measurement near it; a measured one may be {errors} off, 9 times in 10 (as {self.alike} "
                "were)"
            )
        return (
            f"measured was {errors} off, for 90 % of the {self.num_rows} held-out rows most like it "
            f"({self.alike})"
        )


def spelled(band: Factors) -> str:
    """The band as an interval, or in words where it spans more than `WIDEST`."""
    low, high = band
    if high / low > WIDEST:
        return "an order of magnitude"
    return f"{100 * (low - 1):+.0f} to {100 * (high - 1):+.0f} %"


@cache
def _bands() -> Table:
    """Bands of measured GPU deployments, and of CPUs by this project's own records."""
    names = ("error_bands.json", "cpu_band.json")
    files = map(Path(__file__).with_name, names)
    parts = (json.loads(file.read_text(encoding="utf-8"))["bands"] for file in files)
    return {key: entry for part in parts for key, entry in part.items()}


def error_band(likeness: Likeness, bands: Table | None = None) -> ErrorBand | None:
    """The band of the rows most like a deployment, where its model was measured else of models that were not,
    else of deployments that nothing is like; None where the table has none of them."""
    known = _bands() if bands is None else bands
    unseen = replace(likeness, known="model not measured")
    wider = unseen.band_names if likeness.known == "model measured" else []
    for key in (*likeness.band_names, *wider):
        if entry := known.get(key):
            return _band_of(entry, entry["rows"], key.replace("|", ", "))
    return unlike_band(known) if NOTHING_LIKE_IT in known else None


def unlike_band(bands: Table | None = None) -> ErrorBand:
    entry = (_bands() if bands is None else bands)[NOTHING_LIKE_IT]
    return _band_of(entry, 0, entry["of"])


def _band_of(entry: Mapping[str, Any], num_rows: int, alike: str) -> ErrorBand:
    tpot, ttft, throughput = ((entry[name][0], entry[name][1]) for name in MEASURES)
    return ErrorBand(tpot, ttft, throughput, num_rows, alike)


def narrowed_band(own: OwnRows, known: ErrorBand) -> ErrorBand:
    factors = (own.band(measure, getattr(known, measure)) for measure in MEASURES)
    return ErrorBand(*factors, num_rows=len(own.tpot), alike=own.text, own=True)
