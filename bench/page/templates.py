"""Page templates: jinja texts over a record that read like the report, and what their lines mean.

    # Title                       the line below it is the subtitle
    > a note                      a warning above the sections
    * label | value | unit | note a key figure
    ## Section                    (### Section is folded)
    A paragraph, up to the next empty line.

    A caption, directly above its table
    | header | header             (|| header | header: a table of prose, not of numbers)
    | cell   | cell               (bad| cell | cell: a row in a tone)

`{{ insert(x) }}` on a line of its own puts a figure, table, verdict, card or section there, or several;
nothing where there is none. Values are escaped, so that text of a record is never read as a mark. HTML and
Markdown are both rendered from the parsed page.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cache
from html import escape, unescape
from typing import TYPE_CHECKING, Any

from ...base.extras import is_installed
from .page import (
    NO_PICTURES,
    Card,
    Figure,
    MarkedText,
    Page,
    ReportTable,
    ReportVerdict,
    Section,
    Tone,
    bounds,
    number,
    per_second,
    percent,
    size,
)

if TYPE_CHECKING:
    import jinja2

# Marks, as entities: what a value holds of them is text. The parser decodes them again.
ENTITIES = str.maketrans(
    {"|": "&#124;", "#": "&#35;", "*": "&#42;", "\n": "&#10;", "\r": "&#13;", "\0": ""}
)
ROW = re.compile(r"(good|bad|unsure|plain|)(\|\|?)(.*)")
INSERTED = re.compile("\0(\\d+)")
Part = ReportVerdict | Card | Figure | ReportTable | MarkedText | Section


def page_of(template: str, **record: Any) -> Page:
    """The page that a template of `bench/` makes of a record."""
    return _rendered(template, record).page()


def sections_of(template: str, **record: Any) -> list[Section]:
    """The sections of a template that is a part of pages."""
    return _rendered(template, record).sections


def tables_of(template: str, **record: Any) -> list[ReportTable]:
    """The tables of a template that is a part of sections."""
    return list(_rendered(f"## \n{{% include {template!r} %}}", record).sections[0].tables)


def _rendered(template: str, record: Mapping[str, Any]) -> PageReader:
    """A template by its path below `bench/`, or as text."""
    reader, environment = PageReader(), _environment()
    read = environment.from_string if "\n" in template else environment.get_template
    return reader.read(read(template).render(insert=reader.insert, **record))


class PageReader:
    """Reads the text of a rendered template line by line."""

    def __init__(self) -> None:
        self.sections: list[Section] = []
        self._title = self._subtitle = ""
        self._verdict = ReportVerdict("plain", "", "")
        self._cards: list[Card] = []
        self._warnings: list[str] = []
        self._inserted: list[Part] = []
        self._paragraph: list[str] = []
        self._table: ReportTable | None = None

    def insert(self, parts: Part | Iterable[Part] | None) -> Any:
        """The marks of parts that were made in Python, each read as a line of its own."""
        from markupsafe import Markup

        if not parts:
            return ""
        first = len(self._inserted)
        self._inserted += [parts] if isinstance(parts, Part) else list(parts)
        marks = (f"\0{place}" for place in range(first, len(self._inserted)))
        return Markup("\n".join(marks))

    def read(self, text: str) -> PageReader:
        for line in text.split("\n"):
            self._read_line(line.rstrip(" "))
        self._end_block()
        return self

    def page(self) -> Page:
        sections, warnings = self.sections, self._warnings
        if not is_installed("matplotlib"):
            _warn_once(NO_PICTURES)
            warnings = [*warnings, NO_PICTURES]
            sections = [s for s in sections if s.paragraphs or s.figures or s.tables or s.texts]
        return Page(self._title, self._subtitle, self._verdict, self._cards, sections, warnings)

    def _read_line(self, line: str) -> None:
        if match := ROW.fullmatch(line):
            tone, bars, cells = match.groups()
            self._add_row(tone, [_text(cell) for cell in cells.split("|")], is_prose=bars == "||")
            return
        if not line.strip() or line[0] in "#>*\0":
            self._end_block()
        mark, _, rest = line.partition(" ")
        if match := INSERTED.fullmatch(line):
            self._add(self._inserted[int(match.group(1))])
        elif mark == "#":
            self._title = _text(rest)
        elif mark in ("##", "###"):
            self.sections.append(Section(_text(rest), folded=mark == "###"))
        elif mark == ">":
            self._warnings.append(_text(rest))
        elif mark == "*":
            self._cards.append(Card(*map(_text, rest.split("|"))))
        elif line.strip():
            self._paragraph.append(line.strip(" "))

    def _add_row(self, tone: str, cells: list[str], *, is_prose: bool) -> None:
        if self._table is None:
            caption, self._paragraph = _text(" ".join(self._paragraph)), []
            self._table = ReportTable(cells, [], caption, is_prose=is_prose)
            return
        rows = [*self._table.rows, cells]
        tones: dict[int, Tone] = {**self._table.tones}
        if tone in ("good", "bad", "unsure", "plain"):
            tones[len(rows) - 1] = tone
        self._table = replace(self._table, rows=rows, tones=tones)

    def _end_block(self) -> None:
        """Put the open table or paragraph into its section; the first paragraph of a page is its subtitle."""
        if self._table is not None:
            table, self._table = self._table, None
            self._add(table)
        elif self._paragraph:
            text, self._paragraph = _text(" ".join(self._paragraph)), []
            if self.sections:
                self._change(paragraphs=[*self.sections[-1].paragraphs, text])
            else:
                self._subtitle = text

    def _add(self, part: Part) -> None:
        if isinstance(part, Section):
            self.sections.append(part)
        elif isinstance(part, ReportVerdict):
            self._verdict = part
        elif isinstance(part, Card):
            self._cards.append(part)
        elif isinstance(part, Figure):
            if not part.svg:
                return
            section = self.sections[-1]
            first = bool(section.tables) and (section.tables_first or not section.figures)
            self._change(figures=[*section.figures, part], tables_first=first)
        elif isinstance(part, ReportTable):
            self._change(tables=[*self.sections[-1].tables, part])
        else:
            self._change(texts=[*self.sections[-1].texts, part])

    def _change(self, **parts: Any) -> None:
        self.sections[-1] = replace(self.sections[-1], **parts)


@cache
def _warn_once(text: str) -> None:
    logging.getLogger(__name__).warning(text)


def _text(marked: str) -> str:
    return unescape(marked.strip(" "))


def _escaped(value: Any) -> Any:
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
    """A clause as a sentence: its first letter capital, a full stop behind."""
    return f"{text[0].upper()}{text[1:]}."


def row(cells: Iterable[Any]) -> Any:
    """The cells of a row whose number the record decides."""
    from markupsafe import Markup

    return Markup("| " + " | ".join(_escaped(cell) for cell in cells))


@cache
def _environment() -> jinja2.Environment:
    import jinja2

    class Absent(jinja2.StrictUndefined):
        """A key that a record lacks: false in a condition, an error where it would be shown."""

        def __bool__(self) -> bool:
            return False

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("llmopt.bench", "."),
        autoescape=True,
        finalize=_escaped,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=Absent,
    )
    filters = (number, percent, size, per_second, bounds, flat, sentence, row)
    environment.filters |= {each.__name__: each for each in filters}
    environment.globals |= {"isfinite": math.isfinite}
    return environment
