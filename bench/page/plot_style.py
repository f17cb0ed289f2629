"""Matplotlib style of the reports, and conversion of figures to inline SVG."""

from __future__ import annotations

import hashlib
import io
import re
from collections.abc import Sequence
from html import escape
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

INK, MUTED, GRID = "#1c2733", "#64748b", "#e2e8f0"
BASE, NEW = "#2563eb", "#ea7317"
SERIES = (BASE, NEW, "#0d9488", "#9333ea", "#be123c", "#475569")
GOOD, BAD, UNSURE = "#15803d", "#b91c1c", "#a16207"
WAIT, PREFILL, DECODE = "#cbd5e1", "#f59e0b", BASE

_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.sans-serif": ["Helvetica", "Arial", "Liberation Sans", "DejaVu Sans"],
    "font.size": 10,
    "text.color": INK,
    "axes.labelcolor": MUTED,
    "axes.edgecolor": GRID,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "xtick.minor.size": 0,
    "ytick.minor.size": 0,
    "figure.constrained_layout.use": True,
}


def canvas(
    columns: int = 1, rows: int = 1, *, width: float = 9.0, height: float = 3.0, **options: Any
) -> tuple[Figure, Sequence[Axes]]:
    """A figure in the report style and its axes as a flat list."""
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(width, height))
        axes = figure.subplots(rows, columns, squeeze=False, **options)
    return figure, list(axes.flat)


def title(axis: Axes, text: str) -> None:
    """A left-aligned axes title."""
    axis.set_title(text, loc="left", fontsize=10.5, fontweight="bold", pad=8, color=INK)


def label(
    axis: Axes, text: str, at: tuple[float, float], offset: tuple[float, float], **style: Any
) -> None:
    """A text beside a point, `offset` from it in typographic points."""
    axis.annotate(text, at, xytext=offset, textcoords="offset points", **style)


def to_svg(figure: Figure, alt: str) -> str:
    """The figure as an `<svg>` element with no prologue, scalable to its container.

    `alt` is the text for screen readers. Element ids are derived from it, so that the figures of one page do
    not share clip paths.
    """
    salt = hashlib.sha256(alt.encode()).hexdigest()[:12]
    buffer = io.StringIO()
    with mpl.rc_context({**_STYLE, "svg.hashsalt": salt}):
        # `savefig` would draw twice: once for the layout alone.
        FigureCanvasSVG(figure).print_svg(buffer, metadata={"Date": None, "Creator": None})
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    return f'<svg role="img" aria-label="{escape(alt)}" ' + svg.removeprefix("<svg ")
