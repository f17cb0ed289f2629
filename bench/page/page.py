"""Report pages (verdict, cards, sections, tables, figures) as HTML and Markdown, and numbers as text.

Page templates are jinja texts over a record that read like the report. Their lines mean:

    # Title                       the line below it is the subtitle
    ! a warning                   stands in the verdict, because it changes how that is read
    > a note                      folded below the key figures, or else below the first section
    * label | value | unit | note a key figure
    ## Section                    (### Section is folded)
    A paragraph, up to the next empty line.

    A caption, directly above its table
    | header | header             (|| header | header: a table of prose, not of numbers)
    | cell   | cell               (bad| cell | cell: a row in a tone)

`{{ insert(x) }}` on a line of its own puts a figure, table, verdict or card there, or several;
nothing where there is none. Values are escaped, so that text of a record is never read as a mark. HTML and
Markdown are both rendered from the parsed page.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from html import escape, unescape
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, ParamSpec

from ...base.atomic_io import write_atomically
from ...base.extras import is_installed

if TYPE_CHECKING:
    import jinja2

MISSING = "n/a"


def number(value: float | None, digits: int = 2) -> str:
    return MISSING if value is None else f"{value:,.{digits}f}"


def percent(value: float | None, digits: int = 1, *, signed: bool = False) -> str:
    """0.123 as `12.3 %`."""
    if value is None:
        return MISSING
    return f"{value * 100:{'+' if signed else ''}z.{digits}f} %"


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


def span(sides: Iterable[float | None], shown: Callable[[float], str] = number) -> str:
    """An interval as text; a side that is None or infinite is open: `1.00 to unbounded`."""
    known = [None if side is None or math.isinf(side) else shown(side) for side in sides]
    return " to ".join(side or "unbounded" for side in known) if any(known) else "unbounded"


def bounds(sides: Iterable[float | None] | None) -> str:
    return MISSING if sides is None else span(sides)


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
    """A table of text cells; the first column labels the row, the others are right-aligned numbers. `tones`
    colours rows: {row index: tone}."""

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
        return [(text.replace("\n", "\u21b5"), shade, title) for text, shade, title in self.pieces]

    @property
    def markdown(self) -> str:
        """The text with its shaded runs bold, and everything else escaped."""
        markdown = ""
        for shaded, run in groupby(self.shown, key=lambda piece: piece[1] > 0):
            text = re.sub(r"([\\`*_{}\[\]<>#|~!&])", r"\\\1", "".join(text for text, *_ in run))
            if shaded and (inner := text.strip()):  # Markdown takes no spaces within bold
                text = text.replace(inner, f"**{inner}**")
            markdown += text
        return markdown


@dataclass(slots=True)
class Section:
    """A heading with paragraphs, figures, tables and marked texts, in that order, or the tables before the
    figures."""

    title: str
    paragraphs: list[str] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)
    tables: list[ReportTable] = field(default_factory=list)
    folded: bool = False
    tables_first: bool = False
    texts: list[MarkedText] = field(default_factory=list)


@dataclass(slots=True)
class Page:
    """A whole report."""

    title: str = ""
    subtitle: str = ""
    verdict: ReportVerdict = ReportVerdict("plain", "", "")
    cards: list[Card] = field(default_factory=list)
    sections: list[Section] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def without_figures(self) -> Page:
        return replace(self, sections=[replace(section, figures=[]) for section in self.sections])

    def write(self, html: Path | None = None, markdown: Path | None = None) -> None:
        """The page as one HTML file and its tables as a Markdown file, where they are asked for."""
        if html is not None:
            write_atomically(html, to_html(self))
        if markdown is not None:
            write_atomically(markdown, to_markdown(self.without_figures()))


@cache
def _html_template() -> jinja2.Template:
    # Its values are plain text, in which no mark is to be hidden from the parser.
    return _template_environment().overlay(finalize=None).get_template("page/report.html.jinja")


def to_html(page: Page) -> str:
    """One self-contained HTML file: inline style and figures, nothing fetched."""
    from .plot_style import COLOURS, themed

    return _html_template().render(page=page, colours=COLOURS, themed=themed)


def to_markdown(page: Page) -> str:
    verdict, notes = page.verdict, list[str]()
    lines = [f"# {page.title}", "", page.subtitle, ""]
    lines += [f"**{verdict.headline}** {verdict.sentence}", ""]
    lines += [f"> Note: {warning}" for warning in page.warnings]
    if count := len(page.notes):
        heading = f"{count} note{'s' if count > 1 else ''} on the measurement:"
        notes = ["", heading, "", *(f"- {note}" for note in page.notes)]
    if page.cards:
        rows = [[card.label, f"{card.value} {card.unit}".strip(), card.note] for card in page.cards]
        lines += ["", *markdown_table(("", "value", ""), rows), *notes]
    for number, section in enumerate(page.sections):
        lines += ["", f"## {section.title}"]
        for paragraph in section.paragraphs:
            lines += ["", paragraph]
        for figure in section.figures:
            lines += ["", f"![{figure.caption or figure.name}]({figure.name}.svg)"]
        for table in section.tables:
            lines += ["", *([table.caption, ""] if table.caption else ())]
            lines += markdown_table(table.header, table.rows)
        for text in section.texts:
            lines += ["", text.caption, "", f"> {text.markdown}"]
        if number == 0 and not page.cards:
            lines += notes
    return "\n".join(lines).rstrip() + "\n"


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table: the first column is text, the others are set as numbers."""
    sides = ["---", *(["---:"] * (len(header) - 1))]
    lines = [[cell.replace("|", "\\|") for cell in cells] for cells in (header, *rows)]
    return [f"| {' | '.join(cells)} |" for cells in (lines[0], sides, *lines[1:])]


