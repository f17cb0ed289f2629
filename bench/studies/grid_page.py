"""The report of a grid: the Pareto plot, the table of all cells, and the failed ones with their reasons."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...quant.base.atomic_io import write_atomically
from ..page.page import (
    MISSING,
    Card,
    Figure,
    Page,
    ReportTable,
    ReportVerdict,
    Tone,
    drawn,
    number,
    percent,
)
from ..page.plot_style import INK, MUTED, SERIES, canvas, name_points, title, to_svg
from ..page.templates import page_of
from ..record.result import to_json
from ..report.parts import write_page
from .grid_cells import (
    FIGURE_FORMULAS,
    FIGURES,
    GRID_NAME,
    Row,
    grid_rows,
    pareto_front,
    prefers_less,
    write_parquet,
)
from .grid_plan import GridPlan, flat, unusual

TABLE_NAME = "grid.parquet"
SHARES = ("slo_share", "kv_cache_usage_max", "prefix_cache_hit_rate", "throughput_cv")
# Not columns of the page's table: they follow from the parameters, or stand in the cell's own report.
NOT_SHOWN = ("users", "gpus", "completed", "total_token_throughput", "p99_e2el_ms")
AXIS_LABELS = {
    "tokens_per_user": "output tokens/s per user",
    "tokens_per_gpu": "output tokens/s per GPU",
}


def write_grid(plan: GridPlan, folder: Path, axes: tuple[str, str]) -> dict[str, Any]:
    """`grid.json`, `grid.parquet` and the report of what is measured so far; returns the record."""
    rows = grid_rows(plan, folder)
    record = {
        "name": plan.name,
        "spec": plan.spec,
        "axes": list(axes),
        "pareto_front": pareto_front(rows, axes),
        "cells": rows,
    }
    write_atomically(folder / GRID_NAME, to_json(record))
    write_parquet(rows, folder / TABLE_NAME)
    write_page(grid_page(record), folder)
    return record


def grid_page(record: Mapping[str, Any]) -> Page:
    """The page of a grid's record."""
    rows: Sequence[Row] = record["cells"]
    axes = (record["axes"][0], record["axes"][1])
    figures = []
    if any(all(row[axis] is not None for axis in axes) for row in rows):
        caption = (
            "Every point is a cell; the dashed line joins those that no other beats on both axes."
        )
        figures.append(Figure("pareto", pareto_svg(rows, record["pareto_front"], axes), caption))
    params = dict.fromkeys(
        name for row in rows for name in row if name.startswith(("serve.", "bench."))
    )
    return page_of(
        "studies/grid.jinja",
        grid=record,
        verdict=grid_verdict(record),
        cards=grid_cards(rows),
        figures=figures,
        params=list(params),
        shown=[
            key
            for key in FIGURES
            if key not in NOT_SHOWN and any(row[key] is not None for row in rows)
        ],
        options=unusual(record["spec"]["options"]),
        FIGURES=FIGURES,
        FIGURE_FORMULAS=FIGURE_FORMULAS,
        figure_text=figure_text,
        param_text=flat,
    )


def grid_verdict(record: Mapping[str, Any]) -> ReportVerdict:
    """How many cells are measured, and which one generates the most."""
    rows: Sequence[Row] = record["cells"]
    done = [row for row in rows if row["status"] == "done"]
    failed = sum(row["status"] == "failed" for row in rows)
    headline = f"{len(done)} of {len(rows)} cells are measured" + (
        f", {failed} failed." if failed else "."
    )
    best = max(done, key=lambda row: row["output_throughput"] or 0.0, default=None)
    if best is None:
        return ReportVerdict("bad", headline, "There is nothing to compare.")
    said = (
        f"Most throughput: {number(best['output_throughput'], 0)} output tokens/s by {best['cell']}; on the "
        f"Pareto front: {', '.join(record['pareto_front']) or 'none'}."
    )
    tone: Tone = "bad" if failed else "plain" if len(done) == len(rows) else "unsure"
    return ReportVerdict(tone, headline, said)


def grid_cards(rows: Sequence[Row]) -> list[Card]:
    """The best value of the main figures, each with its cell."""
    cards = []
    for key, heading, unit in (
        ("output_throughput", "Most output", "tokens/s"),
        ("tokens_per_user", "Fastest for a user", "tokens/s"),
        ("median_ttft_ms", "Shortest median TTFT", "ms"),
    ):
        known = [row for row in rows if row[key] is not None]
        if known:
            sign = -1 if prefers_less(key) else 1
            best = max(known, key=lambda row: sign * row[key])
            cards.append(Card(heading, number(best[key], 1), unit, best["cell"]))
    return cards


def console_table(record: Mapping[str, Any]) -> ReportTable:
    """The figures that fit a terminal; a cell's name says its parameters."""
    keys = ("output_throughput", "tokens_per_user", "median_ttft_ms", "median_tpot_ms", "failed")
    body = []
    for row in record["cells"]:
        mark = " *" if row["cell"] in record["pareto_front"] else ""
        figures = [figure_text(key, row[key]) for key in keys]
        if row["status"] != "done":
            figures = [row["status"], *[""] * (len(keys) - 1)]
        body.append([row["cell"] + mark, *figures])
    return ReportTable(["cell", *(FIGURES[key] for key in keys)], body)


def figure_text(key: str, value: float | None) -> str:
    """A figure of a cell as text."""
    if value is None:
        return MISSING
    if key in SHARES:
        return percent(value)
    return f"{value:,.4g}" if abs(value) < 1000 else number(value, 0)


@drawn
def pareto_svg(rows: Sequence[Row], front: Sequence[str], axes: tuple[str, str]) -> str:
    """Two figures of every cell against each other, coloured by server configuration, with the front."""
    across, up = axes
    figure, (axis,) = canvas(width=11, height=4.6)
    points = {
        row["cell"]: (row[across], row[up], row)
        for row in rows
        if row[across] is not None and row[up] is not None
    }
    line = [points[key][:2] for key in front]
    axis.plot(*zip(*line, strict=True), color=MUTED, linewidth=1, linestyle="--", zorder=1)
    servers = list(dict.fromkeys(row["serve"] for row in rows))
    for place, server in enumerate(servers):
        mine = [(x, y) for x, y, row in points.values() if row["serve"] == server]
        if mine:
            colour = SERIES[place % len(SERIES)]
            axis.plot(
                *zip(*mine, strict=True), "o", color=colour, markersize=7, label=server, zorder=2
            )
    if any(servers):
        figure.legend(loc="outside lower center", ncols=3, fontsize=9, frameon=False)
    axis.margins(0.12)
    for axis_label, name in ((axis.set_xlabel, across), (axis.set_ylabel, up)):
        better = "less is better" if prefers_less(name) else "more is better"
        axis_label(f"{AXIS_LABELS.get(name, FIGURES[name])} ({better})")
    title(axis, f"{FIGURES[up]} against {FIGURES[across]}")
    order = sorted(points, key=lambda key: key not in front)
    names = [(points[key][2]["bench"] or key, points[key][:2]) for key in order]
    for place, text in name_points(axis, names, fontsize=8).items():
        text.set_color(INK if order[place] in front else MUTED)
    return to_svg(figure, f"{up} against {across} of {len(points)} cells")
