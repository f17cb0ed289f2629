"""Expectations of a first contact with a GPU: what was expected, what was seen, and their page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .parts import WHOLE


@dataclass(frozen=True, slots=True)
class Expectation:
    """One thing that should hold on the card.

    Attributes:
        what: in words.
        expected, seen: short texts.
        met: whether it holds; None: it could not be told.
    """

    what: str
    expected: str
    seen: str
    met: bool | None


@dataclass(frozen=True, slots=True)
class Facts:
    """Something measured that no expectation is about, as a table of the page: its title, head and rows."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]


Finding = Expectation | Facts


def share(what: str, seen: float, expected: float) -> Expectation:
    """A share of a roof, expected to be at least so large."""
    return Expectation(what, f"at least {expected:.0%}", f"{seen:.0%}", seen >= expected)


def page(record: Mapping[str, Any]) -> str:
    """The record in Markdown, what failed first."""
    told = [(stage["name"], each) for stage in record["stages"] for each in stage["expectations"]]
    failed = [(name, each) for name, each in told if each["met"] is False]
    broken = [stage for stage in record["stages"] if stage["ended"] != WHOLE]
    met = sum(each["met"] is True for _, each in told)
    lines = [f"# First contact: {record['environment'].get('device', 'unknown device')}", ""]
    lines += [f"{record['date']}, commit {record['commit'] or 'unknown'}.", ""]
    lines += [f"{met} of {len(told)} expectations hold, {len(failed)} fail.", ""]
    if broken:
        lines += ["## Stages that did not end", ""]
        lines += [f"* {stage['name']}: {stage['ended']}" for stage in broken]
        lines += [""]
    if failed:
        lines += ["## What failed", ""]
        lines += _table(("stage", "what", "expected", "seen"), (_row(*each) for each in failed))
    rest = [(name, each) for name, each in told if each["met"] is not False]
    if rest:
        lines += ["## What holds, or could not be told", ""]
        lines += _table(("stage", "what", "expected", "seen"), (_row(*each) for each in rest))
    for stage in record["stages"]:
        for facts in stage["facts"]:
            lines += [f"## {stage['name']}: {facts['title']}", ""]
            lines += _table(facts["head"], facts["rows"])
    return "\n".join(lines)


def _row(stage: str, each: Mapping[str, Any]) -> tuple[str, ...]:
    seen = each["seen"] if each["met"] is not None else f"{each['seen']} (no verdict)"
    return stage, each["what"], each["expected"], seen


def _table(head: Sequence[str], rows: Any) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield f"|{'---|' * len(head)}"
    for row in rows:
        yield f"| {' | '.join(str(cell).replace('|', '/') for cell in row)} |"
    yield ""
