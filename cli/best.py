"""`llmopt best`: the checkpoint for a model, hardware and promises, and the front it was chosen from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer

from ..base.atomic_io import check_output
from ..base.option import keywords_of_words, option
from ..bench.best.target import BestRequest
from .options.command import From, Words, with_options
from .options.shared import JobOptions, ModelOptions, json_option

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

Record = Mapping[str, Any]
MARKS = {True: "yes", False: "no", None: "unsure"}


@dataclass(frozen=True, slots=True)
class BestRunOptions:
    """Output folder, and whether finalists are made."""

    PANEL: ClassVar = "Output"

    output: Path | None = option(
        None,
        "Folder of the search, the finalists and decision.json. Default: ./MODEL-best.",
        flag="--output -o",
        writes="folder",
        common=True,
    )
    dry_run: bool = option(
        False,
        "Only search: print the front as predicted, make no finalist.",
        flag="--dry-run",
        common=True,
    )
    as_json: bool = json_option()


@with_options
def best(
    model: ModelOptions,
    asked: Annotated[Words, From(BestRequest)],
    run: BestRunOptions,
    jobs: JobOptions,
) -> None:
    """Find the checkpoint for a model, hardware and promises, proven; an interrupted run is resumed."""
    from ..quant.source.models import resolve_model, short_name
    from ..recipes import DEFAULT_MODEL
    from .output.console import TerminalProgress, result_console

    request = BestRequest(**keywords_of_words(BestRequest, asked))
    name = model.name or DEFAULT_MODEL
    folder = run.output or Path(f"{short_name(resolve_model(name))}-best")
    check_output(folder, "--output", folder=True)
    on_ray, shares = jobs.is_on_ray, jobs.score_shares or 1
    from ..bench.best.finalists import find_best  # torch

    again = f"interrupted: what was finished is in {folder}; the same command resumes from there"
    with TerminalProgress(lambda: again) as progress:  # a second Ctrl-C, or one in a dry run
        how = {"dry_run": run.dry_run, "on_ray": on_ray}
        decision = find_best(request, name, folder, progress, **how, score_shares=shares)
    console = result_console(run.as_json, decision)
    show_front(decision, console) if run.dry_run else show_decision(decision, folder, console)
    if not run.dry_run and decision["exit_code"]:
        raise typer.Exit(decision["exit_code"])


def show_front(decision: Record, console: Console) -> None:
    """Print the fronts as predicted, with what each point breaks."""
    from .output.console import say

    for lane in decision["lanes"]:
        if lane["refused"] is not None:
            say(f"{lane['name']}: refused: {lane['refused']}", console)
    console.print(_front_table(decision))
    say(_gap(decision), console)
    for usual in decision["usual"]:
        if usual["breaks"] and usual["id"] is None:
            say(f"not {usual['name']}: {usual['why']}", console)
    count = sum(point["finalist"] for point in decision["front"])
    say(f"{count} points would be made and measured, beside usual quantizations", console)


def show_decision(decision: Record, folder: Path, console: Console) -> None:
    """Print the answer on one screen."""
    from .output.console import say

    if decision["stopped"] is not None:
        why = {"budget": "The budget is spent", "interrupted": "Interrupted"}[decision["stopped"]]
        left = f"what is left may save {decision['saving']:.0%} more" if decision["front"] else ""
        say(f"{why}{left and f': {left}'}. The same command goes on from here.", console)
    say(decision["sentence"], console)
    named = {finalist["id"]: finalist for finalist in decision["finalists"]}
    answer = named.get(decision["recommended"] or decision["closest"])
    if answer is not None:
        say(f"  rebuild: {answer['rebuild']}", console)
        say(f"  serve:   {answer['serve']}", console)
    if named:
        console.print(_finalists_table(decision, console.width))
    base = named.get(decision["recommended"])
    for label, key in (("next smaller", "next_smaller"), ("next better", "next_better")):
        other = named.get(decision[key])
        if base is not None and other is not None:
            size = other["bytes"] / base["bytes"] - 1
            kl = other["kl"]["value"] - base["kl"]["value"]
            broken = f"; it breaks {'; '.join(other['breaks'])}" if other["breaks"] else ""
            change = f"{size:+.1%} bytes for {kl:+.3g} nats of KL{broken}"
            say(f"{label}: {other['id']}, {change}", console)
    say(_gap(decision), console)
    for usual in decision["usual"]:
        say(f"why not {usual['name']}: {usual['why']}", console)
    say(f"Report: {folder / 'best.html'}, {folder / 'decision.json'}", console)


def _front_table(decision: Record) -> Table:
    from ..engine.base.units import format_gib
    from .output.console import table_of

    rows = [
        (
            point["id"],
            format_gib(point["bytes"]),
            f"{point['bits_per_weight']:.2f}",
            "" if point["expected_kl"] is None else f"{point['expected_kl']:.3g}",
            _speed(point["speed"]),
            "; ".join(point["breaks"]) or ("finalist" if point["finalist"] else ""),
        )
        for point in decision["front"]
    ]
    header = ("checkpoint", "size", "bits", "expected KL", "TPOT, ms", "")
    return table_of(header, rows, left=(0, 5), no_wrap=range(5))


def _finalists_table(decision: Record, width: int) -> Table:
    """Everything measured, with 95 % intervals; a narrow table has no bands of speed."""
    from ..engine.base.units import format_gib
    from .output.console import table_of

    flips = any(finalist["flips"] for finalist in decision["finalists"])
    rows = [
        [
            finalist["id"] + (" *" if finalist["id"] == decision["recommended"] else ""),
            format_gib(finalist["bytes"]),
            _interval(finalist["kl"]),
            _interval(finalist["top1"], percent=True),
            *([_interval(finalist["flips"], percent=True)] if flips else []),
            _speed(finalist["speed"], with_band=width >= (115 if flips else 100)),
            MARKS[finalist["keeps"]],
        ]
        for finalist in decision["finalists"]
    ]
    shares = ["top-1, %", *(["flips, %"] if flips else [])]
    header = ["checkpoint", "size", "KL, nats", *shares, "TPOT ms", "keeps"]
    tight: dict[str, Any] = {"padding": (0, 1, 0, 0), "pad_edge": False}
    if width < 100:  # lines between columns would not fit into 80
        tight["box"] = None
    return table_of(header, rows, no_wrap=range(len(header)), **tight)


def _gap(decision: Record) -> str:
    """Distance of the solver from the optimum, at most."""
    from ..bench.best.decision import gap_words

    return f"search: {gap_words(decision['front'])}"


def _interval(value: Record | None, *, percent: bool = False) -> str:
    if value is None:
        return ""
    if percent:
        return f"{100 * value['value']:.1f} ({100 * value['low']:.0f}-{100 * value['high']:.0f})"
    return f"{value['value']:.3g} ({value['low']:.2g}-{value['high']:.2g})"


def _speed(speed: Record | None, *, with_band: bool = True) -> str:
    if speed is None or speed["tpot_ms"] is None:
        return "unknown"
    low, high = speed["band"] or (None, None)
    return f"{speed['tpot_ms']:.3g}" + (
        f" ({low:.2g}-{high:.2g})" if with_band and low is not None else ""
    )
