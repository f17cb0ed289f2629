"""A generated table of a Markdown file, between the two lines that mark it."""

from __future__ import annotations

from pathlib import Path

from llmopt.quant.base.errors import BadInput


def write_between(path: Path, name: str, table: str) -> None:
    """Put a table between the marks of that name.

    Raises:
        BadInput: the file lacks a mark.
    """
    first, last = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    text = path.read_text(encoding="utf-8")
    head, begin, rest = text.partition(first)
    _, end, tail = rest.partition(last)
    if not begin or not end:
        raise BadInput(f"{path} has no lines {first!r} and {last!r} to put the table between")
    path.write_text(f"{head}{first}\n{table}\n{last}{tail}", encoding="utf-8")
