"""Report pages (verdict, cards, sections, tables, figures) as HTML and Markdown, and numbers as text."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Literal, ParamSpec

from ...base.atomic_io import write_atomically
from ...base.extras import is_installed

if TYPE_CHECKING:
    import jinja2


MISSING = "n/a"


def number(value: float | None, digits: int = 2) -> str:
    """A number with `digits` decimals and thousands separators, or `n/a`."""
    return MISSING if value is None else f"{value:,.{digits}f}"


def percent(value: float | None, digits: int = 1, *, signed: bool = False) -> str:
    """0.123 as `12.3 %`."""
    if value is None:
        return MISSING
    return f"{value * 100:{'+' if signed else ''}.{digits}f} %"


def signed_percent(value: float | None, digits: int = 1) -> str:
    """0.123 as `+12.3 %`, with as many more digits as tell a small change from none."""
    while value and digits < 6 and abs(value) * 100 < 0.5 * 10**-digits:
        digits += 1
    return percent(value, digits, signed=True)


def sizes(before: float | None, after: float | None) -> tuple[str, str]:
    """Two sizes as text: in bytes where `size` would print different ones alike."""
    shown = size(before), size(after)
    if before is None or after is None or before == after or shown[0] != shown[1]:
        return shown
    return f"{before:,.0f} B", f"{after:,.0f} B"


def size(num_bytes: float | None) -> str:
    """Bytes in the binary unit that leaves one to four digits before the point."""
    if num_bytes is None:
        return MISSING
    for unit in ("B", "KiB", "MiB"):
        if abs(num_bytes) < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.2f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.2f} GiB"


def per_second(value: float, unit: str) -> str:
    """A rate with a decimal prefix: `3.21 GB/s`."""
    for prefix, scale in (("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if abs(value) >= scale:
            return f"{value / scale:.3g} {prefix}{unit}/s"
    return f"{value:.3g} {unit}/s"


def bounds(
    interval_: tuple[float | None, float | None] | list[float | None] | None, digits: int = 2
) -> str:
    """An interval of which a side may be open: `1.00 to unbounded`."""
    if interval_ is None:
        return MISSING
    low, high = (None if side is None else f"{side:,.{digits}f}" for side in interval_)
    return "unbounded" if low is high is None else f"{low or 'unbounded'} to {high or 'unbounded'}"


Tone = Literal["good", "bad", "unsure", "plain"]


@dataclass(frozen=True, slots=True)
class ReportVerdict:
    """Headline and one explanatory sentence, with a tone."""

    tone: Tone
    headline: str
    sentence: str


@dataclass(frozen=True, slots=True)
class Card:
    """A key figure."""

    label: str
    value: str
    unit: str = ""
    note: str = ""


@dataclass(frozen=True, slots=True)
class ReportTable:
    """A table of text cells; the first column labels the row, the others are right-aligned numbers.

    `tones` colours rows: {row index: tone}.
    """

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""
    tones: dict[int, Tone] = field(default_factory=dict)
    is_prose: bool = False


@dataclass(frozen=True, slots=True)
class Figure:
    """An SVG with its file stem and caption. `half` figures are placed side by side."""

    name: str
    svg: str
    caption: str = ""
    half: bool = False


P = ParamSpec("P")
NO_PICTURES = "Without pictures, which need matplotlib: pip install 'llmopt[plots]'."


def drawn(draw: Callable[P, str]) -> Callable[P, str]:
    """Make a function that draws an SVG return an empty text where matplotlib is not installed."""

    def draw_if_possible(*arguments: P.args, **options: P.kwargs) -> str:
        return draw(*arguments, **options) if is_installed("matplotlib") else ""

    return draw_if_possible


@dataclass(frozen=True, slots=True)
class MarkedText:
    """A text in pieces with a shade each, from 0 (none) to 4, and what the shade stands for."""

    pieces: Sequence[tuple[str, int, str]]
    caption: str = ""

    @property
    def shown(self) -> list[tuple[str, int, str]]:
        """The pieces with visible line breaks."""
        return [(text.replace("\n", "\u21b5"), shade, title) for text, shade, title in self.pieces]

    @property
    def markdown(self) -> str:
        """The text with its shaded runs bold, and everything else escaped."""
        runs = groupby(self.shown, key=lambda piece: piece[1] > 0)
        texts = ((shaded, _escaped("".join(text for text, *_ in run))) for shaded, run in runs)
        return "".join(_bold(text) if shaded else text for shaded, text in texts)


def _escaped(text: str) -> str:
    return re.sub(r"([\\`*_{}\[\]<>#|~!&])", r"\\\1", text)


def _bold(text: str) -> str:
    """Bold without the spaces around, which Markdown does not take."""
    inner = text.strip()
    return text.replace(inner, f"**{inner}**") if inner else text


@dataclass(frozen=True, slots=True)
class Section:
    """A heading with paragraphs, figures, tables and marked texts, in that order, or the tables before the
    figures."""

    title: str
    paragraphs: Sequence[str] = ()
    figures: Sequence[Figure] = ()
    tables: Sequence[ReportTable] = ()
    folded: bool = False
    tables_first: bool = False
    texts: Sequence[MarkedText] = ()


@dataclass(frozen=True, slots=True)
class Page:
    """A whole report."""

    title: str
    subtitle: str
    verdict: ReportVerdict
    cards: Sequence[Card]
    sections: Sequence[Section]
    warnings: Sequence[str] = ()

    @property
    def card_rows(self) -> list[list[str]]:
        """The key numbers as rows of a table."""
        return [[card.label, f"{card.value} {card.unit}".strip(), card.note] for card in self.cards]

    def without_figures(self) -> Page:
        """The page without figures, for a standalone Markdown file."""
        return replace(self, sections=[replace(section, figures=()) for section in self.sections])

    def write(self, html: Path | None = None, markdown: Path | None = None) -> None:
        """The page as one HTML file and its tables as a Markdown file, where they are asked for."""
        if html is not None:
            write_atomically(html, to_html(self))
        if markdown is not None:
            write_atomically(markdown, to_markdown(self.without_figures()))


@cache
def _environment() -> jinja2.Environment:
    import jinja2

    return jinja2.Environment(
        loader=jinja2.PackageLoader("llmopt.bench.page", "."),
        # HTML escapes everything but figures; Markdown is not escaped.
        autoescape=jinja2.select_autoescape(enabled_extensions=("html.jinja",), default=False),
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )


def to_html(page: Page) -> str:
    """One self-contained HTML file: inline style and figures, nothing fetched."""
    from .plot_style import COLOURS, themed

    template = _environment().get_template("report.html.jinja")
    return template.render(page=page, colours=COLOURS, themed=themed)


def to_markdown(page: Page) -> str:
    """The page as Markdown; figures are links to SVG files in the same folder."""
    return _environment().get_template("report.md.jinja").render(page=page).rstrip() + "\n"


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a Markdown table; bars in cells are escaped."""
    text = _environment().get_template("table.md.jinja").render(header=header, rows=rows)
    return text.rstrip("\n").split("\n")
