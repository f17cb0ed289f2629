"""Consoles and progress: results on stdout; with `--json`, human-readable output on stderr."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any, Self

import typer
from rich import box
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as RichProgress
from rich.table import Table

from ...base.progress import SHARE, in_words
from ...bench.machine.machine_meter import CpuTimes, other_load

LOAD_TO_NAME = 0.25
"""Share of the processors, taken by other programs, from which an estimate names it."""

# A bracket in a message, a path or a table's cell is itself: what is coloured is a `Text`.
people = Console(stderr=True, highlight=False, markup=False)
stdout = Console(highlight=False, markup=False)


def emit_json(result: Any) -> None:
    """Print one JSON document, and nothing else, on stdout."""
    json.dump(result, sys.stdout, indent=2, allow_nan=False, default=str)
    sys.stdout.write("\n")


def result_console(as_json: bool, result: Any = None) -> Console:
    """The console for human-readable results: stdout, or stderr with `--json`, which prints the `result`."""
    if as_json and result is not None:
        emit_json(result)
    return people if as_json else stdout


def say(text: str, console: Console = people) -> None:
    console.print(text, soft_wrap=True)


def table_of(
    header: Sequence[str],
    rows: Iterable[Sequence[Any]] = (),
    *,
    left: Container[int] = (0,),
    no_wrap: Container[int] = (),
    **style: Any,
) -> Table:
    """A table whose columns are right-aligned, but for those numbered in `left`; those of `no_wrap` hold
    their text in one line."""
    table = Table(**{"box": box.SIMPLE_HEAD, "title_justify": "left", **style})
    for number, heading in enumerate(header):
        side = "left" if number in left else "right"
        table.add_column(heading, justify=side, no_wrap=number in no_wrap)
    for row in rows:
        table.add_row(*row)
    return table


def facts_table(facts: Iterable[tuple[str, Any]], style: str = "bold") -> Table:
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(style=style, no_wrap=True)
    table.add_column()
    for fact in facts:
        table.add_row(*fact)
    return table


class TerminalProgress:
    """A `quant.progress.Progress`: a rich bar on a terminal, otherwise a plain line every few seconds, and
    where nothing advances a line that says so. As a context it is finished at the end. With
    `when_interrupted`, Ctrl-C within prints that sentence and exits with 130. With `names_load`, for a task
    of this process alone, it says how much of the processors other programs take."""

    PLAIN_EVERY_SECONDS = 5.0
    SILENT_SECONDS = 20.0

    def __init__(
        self, when_interrupted: Callable[[], str] | None = None, *, names_load: bool = False
    ) -> None:
        self._when_interrupted, self._names_load = when_interrupted, names_load
        self._bar: RichProgress | None = None
        self._description = self._unit = self._status = ""
        self._total, self._done = 0, 0.0
        self._began = self._printed = 0.0
        self._used: CpuTimes | None = None
        self._over = threading.Event()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.finish()
        if kind is KeyboardInterrupt and self._when_interrupted is not None:
            say(self._when_interrupted())
            raise typer.Exit(130) from None

    def start(self, description: str, total: int, unit: str) -> None:
        self.finish()
        self._description, self._total, self._unit, self._done = description, total, unit, 0.0
        self._status = ""
        self._used = CpuTimes.now() if self._names_load else None
        self._began = self._printed = time.monotonic()
        if people.is_terminal:
            counted = () if unit == SHARE else (MofNCompleteColumn(), TextColumn(unit))
            self._bar = RichProgress(
                TextColumn("{task.description}", markup=False),
                BarColumn(),
                *counted,
                TaskProgressColumn(show_speed=unit != SHARE),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[status]}", markup=False),
                console=people,
                transient=True,
            )
            self._bar.start()
            self._task = self._bar.add_task(description, total=total or None, status="")
        else:
            self._over = threading.Event()
            threading.Thread(target=self._speak_up, args=(self._over,), daemon=True).start()

    def advance(self, count: float = 1) -> None:
        self._done += count
        if self._bar is not None:
            self._bar.advance(self._task, count)
        else:
            self._print_after(self.PLAIN_EVERY_SECONDS)

    def status(self, text: str) -> None:
        self._status = text
        if self._bar is not None:
            self._bar.update(self._task, status=", ".join(filter(None, [text, self._load()])))

    def note(self, message: str) -> None:
        people.print(message, soft_wrap=True)

    def finish(self) -> None:
        self._over.set()
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
        elif self._description and self._done:
            self._print_after(0)
        self._description = ""

    def _speak_up(self, over: threading.Event) -> None:
        """Print a line after each long silence, until the task is over."""
        while not over.wait(self._printed + self.SILENT_SECONDS - time.monotonic()):
            self._print_after(self.SILENT_SECONDS)

    def _print_after(self, seconds: float) -> None:
        """Print how far the task is, if the last line is so many seconds old."""
        now = time.monotonic()
        if now - self._printed < seconds:
            return
        self._printed, passed = now, now - self._began
        parts = [f"{self._description}: {in_words(passed)}"]
        if self._total and self._unit == SHARE:
            parts = [f"{self._description}: {int(100 * self._done / self._total)} %"]
        elif self._total:
            done = int(self._done + 1e-6)  # of parts that add up to whole units
            parts = [f"{self._description}: {done}/{self._total} {self._unit}"]
            if self._done:
                parts.append(f"{self._done / max(passed, 1e-9):.2g} {self._unit}/s")
        if self._done and self._total:
            left = passed * max(0.0, self._total - self._done) / self._done  # sums of parts pass 1
            load = self._load()
            parts.append(f"about {in_words(left)} left{load and f' at this pace: {load}'}")
        people.print(", ".join(filter(None, [*parts, self._status])), soft_wrap=True)

    def _load(self) -> str:
        """The share of the processors that other programs took since the task began, if it is large."""
        others = self._used and other_load(self._used, CpuTimes.now())
        if others is None or others < LOAD_TO_NAME:
            return ""
        return f"other programs take {others:.0%} of the processors"
