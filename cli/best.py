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
from .options.shared import ModelOptions, json_option, output_option

if TYPE_CHECKING:
    from rich.console import Console

Record = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class BestRunOptions:
    """Output folder, and whether finalists are made."""

    PANEL: ClassVar = "Output"

    output: Path | None = output_option(
        "folder", "Folder of the search, the finalists and decision.json. Default: ./MODEL-best."
    )
    dry_run: bool = option(
        False,
        "Only plan: size and speed of the usual quantizations from config.json, without a measurement.",
        common=True,
    )
    as_json: bool = json_option()


@with_options
def best(
    model: ModelOptions,
    asked: Annotated[Words, From(BestRequest)],
    run: BestRunOptions,
) -> None:
    """Find the checkpoint for a model, hardware and promises, proven; an interrupted run is resumed."""
    from ..engine.planner.catalog import facts_of
    from ..quant.source.models import resolve_model, short_name
    from ..recipes import DEFAULT_MODEL
    from .output.console import TerminalProgress, result_console, say

    request = BestRequest(**keywords_of_words(BestRequest, asked))
    name = model.name or DEFAULT_MODEL
    path = resolve_model(name)
    folder = run.output or Path(f"{short_name(path)}-best")
    check_output(folder, "--output", folder=True)
    say(f"{short_name(path)}: {facts_of(path).line}")
    from ..bench.best.finalists import find_best  # torch

    again = f"interrupted: what was finished is in {folder}; the same command resumes from there"
    with TerminalProgress(lambda: again) as progress:  # a second Ctrl-C, or one in a dry run
        decision = find_best(request, name, folder, progress, dry_run=run.dry_run)
    console = result_console(run.as_json, decision)
    show_plan(decision, console) if run.dry_run else show_decision(decision, folder, console)
    if not run.dry_run and decision["exit_code"]:
        raise typer.Exit(decision["exit_code"])


def show_plan(plan: Record, console: Console) -> None:
    """Print bytes and speed of the usual quantizations, with what each breaks."""
    from ..bench.best.decision import FULL, load_words
    from ..engine.base.units import format_gib
    from .output.console import say, table_of

    rows = []
    for point in plan["planned"]:
        speeds = point.get("throughput") or {}
        ends = [f"{speeds[load]:.3g}" if speeds else "" for load in ("1", FULL)]
        bits = f"{point['bits_per_weight']:.2f}" if "bytes" in point else ""
        size = format_gib(point["bytes"]) if "bytes" in point else ""
        rows.append((point["name"], size, bits, *ends, "; ".join(point["breaks"])))
    header = ("usual", "size", "bits", "tokens/s, 1 client", "all places", "not, because")
    console.print(table_of(header, rows, left=(0, 5), no_wrap=range(5)))
    say(f"by load: {load_words(plan['by_load'])}", console)
    if not plan["is_checked"]:
        loader = plan["asked"]["loads_in"]
        say(f"There is no weight file: whether {loader} loads these is not checked.", console)
    say("Without --dry-run the KL divergence of each is measured first.", console)


def show_decision(decision: Record, folder: Path, console: Console) -> None:
    """Print the answer in at most 15 lines: what is recommended, how sure that is, what to run next, and why
    not the usual ones."""
    from ..bench.best.decision import load_words
    from .output.console import say

    if decision["stopped"] is not None:
        why = {"budget": "The budget is spent", "interrupted": "Interrupted"}[decision["stopped"]]
        say(f"{why}: the same command goes on from here.", console)
    say(decision["sentence"], console)
    if decision["so_far"] is not None:
        name, files = Path(decision["so_far"]).name, decision["so_far"]
        say(f"  files of {name}: {files}, rounded to nearest", console)
    named = {finalist["id"]: finalist for finalist in decision["finalists"]}
    answer = named.get(decision["recommended"] or decision["closest"])
    if answer is not None:
        scores = [
            f"{label} {_share(answer[key])}"
            for label, key in (("top-1", "top1"), ("flips", "flips"))
            if answer[key] is not None
        ]
        scores.append(f"{_speed(answer['speed'])} ms per token")
        say(f"  measured: {', '.join(scores)}", console)
        left = f"what was not made may save {decision['saving']:.1%} at most"
        made = f"{len(named)} made and measured"
        say(f"  how sure: 95 % intervals, files verified; {made}, {left}", console)
        say(f"  rebuild:  {answer['rebuild']}", console)
        say(f"  serve:    {answer['serve']}", console)
    base = named.get(decision["recommended"])
    for label, key in (("next smaller", "next_smaller"), ("next better", "next_better")):
        other = named.get(decision[key])
        if base is not None and other is not None:
            size = other["bytes"] / base["bytes"] - 1
            kl = other["kl"]["value"] - base["kl"]["value"]
            broken = f"; it breaks {'; '.join(other['breaks'])}" if other["breaks"] else ""
            change = f"{size:+.1%} bytes for {kl:+.3g} nats of KL{broken}"
            say(f"{label}: {other['id']}, {change}", console)
    if decision["by_load"]:
        say(f"by load, planned: {load_words(decision['by_load'])}", console)
    reasons: dict[str, list[str]] = {}
    for usual in decision["usual"]:
        reasons.setdefault(usual["why"], []).append(usual["name"])
    for reason, names in reasons.items():
        if reason:  # the answer has none
            say(f"why not {', '.join(names)}: {reason}", console)
    page = folder / "best.html"
    files = [page] if page.is_file() else []
    say(f"Report: {', '.join(map(str, [*files, folder / 'decision.json']))}", console)


def _share(value: Record) -> str:
    low, high = value["low"], value["high"]
    interval = "" if low is None else f" ({100 * low:.0f} to {100 * high:.0f})"
    return f"{100 * value['value']:.1f} %{interval}"


def _speed(speed: Record | None) -> str:
    if speed is None or speed["tpot_ms"] is None:
        return "unknown"
    low, high = speed["band"] or (None, None)
    return f"{speed['tpot_ms']:.3g}" + ("" if low is None else f" ({low:.2g}-{high:.2g})")
