"""Parts of pages alone: the macros of `bench/report/parts.jinja`."""

from __future__ import annotations

from typing import Any

from llmopt.bench.page.page import ReportTable, Section, page_of

IMPORT = '{% import "report/parts.jinja" as parts with context %}\n'


def sections_of(part: str, *arguments: Any, **record: Any) -> list[Section]:
    """The sections of a part that has headings."""
    text = IMPORT + "{{ parts[part](*arguments) }}\n"
    return page_of(text, part=part, arguments=arguments, **record).sections


def tables_of(part: str, *arguments: Any, **record: Any) -> list[ReportTable]:
    """The tables of a part that stands within a section."""
    text = IMPORT + "## \n{{ parts[part](*arguments) }}\n"
    section = page_of(text, part=part, arguments=arguments, **record).sections[0]
    return list(section.tables)
