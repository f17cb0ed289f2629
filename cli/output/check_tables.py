"""The tables of `llmopt check`: engines, kernels, and findings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from .console import say, table_of
from .plan_answer import format_lines

if TYPE_CHECKING:
    from ...engine.planner.answer import FormatSpeed
    from ...quant.check.check import CheckReport
    from ...quant.check.engines import EngineAnswer
    from ...quant.check.kernels import KernelAnswer

_STYLES = {"loads": "green", "does not": "red", "unknown": "yellow"}
_LINEARS = ("linears", "codes", "out × in")
_ENGINES = ("engine", "answer", "kernel, or reason")
_KERNELS = ("linears", "on a rank", "kernel, or reason")


def show_check(report: CheckReport, console: Console, speeds: Sequence[FormatSpeed] = ()) -> None:
    """Print the kinds of linears, an engine a line, the kernels of a single engine, the planned `speeds`
    where a kernel falls back, and the findings."""
    say(f"{report.path}: {report.method or 'plain weights'}", console)
    if report.linears:
        console.print(table_of(_LINEARS, _linear_rows(report), left=(0, 1)))
    answers = [
        (_name(engine), Text(engine.answer, _STYLES[engine.answer]), engine.reason)
        for engine in report.engines
    ]
    console.print(table_of(_ENGINES, answers, left=(0, 1, 2)))
    if len(report.engines) == 1 and report.engines[0].answer == "loads" and report.linears:
        rows = _kernel_rows(report.engines[0])
        console.print(table_of(_KERNELS, rows, left=(0, 2)))
    for line in format_lines(speeds):
        say(f"  planned, as kv-plan says  {line}", console)
    for finding in report.findings:
        say(f"  {finding.severity}  {finding.code}: {finding.message}", console)
    console.print(report.answer, style=_STYLES[report.answer])


def markdown_of(report: CheckReport) -> str:
    """The same as Markdown, with the kernels of every engine."""
    parts = [f"# {report.path.name}: {report.answer}"]
    if report.linears:
        parts.append(_markdown(_LINEARS, _linear_rows(report)))
    rows = [(_name(engine), engine.answer, engine.reason) for engine in report.engines]
    parts.append(_markdown(_ENGINES, rows))
    parts += [
        f"## {_name(engine)}\n\n{_markdown(_KERNELS, _kernel_rows(engine))}"
        for engine in report.engines
        if engine.linears
    ]
    if report.findings:
        lines = (f"* {f.severity}, {f.code}: {f.message}" for f in report.findings)
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def _markdown(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [header, ("---",) * len(header), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines)


def _name(engine: EngineAnswer) -> str:
    return f"{engine.engine} {engine.version}".strip()


def _linear_rows(report: CheckReport) -> list[tuple[str, ...]]:
    return [(kind.linears, kind.codes, _sizes(kind.shape)) for kind in report.linears]


def _kernel_rows(engine: EngineAnswer) -> list[tuple[str, ...]]:
    return [
        (linear.linears, _sizes(linear.shape), _served_by(linear.kernel))
        for linear in engine.linears
    ]


def _served_by(answer: KernelAnswer) -> str:
    if not answer.kernel:
        return f"{answer.answer}: {answer.reason}"
    return f"{answer.kernel} (fallback: {answer.reason})" if answer.falls_back else answer.kernel


def _sizes(shape: tuple[int, ...] | None) -> str:
    return "?" if shape is None else " × ".join(map(str, shape))
