"""The tables of `llmopt check`: engines, kernels, and findings."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from .console import say, table_of

if TYPE_CHECKING:
    from ...quant.check.check import CheckReport

_STYLES = {"loads": "green", "does not": "red", "unknown": "yellow"}


def show_check(report: CheckReport, console: Console) -> None:
    """Print the kinds of linears, an engine a line, the kernels, and what was found."""
    say(f"{report.path}: {report.method or 'plain weights'}", console)
    rows = [
        (kind.linears, kind.codes, " × ".join(map(str, kind.shape or ("?",))))
        for kind in report.linears
    ]
    if rows:
        console.print(table_of(("linears", "codes", "out × in"), rows, left=(0, 1)))
    answers = [
        (
            f"{engine.engine} {engine.version}".strip(),
            Text(engine.answer, _STYLES[engine.answer]),
            engine.reason,
        )
        for engine in report.engines
    ]
    console.print(table_of(("engine", "answer", "reason"), answers, left=(0, 1, 2)))
    for finding in report.findings:
        say(f"  {finding.severity:8}{finding.code}: {finding.message}", console)
    console.print(report.answer, style=_STYLES[report.answer])
