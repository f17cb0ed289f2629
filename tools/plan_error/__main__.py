"""Print the error and the coverage of the plan's speed; with `--fit`, write its parameters and bands first.

    python -m tools.plan_error [--data silicon_sample.csv] [--field deployments.csv] [--fit]

The file is that of the installed package aiconfigurator-core unless `--data` names it. Nothing of its
held-out half is fitted. Rows of the field are fitted, and judged by fits that leave out their engine, model
or GPU. `--aiconfigurator ROWS` puts that package's own prediction next to ours, on rows drawn by their hash;
its makers may have seen them.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from pathlib import Path

import numpy as np
from llmopt.engine.planner import error_bands
from llmopt.engine.planner.error_bands import MEASURES, NOTHING_LIKE_IT, Known
from llmopt.engine.planner.step_model import generation

from . import disaggregated, own_machine
from .columns import Column, Columns, Predicted
from .cross import left_out
from .field import read_field
from .fit import as_json, fit
from .report import (
    HEADER,
    LEGEND,
    Judged,
    Part,
    Ratios,
    Stretches,
    bands,
    by,
    coverage,
    errors,
    judged_rows,
    known_by,
    line,
    needed_stretches,
    stretch_of,
    unlike_entry,
)
from .rivals import aiconfigurator, nearest_rows
from .rows import Row, packaged_csv, read_rows

PLANNER = Path(error_bands.__file__).parent
PARTS: dict[str, Part] = {
    "engine": lambda row: row.engine,
    "model": lambda row: row.model,
    "GPU": lambda row: row.device.name,
    "GPU generation": lambda row: generation(row.device),
}


def main() -> None:
    """Fit, judge and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--field", type=Path, help="rows of the field, fitted too")
    parser.add_argument("--fit", action="store_true", help="write the planner's JSON files")
    parser.add_argument("--aiconfigurator", type=int, default=0, metavar="ROWS")
    arguments = parser.parse_args()
    rows = read_rows(arguments.data or packaged_csv())
    field, unread = read_field(arguments.field) if arguments.field else ([], 0)
    columns = Columns.of([*rows, *field])
    is_field = np.arange(len(columns.rows)) >= len(rows)
    fitted = np.array([row.fitted for row in columns.rows])
    half, held = columns.take(fitted), columns.take(~fitted)
    found = fit(half)
    predicted = found.predict(held)
    print(
        f"{len(half.rows)} configurations fitted, {len(field)} of them of the field, whose other {unread} "
        f"have no known model, GPU or load; {len(held.rows)} held out\n"
    )
    print(HEADER, LEGEND, sep="\n")
    print(line("ours", errors(predicted, held.measured)))
    print(line("nearest rows, log-linear", errors(nearest_rows(half, held), held.measured)))
    _print_parts(held, predicted)
    judged = columns.take(~fitted | is_field)
    without = {name: left_out(columns, part, ~fitted | is_field) for name, part in PARTS.items()}
    for name, part in PARTS.items():
        print()
        print(line(f"ours, {name} left out", errors(without[name], judged.measured)))
        print(by("", part, judged, errors(without[name], judged.measured)))
    seen = judged_rows(held, predicted, known_by(found.models, held))
    known, stretches = _bands(seen, judged, without)
    if arguments.fit:
        content = as_json(found)
        write_planner_file("step_parameters.json", content)
        write_planner_file("error_bands.json", {"source": content["source"], "bands": known})
    print("", *own_machine.lines(seen, stretches), sep="\n")
    print("", HEADER, *disaggregated.lines(arguments.data or packaged_csv()), sep="\n")
    if arguments.aiconfigurator:
        _print_aiconfigurator(held, predicted, arguments.aiconfigurator)


def _bands(
    seen: list[Judged], judged: Columns, without: dict[str, Predicted]
) -> tuple[dict[str, object], Stretches]:
    """Bands that hold nine of ten rows that are not theirs; printed with the share."""
    unseen: dict[Known, str] = {"model not measured": "model", "GPU not measured": "GPU"}
    rows = {
        known: judged_rows(judged, without[name], _all_are(known, judged))
        for known, name in unseen.items()
    }
    unlike = unlike_entry(
        [
            entry
            for name in ("engine", "GPU generation")
            for entry in judged_rows(judged, without[name], _all_are("GPU not measured", judged))
        ]
    )
    pool = [*seen, *(entry for group in rows.values() for entry in group)]
    fitted = [entry for entry in seen if entry[1].known == "model measured"]
    needed: dict[str, list[Ratios]] = {
        "model measured": needed_stretches(fitted, pool, lambda row: row.group, unlike)
    }
    needed |= {
        known: needed_stretches(rows[known], pool, PARTS[name], unlike)
        for known, name in unseen.items()
    }
    stretches = {known: stretch_of(group) for known, group in needed.items()}
    print("\nrows within the 90 % bands of other deployments, of other models, of other GPUs")
    for known, group in needed.items():
        plain = coverage(group, dict.fromkeys(MEASURES, 1.0))
        cells = (
            f"{name} {100 * share:.1f} % (unstretched {100 * plain[name]:.1f} %, "
            f"x{stretches[known][name]:.2f})"
            for name, share in coverage(group, stretches[known]).items()
        )
        print(f"  {known}, {len(group)} rows: {', '.join(cells)}")
    known_bands: dict[str, object] = dict(bands(pool, stretches, unlike))
    known_bands[NOTHING_LIKE_IT] = unlike
    return known_bands, stretches


def _all_are(known: Known, columns: Columns) -> list[Known]:
    return [known] * len(columns.rows)


def write_planner_file(name: str, content: object) -> None:
    """Write a JSON file of the planner."""
    text = json.dumps(content, indent=1) + "\n"
    (PLANNER / name).write_text(text, encoding="utf-8")


def _print_parts(held: Columns, predicted: Predicted) -> None:
    found = errors(predicted, held.measured)
    print()
    for name in ("engine", "model", "GPU"):
        print(by(f"by {name}", PARTS[name], held, found))
    print(by("by batch", lambda row: row.regime, held, found))


def _print_aiconfigurator(held: Columns, predicted: Predicted, count: int) -> None:
    """Both on the rows that it answers, of `count` drawn by their hash."""
    order = sorted(range(len(held.rows)), key=lambda index: _hash(held.rows[index]))[:count]
    chosen = np.zeros(len(held.rows), bool)
    chosen[order] = True
    drawn = held.take(chosen)
    theirs = errors(aiconfigurator(drawn), drawn.measured)
    answered = ~np.isnan(theirs["tpot"])
    ours = errors(Predicted(*(column[chosen] for column in predicted)), drawn.measured)
    print(f"\nof {count} drawn rows, those that aiconfigurator answers (it may have seen them)")
    print(line("ours", _kept(ours, answered)))
    print(line("aiconfigurator", _kept(theirs, answered)))


def _kept(found: dict[str, Column], mask: Column) -> dict[str, Column]:
    return {name: column[mask] for name, column in found.items()}


def _hash(row: Row) -> str:
    return hashlib.sha256(row.names["id"].encode()).hexdigest()


if __name__ == "__main__":
    main()
