"""Print the start table: import, load, first token and resident memory of ours, llama.cpp and transformers.

    python -m tools.start_table --files MODEL.gguf FOLDER --environments DIR --rounds 5 [--output FILE]
    python -m tools.start_table --show docs/measured/cpu/starts.json

Takes the options of `tools/cpu_peers.py` and starts its workers alone, in turns, once a round; nothing
else is measured. Goals of our rows, each marked: from process to first token in 1.5 times `import torch`
and half a second, loading in twice llama.cpp's, and no more resident than the weights and 400 MB. `--show`
prints the tables of a record, and writes them into docs/measured/starts.md.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from llmopt.base.processor import cpu_model

from tools.cpu_peers import arguments, chosen_rows, load_ratios, measure_loads, start
from tools.document_part import write_part
from tools.peers.record import RESIDENT, TORCH, loads_table, seconds

DOCS, PART = Path(__file__).parents[1] / "docs/measured/starts.md", "start_table.py"
OWN = "llmopt "
TORCH_TIMES, TORCH_MORE, LOAD_TIMES, MORE_BYTES = 1.5, 0.5, 2, 400e6


def goals(loads: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, str, float, float]]:
    """Row, figure, median and goal."""

    def median(row: str, column: str) -> float | None:
        seen = seconds(loads, row, column)
        return statistics.median(seen.values()) if seen else None

    torch = median(TORCH, "process_seconds")
    for row in dict.fromkeys(one["row"] for one in loads if one["row"].startswith(OWN)):
        theirs = median(f"llamacpp {row.removeprefix(OWN)}", "load_seconds")
        weights = median(row, "weight_bytes")
        started = torch and TORCH_TIMES * torch + TORCH_MORE
        for label, column, unit, goal in (
            ("process to first token, s", "process_seconds", 1, started),
            ("loading, s", "load_seconds", 1, theirs and LOAD_TIMES * theirs),
            ("resident, MiB", RESIDENT, 2**20, weights and weights + MORE_BYTES),
        ):
            found = median(row, column)
            if goal and found is not None:
                yield row, label, found / unit, goal / unit


def goals_table(loads: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line for each goal, met or missed."""
    lines = ["| goal | measured | at most | |", "|---|---|---|---|"]
    for row, label, found, goal in goals(loads):
        verdict = "met" if found <= goal else "**missed**"
        lines.append(f"| {row}: {label} | {found:,.2f} | {goal:,.2f} | {verdict} |")
    return lines


def tables(record: Mapping[str, Any]) -> str:
    """The processor, the starts with their ratios, and the goals."""
    loads = record["loads"]
    rounds = 1 + max(one["round"] for one in loads)
    about = f"{record['processor']}, {record['threads']} threads, {rounds} rounds"
    parts = [[about], loads_table(loads, record["ratios"]), goals_table(loads)]
    return "\n\n".join("\n".join(part) for part in parts)


def main() -> None:
    given = arguments()
    if given.show:
        text = tables(json.loads(given.show.read_text(encoding="utf-8")))
        print(text)
        write_part(DOCS, PART, text)
        return
    cases = given.cases.split(",")
    rows = [row for row in chosen_rows(given, cases) if not row.label]
    starts = {row.name: partial(start, given, cases, row) for row in rows}
    loads = measure_loads(starts, given.rounds)
    record = {"processor": cpu_model(), "threads": given.threads, "loads": loads}
    record["ratios"] = load_ratios(rows, loads)
    print(tables(record))
    if given.output:
        given.output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
