"""Print the held-out error of the plan's speed; with `--fit`, write its parameters and bands first.

    python -m tools.plan_error [--data silicon_sample.csv] [--fit] [--aiconfigurator ROWS]

The file is that of the installed package aiconfigurator-core unless `--data` names it. Nothing of the
held-out half is fitted. `--aiconfigurator` puts that package's own prediction beside ours, on rows drawn by
their hash, in the same run; its makers may have seen them.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from pathlib import Path

import numpy as np
from llmopt.engine.planner import expected
from llmopt.engine.planner.error_bands import NOTHING_LIKE_IT
from llmopt.engine.planner.step_model import generation

from . import disaggregated, own_machine
from .columns import Column, Columns, Predicted
from .cross import left_out
from .fit import as_json, fit
from .report import HEADER, LEGEND, band_of, bands, by, coverage, errors, judged_rows, line
from .rivals import aiconfigurator, nearest_rows
from .rows import packaged_csv, read_rows

UNLIKE = "rows of an engine or a GPU generation that was left out of the fit"
PLANNER = Path(expected.__file__).parent


def main() -> None:
    """Fit, judge and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--fit", action="store_true", help="write the planner's JSON files")
    parser.add_argument("--aiconfigurator", type=int, default=0, metavar="ROWS")
    arguments = parser.parse_args()
    columns = Columns.of(read_rows(arguments.data or packaged_csv()))
    fitted = np.array([row.fitted for row in columns.rows])
    half = columns.take(fitted)
    held = columns.take(~fitted)
    found = fit(half)
    predicted = found.predict(held)
    without_model = left_out(columns, lambda row: row.model, ~fitted)
    without_gpu = left_out(columns, lambda row: row.device.name, ~fitted)
    judged = judged_rows(held, predicted, found.corrections["tpot"])
    judged += judged_rows(held, without_model, ())
    unlike = [
        *judged_rows(held, left_out(columns, lambda row: row.engine, ~fitted), ()),
        *judged_rows(held, left_out(columns, lambda row: generation(row.device), ~fitted), ()),
    ]
    if arguments.fit:
        write_planner_file("step_parameters.json", as_json(found))
        known = bands(judged)
        known[NOTHING_LIKE_IT] = {"of": UNLIKE, **band_of([ratios for _, _, ratios in unlike])}
        write_planner_file("error_bands.json", {"source": as_json(found)["source"], "bands": known})
    print(f"{len(half.rows)} configurations fitted, {len(held.rows)} held out\n")
    print(HEADER, LEGEND, sep="\n")
    print(line("ours", errors(predicted, held.measured)))
    print(line("nearest rows, log-linear", errors(nearest_rows(half, held), held.measured)))
    print(line("ours, model left out", errors(without_model, held.measured)))
    print(line("ours, GPU left out", errors(without_gpu, held.measured)))
    _print_parts(held, predicted)
    print("\nwithin the 90 % band of the other deployments' rows")
    for name, (share, count) in coverage(judged).items():
        print(f"  {name:12}{100 * share:6.1f} % of {count}")
    print("", *own_machine.lines(judged[: len(held.rows)]), sep="\n")
    print("", HEADER, *disaggregated.lines(arguments.data or packaged_csv()), sep="\n")
    if arguments.aiconfigurator:
        _print_aiconfigurator(held, predicted, arguments.aiconfigurator)


def write_planner_file(name: str, content: object) -> None:
    """Write a JSON file of the planner."""
    text = json.dumps(content, indent=1) + "\n"
    (PLANNER / name).write_text(text, encoding="utf-8")


def _print_parts(held: Columns, predicted: Predicted) -> None:
    found = errors(predicted, held.measured)
    print()
    print(by("by engine", lambda row: row.engine, held, found))
    print(by("by model", lambda row: row.model, held, found))
    print(by("by GPU", lambda row: row.device.name, held, found))
    print(by("by batch", lambda row: row.regime, held, found))


def _print_aiconfigurator(held: Columns, predicted: Predicted, count: int) -> None:
    """Both on the rows that it answers, of `count` drawn by their hash."""
    order = sorted(range(len(held.rows)), key=lambda index: _hash(held, index))[:count]
    chosen = np.zeros(len(held.rows), bool)
    chosen[order] = True
    drawn = held.take(chosen)
    theirs = errors(aiconfigurator(drawn), drawn.measured)
    answered = ~np.isnan(theirs["tpot"])
    ours = errors(Predicted(*(column[chosen] for column in predicted)), drawn.measured)
    print(f"\nof {count} drawn rows, those that aiconfigurator answers (it may have seen them)")
    print(line("ours", {name: _kept(column, answered) for name, column in ours.items()}))
    print(line("aiconfigurator", theirs))


def _kept(column: Column, mask: Column) -> Column:
    return column[mask]


def _hash(held: Columns, index: int) -> str:
    return hashlib.sha256(held.rows[index].names["id"].encode()).hexdigest()


if __name__ == "__main__":
    main()