# Marks, as entities: what a value holds of them is text. The parser decodes them again.
ENTITIES = str.maketrans(
    {
        "|": "&#124;",
        "#": "&#35;",
        "*": "&#42;",
        "!": "&#33;",
        "\n": "&#10;",
        "\r": "&#13;",
        "\0": "",
    }
)
ROW = re.compile(r"(good|bad|unsure|plain|)(\|\|?)(.*)")
INSERTED = re.compile("\0(\\d+)")
Part = ReportVerdict | Card | Figure | ReportTable | MarkedText


def page_of(template: str, **record: Any) -> Page:
    reader, environment = PageReader(), _template_environment()
    read = environment.from_string if "\n" in template else environment.get_template
    page = reader.read(read(template).render(insert=reader.insert, **record))
    if not is_installed("matplotlib"):
        _warn_once(NO_PICTURES)
        page.notes.append(NO_PICTURES)
        page.sections = [
            section
            for section in page.sections
            if section.paragraphs or section.figures or section.tables or section.texts
        ]
    return page


class PageReader:
    """Reads the text of a rendered template line by line."""

    def __init__(self) -> None:
        self._page = Page()
        self._inserted: list[Part] = []
        self._paragraph: list[str] = []
        self._table: ReportTable | None = None
        self._rows: list[list[str]] = []

    def insert(self, parts: Part | Iterable[Part] | None) -> Any:
        """The marks of parts that were made in Python, each read as a line of its own."""
        from markupsafe import Markup

        if not parts:
            return ""
        first = len(self._inserted)
        self._inserted += [parts] if isinstance(parts, Part) else list(parts)
        marks = (f"\0{number}" for number in range(first, len(self._inserted)))
        return Markup("\n".join(marks))

    def read(self, text: str) -> Page:
        for line in text.split("\n"):
            self._read_line(line.rstrip(" "))
        self._end_block()
        return self._page

    def _read_line(self, line: str) -> None:
        if match := ROW.fullmatch(line):
            tone, bars, cells = match.groups()
            self._add_row(tone, [_text(cell) for cell in cells.split("|")], is_prose=bars == "||")
            return
        if not line.strip() or line[0] in "#!>*\0":
            self._end_block()
        mark, _, rest = line.partition(" ")
        if match := INSERTED.fullmatch(line):
            self._add(self._inserted[int(match.group(1))])
        elif mark == "#":
            self._page.title = _text(rest)
        elif mark in ("##", "###"):
            self._page.sections.append(Section(_text(rest), folded=mark == "###"))
        elif mark in ("!", ">"):
            (self._page.warnings if mark == "!" else self._page.notes).append(_text(rest))
        elif mark == "*":
            self._page.cards.append(Card(*map(_text, rest.split("|"))))
        elif line.strip():
            self._paragraph.append(line.strip(" "))

    def _add_row(self, tone: str, cells: list[str], *, is_prose: bool) -> None:
        if self._table is None:
            caption, self._paragraph = _text(" ".join(self._paragraph)), []
            self._rows = []
            self._table = ReportTable(cells, self._rows, caption, is_prose=is_prose)
            return
        if tone in ("good", "bad", "unsure", "plain"):
            self._table.tones[len(self._rows)] = tone
        self._rows.append(cells)

    def _end_block(self) -> None:
        """Put the open table or paragraph into its section; the first paragraph of a page is its subtitle."""
        if self._table is not None:
            table, self._table = self._table, None
            self._add(table)
        elif self._paragraph:
            text, self._paragraph = _text(" ".join(self._paragraph)), []
            if self._page.sections:
                self._append(text)
            else:
                self._page.subtitle = text

    def _add(self, part: Part) -> None:
        if isinstance(part, ReportVerdict):
            self._page.verdict = part
        elif isinstance(part, Card):
            self._page.cards.append(part)
        elif not (isinstance(part, Figure) and not part.svg):
            self._append(part)

    def _append(self, part: Figure | ReportTable | MarkedText | str) -> None:
        """Add a part to the last section."""
        section = self._page.sections[-1]
        match part:
            case Figure():
                if not section.figures:
                    section.tables_first = bool(section.tables)
                section.figures.append(part)
            case ReportTable():
                section.tables.append(part)
            case MarkedText():
                section.texts.append(part)
            case _:
                section.paragraphs.append(part)


@cache
def _warn_once(text: str) -> None:
    logging.getLogger(__name__).warning(text)


def _text(marked: str) -> str:
    return unescape(marked.strip(" "))


def _as_entities(value: Any) -> Any:
    from markupsafe import Markup

    if isinstance(value, Markup):
        return value
    return Markup(escape(str(value), quote=False).translate(ENTITIES))


def flat(value: Any) -> str:
    """A value of a record as text; missing values read as unknown."""
    if value is None:
        return "unknown"
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {flat(inner)}" for key, inner in value.items())
    return " ".join(map(flat, value)) if isinstance(value, list) else str(value)


def sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


@cache
def _template_environment() -> jinja2.Environment:
    import jinja2

    class Absent(jinja2.StrictUndefined):
        """A key that a record lacks: false in a condition, an error where it would be shown."""

        def __bool__(self) -> bool:
            return False

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("llmopt.bench", "."),
        autoescape=True,
        finalize=_as_entities,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=Absent,
    )
    filters = (number, percent, size, per_second, bounds, flat, sentence)
    environment.filters |= {filter_.__name__: filter_ for filter_ in filters}
    return environment
