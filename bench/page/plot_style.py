"""Colours and Matplotlib style of the reports, and conversion of figures to inline SVG.

Figures are drawn in the light colours. In a page `themed` puts the names of variables in their place, so
that the style sheet decides: a reader who prefers dark pages gets dark charts. An SVG file stays light,
whatever shows it.
"""

from __future__ import annotations

import hashlib
import io
import re
from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING, Any, Literal

from ...base.extras import is_installed

if TYPE_CHECKING or is_installed("matplotlib"):
    import matplotlib as mpl
    from matplotlib.axes import Axes
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure
    from matplotlib.text import Text
    from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator, StrMethodFormatter
    from matplotlib.transforms import Bbox

INK, MUTED, GRID = "#1c2733", "#64748b", "#e2e8f0"
BASE, NEW = "#2563eb", "#c2570c"
SERIES = (BASE, NEW, "#0d9488", "#9333ea", "#be123c", "#475569", "#4d7c0f", "#78350f")
_DARK = ("#5b8def", "#f59e56", "#2dd4bf", "#c084fc", "#fb7185", "#94a3b8", "#a3e635", "#d6a36a")
GOOD, BAD, UNSURE = "#15803d", "#b91c1c", "#a16207"
WAIT, PREFILL, DECODE = "#cbd5e1", "#f59e0b", BASE

COLOURS = {
    "paper": ("#ffffff", "#14181f"),
    "soft": ("#f8fafc", "#1b212b"),
    "ink": (INK, "#e5e9f0"),
    "muted": (MUTED, "#9aa7b8"),
    "line": (GRID, "#2c3542"),
    "good": (GOOD, "#4ade80"),
    "bad": (BAD, "#f87171"),
    "unsure": (UNSURE, "#fbbf24"),
    "plain": ("#334155", "#cbd5e1"),
    "wait": (WAIT, "#475569"),
    "prefill": (PREFILL, "#d9a114"),
    **{f"series{n}": pair for n, pair in enumerate(zip(SERIES, _DARK, strict=True))},
    "notice": ("#fefce8", "#2a2410"),
    "notice-line": ("#fde68a", "#6b5a1e"),
    "shade1": ("#fef3c7", "#3d3410"),
    "shade2": ("#fcd9b6", "#553312"),
    "shade3": ("#f8b4b4", "#6b2424"),
    "shade4": ("#e57373", "#933030"),
}
"""Variables of the style sheet: the values on a light and on a dark page."""
_NAMES = {light: name for name, (light, _) in COLOURS.items()} | {"#000000": "ink"}

STYLE: dict[Any, Any] = {
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
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(width, height))
        axes = figure.subplots(rows, columns, squeeze=False, **options)
    return figure, list(axes.flat)


def title(axis: Axes, text: str) -> None:
    axis.set_title(text, loc="left", fontsize=10.5, fontweight="bold", pad=8, color=INK)


def label(
    axis: Axes, text: str, at: tuple[float, float], offset: tuple[float, float], **style: Any
) -> None:
    axis.annotate(text, at, xytext=offset, textcoords="offset points", **style)


Place = tuple[tuple[float, float], dict[str, str]]
"""Position of a name: the offset from its point in typographic points, and how it is aligned there."""
BESIDE: tuple[Place, ...] = tuple(
    ((x, y), {"ha": across, "va": up})
    for x, y, across, up in (
        *((10, 0, "left", "center"), (-10, 0, "right", "center")),
        *((0, 9, "center", "bottom"), (0, -9, "center", "top")),
        *((8, 6, "left", "bottom"), (8, -6, "left", "top")),
        *((-8, 6, "right", "bottom"), (-8, -6, "right", "top")),
    )
)
MARKER_POINTS = 5.0
"""Half the size of a marker that no name may cover."""
Span = tuple[tuple[float, float], tuple[float, float]]


def name_points(
    axis: Axes,
    points: Sequence[tuple[str, tuple[float, float]]],
    spans: Sequence[Span] = (),
    **style: Any,
) -> dict[int, Text]:
    """Write (name, point), the first ones first: where they cover no name, none of the points and nothing of
    `spans` (from one corner to the other), on the axes. Names without such a place are not written;
    returned are the others, by number."""
    figure = axis.get_figure(root=True)
    assert figure is not None
    figure.draw_without_rendering()
    frame = axis.get_window_extent()
    half = MARKER_POINTS * figure.dpi / 72
    taken = [Bbox(axis.transData.transform(sorted(span))).padded(half / 2) for span in spans]
    centres = axis.transData.transform([at for _, at in points])
    taken += [Bbox([centre - half, centre + half]) for centre in centres]
    written = {}
    for number, (name, at) in enumerate(points):
        for offset, alignment in BESIDE:
            given: dict[str, Any] = {"fontsize": 8.5, **alignment, **style}
            text = axis.annotate(name, at, offset, textcoords="offset points", **given)
            text.set_in_layout(False)
            box = text.get_window_extent()
            inside = Bbox.intersection(box, frame)
            if inside and inside.bounds == box.bounds and not box.count_overlaps(taken):
                taken.append(box)
                written[number] = text
                break
            text.remove()
    return written


def log_scale(axis: Axes, *sides: Literal["x", "y"]) -> None:
    """A logarithmic scale with numbers as people write them, at 1, 2 and 5 of each decade."""
    for side in sides:
        getattr(axis, f"set_{side}scale")("log")
        ticks = getattr(axis, f"{side}axis")
        ticks.set_major_locator(LogLocator(subs=(1, 2, 5)))
        ticks.set_major_formatter(StrMethodFormatter("{x:g}"))
        ticks.set_minor_locator(NullLocator())


def whole_numbers(axis: Axes, *sides: Literal["x", "y"]) -> None:
    for side in sides:
        getattr(axis, f"{side}axis").set_major_locator(MaxNLocator(integer=True))


def themed(svg: str) -> str:
    variables = {colour: f"var(--{name})" for colour, name in _NAMES.items()}
    pattern = r"(?<=: )#[0-9a-f]{6}(?=[;\"])"
    return re.sub(pattern, lambda match: variables.get(match[0], match[0]), svg)


def to_svg(figure: Figure, alt: str) -> str:
    """The figure as an `<svg>` element with no prologue, scalable to its container. `alt` is the text for
    screen readers. Element ids are derived from it, so that the figures of one page do not share clip
    paths."""
    salt = hashlib.sha256(alt.encode()).hexdigest()[:12]
    buffer = io.StringIO()
    with mpl.rc_context({**STYLE, "svg.hashsalt": salt}):
        # `savefig` would draw twice: once for the layout alone.
        FigureCanvasSVG(figure).print_svg(buffer, metadata={"Date": None, "Creator": None})
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    return f'<svg role="img" aria-label="{escape(alt)}" ' + svg.removeprefix("<svg ")
