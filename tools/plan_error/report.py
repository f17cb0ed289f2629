"""Held-out errors as tables, and the bands that hold nine of ten rows of a model or a GPU that was left out.

A band is the middle 90 % of the rows that are alike, stretched about its centre in logarithms: rows of one
deployment err together, so that those of another one lie outside more often. The stretch of a measure is the
least with which bands hold 90 % of rows that are not theirs: of other deployments where the model and the GPU
were fitted, of other models where the model was not, of other GPUs where the GPU was not.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

import numpy as np
from llmopt.engine.planner.error_bands import (
    FEWEST_ROWS,
    MEASURES,
    NOTHING_LIKE_IT,
    Known,
    Likeness,
    error_band,
)
from llmopt.engine.planner.step_model import generation

from .columns import Column, Columns, Predicted
from .fit import model_key
from .rows import Row

HELD = (0.05, 0.95)
NOMINAL = 0.9
UNLIKE = "rows of an engine or a GPU generation that was left out of the fit"
HEADER = f"{'':34}{'rows':>6}" + "".join(f"{name:>28}" for name in MEASURES)
LEGEND = f"{'':34}{'':6}" + f"{'median   mean   bias, %':>28}" * len(MEASURES)
Part = Callable[[Row], str]


def errors(predicted: Predicted, measured: Predicted) -> dict[str, Column]:
    """Relative errors by measure; NaN where it was not measured."""
    return {name: getattr(predicted, name) / getattr(measured, name) - 1 for name in MEASURES}


def line(label: str, found: Mapping[str, Column]) -> str:
    """A row of the table."""
    cells = [f"{label:34}{len(found[MEASURES[0]]):6}"]
    for name in MEASURES:
        values = 100 * found[name][~np.isnan(found[name])]
        size = np.abs(values)
        cells.append(
            f"{np.median(size):14.1f}{size.mean():7.1f}{np.median(values):+7.1f}"
            if len(values)
            else f"{'-':>28}"
        )
    return "".join(cells)


def by(title: str, of: Part, columns: Columns, found: Mapping[str, Column]) -> str:
    """Lines of each value of a property of the rows."""
    values = np.array([of(row) for row in columns.rows])
    lines = [title]
    for value in sorted(set(values)):
        here = values == value
        lines.append(line(f"  {value}", {name: column[here] for name, column in found.items()}))
    return "\n".join(lines)


def likeness(row: Row, known: Known) -> Likeness:
    """Properties that the error of a row depends on."""
    kind = "mixture" if row.planned.shape.experts else "dense"
    return Likeness(row.engine, generation(row.device), known, kind, row.regime)


Ratios = tuple[float, float, float]
Judged = tuple[Row, Likeness, Ratios]
"""A row that was not fitted, and its measured values in parts of the predicted; NaN where there is none."""


def judged_rows(columns: Columns, predicted: Predicted, known: Sequence[Known]) -> list[Judged]:
    """The ratios of rows that were not fitted, and what the fit knew of each."""
    ratios = [getattr(columns.measured, n) / getattr(predicted, n) for n in MEASURES]
    return [
        (row, likeness(row, of_row), tuple(ratio))
        for row, of_row, ratio in zip(columns.rows, known, np.array(ratios).T.tolist(), strict=True)
    ]


def known_by(models: Container[str], columns: Columns) -> list[Known]:
    """What a fit of these models knows of each row, on a GPU of the fit."""
    names: tuple[Known, Known] = ("model not measured", "model measured")
    return [names[model_key(row) in models] for row in columns.rows]


Stretches = Mapping[str, Mapping[str, float]]
"""Of each measure, by what the fit knew of a row."""


def bands(
    judged: Sequence[Judged],
    stretches: Stretches | None = None,
    unlike: Mapping[str, Any] | None = None,
) -> dict[str, dict[str, Any]]:
    """Bands by key, of those with enough rows of the TPOT; a measure with fewer has the band of `unlike`."""
    held: dict[str, list[Ratios]] = {}
    for _, like, ratios in judged:
        for key in like.band_names:
            held.setdefault(key, []).append(ratios)
    found = {
        key: _band_of(ratios, (stretches or {}).get(key.split("|")[2], {}), unlike or {})
        for key, ratios in sorted(held.items())
    }
    return {key: band for key, band in found.items() if band is not None}


def _band_of(
    ratios: list[Ratios], stretches: Mapping[str, float], unlike: Mapping[str, Any]
) -> dict[str, Any] | None:
    """Entry of a band; None without enough rows of a measure that `unlike` cannot lend."""
    entry: dict[str, Any] = {"rows": len(ratios)}
    for name, column in zip(MEASURES, np.log(np.array(ratios)).T, strict=True):
        known = column[~np.isnan(column)]
        if len(known) < FEWEST_ROWS:
            if name == MEASURES[0] or name not in unlike:
                return None
            entry[name] = unlike[name]
            continue
        low, high = held_quantiles(known.tolist())
        centre, half = (low + high) / 2, stretches.get(name, 1.0) * (high - low) / 2
        entry[name] = [float(f"{q:.3g}") for q in np.exp([centre - half, centre + half])]
    return entry


def unlike_entry(judged: Sequence[Judged]) -> dict[str, Any]:
    """The band of deployments that no measured one is like."""
    return {"of": UNLIKE, **(_band_of([ratios for _, _, ratios in judged], {}, {}) or {})}


def held_quantiles(ratios: list[float], quantiles: tuple[float, float] = HELD) -> Column:
    """Quantiles that leave a row's half beyond the outermost, as a new row would."""
    return np.quantile(ratios, quantiles, method="weibull")


def needed_stretches(
    judged: Sequence[Judged], pool: Sequence[Judged], part: Part, unlike: Mapping[str, Any]
) -> list[Ratios]:
    """For each judged row, how far the band of the rows of other parts has to be stretched to hold it."""
    found = []
    for name in sorted({part(row) for row, _, _ in judged}):
        known = bands([entry for entry in pool if part(entry[0]) != name], unlike=unlike)
        known[NOTHING_LIKE_IT] = dict(unlike)
        for row, like, ratios in judged:
            if part(row) == name and (band := error_band(like, known)) is not None:
                sides = (np.log(getattr(band, measure)) for measure in MEASURES)
                found.append(
                    tuple(
                        abs(np.log(ratio) - side.mean()) / (np.ptp(side) / 2)
                        for ratio, side in zip(ratios, sides, strict=True)
                    )
                )
    return found


def stretch_of(needed: Sequence[Ratios]) -> dict[str, float]:
    """The least stretch of each measure that holds 90 % of the rows."""
    quantiles = np.nanquantile(np.array(needed), NOMINAL, axis=0)
    return dict(zip(MEASURES, np.maximum(1.0, quantiles).tolist(), strict=True))


def coverage(needed: Sequence[Ratios], stretch: Mapping[str, float]) -> dict[str, float]:
    """Share of the rows that the bands hold, by measure."""
    columns = zip(MEASURES, np.array(needed).T, strict=True)
    return {n: float(np.mean(c[~np.isnan(c)] <= stretch[n])) for n, c in columns}
