"""Tables of held-out errors: median and mean absolute error and bias of TPOT, TTFT and throughput."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from typing import Any

import numpy as np
from llmopt.engine.planner.error_bands import FEWEST_ROWS, MEASURES, Likeness, error_band
from llmopt.engine.planner.step_model import generation

from .columns import Column, Columns, Predicted
from .fit import correction_terms
from .rows import Row

HELD = (0.015, 0.985)
"""Quantiles of the rows: the rows of a deployment err together, so that those of a new one fall outside of
the band of the others more often than one in ten beyond 5 and 95 %. Chosen inside the fitting half, where
wider ones hold no more rows of deployments left out."""
HEADER = f"{'':34}{'rows':>6}" + "".join(f"{name:>28}" for name in MEASURES)
LEGEND = f"{'':34}{'':6}" + f"{'median   mean   bias, %':>28}" * len(MEASURES)


def errors(predicted: Predicted, measured: Predicted) -> dict[str, Column]:
    """Relative errors by measure."""
    return {name: getattr(predicted, name) / getattr(measured, name) - 1 for name in MEASURES}


def line(label: str, found: Mapping[str, Column]) -> str:
    """A row of the table; rows without a prediction do not count."""
    answered = ~np.isnan(found[MEASURES[0]])
    cells = [f"{label:34}{answered.sum():6}"]
    for name in MEASURES:
        values = 100 * found[name][answered]
        size = np.abs(values)
        cells.append(
            f"{np.median(size):14.1f}{size.mean():7.1f}{np.median(values):+7.1f}"
            if len(values)
            else f"{'-':>28}"
        )
    return "".join(cells)


def by(title: str, of: Callable[[Row], str], columns: Columns, found: Mapping[str, Column]) -> str:
    """Lines of each value of a property of the rows."""
    values = np.array([of(row) for row in columns.rows])
    lines = [title]
    for value in sorted(set(values)):
        here = values == value
        lines.append(line(f"  {value}", {name: column[here] for name, column in found.items()}))
    return "\n".join(lines)


def likeness(row: Row, known: bool) -> Likeness:
    """Properties that the error of a row depends on."""
    kind = "mixture" if row.planned.shape.experts else "dense"
    measured = "model measured" if known else "model not measured"
    return Likeness(row.engine, generation(row.device), measured, kind, row.regime)


Judged = tuple[Row, Likeness, tuple[float, float, float]]
"""A held-out row, and its measured values in parts of the predicted."""


def judged_rows(columns: Columns, predicted: Predicted, corrected: Container[str]) -> list[Judged]:
    """The ratios of held-out rows; a row's model is known where the fit has a correction of it."""
    ratios = [getattr(columns.measured, n) / getattr(predicted, n) for n in MEASURES]
    return [
        (row, likeness(row, next(iter(correction_terms("tpot", row))) in corrected), tuple(ratio))
        for row, ratio in zip(columns.rows, np.array(ratios).T.tolist(), strict=True)
    ]


def bands(judged: list[Judged]) -> dict[str, dict[str, Any]]:
    """Bands by key, of those with enough rows."""
    held: dict[str, list[tuple[float, float, float]]] = {}
    for _, like, ratios in judged:
        for key in like.band_names:
            held.setdefault(key, []).append(ratios)
    return {
        key: band_of(ratios) for key, ratios in sorted(held.items()) if len(ratios) >= FEWEST_ROWS
    }


def band_of(ratios: list[tuple[float, float, float]]) -> dict[str, Any]:
    """Entry of a band: the rows, and quantiles of each measure."""
    return {"rows": len(ratios)} | {
        name: [float(f"{q:.3g}") for q in held_quantiles([ratio[i] for ratio in ratios])]
        for i, name in enumerate(MEASURES)
    }


def held_quantiles(ratios: list[float], quantiles: tuple[float, float] = HELD) -> Column:
    """Quantiles that leave a row's half beyond the outermost, as a new row would."""
    return np.quantile(ratios, quantiles, method="weibull")


def coverage(judged: list[Judged]) -> dict[str, tuple[float, int]]:
    """Share of rows within the band of the other groups' rows, by measure; a row's own deployments are left
    out of its band."""
    within: dict[str, list[bool]] = {name: [] for name in MEASURES}
    for group in sorted({row.group for row, _, _ in judged}):
        known = bands([entry for entry in judged if entry[0].group != group])
        for row, like, ratios in judged:
            if row.group == group and (band := error_band(like, known)):
                for name, ratio in zip(MEASURES, ratios, strict=True):
                    low, high = getattr(band, name)
                    within[name].append(low <= ratio <= high)
    return {name: (float(np.mean(held)), len(held)) for name, held in within.items()}
