"""Run `ci-regression` on identical sides, to count what the gate says where nothing has changed.

    python -m tools.identical_pairs OUT --runs 20 --table docs/measured/cpu/identical-pairs.md -- \\
        --set bench.num_prompts=16 --set bench.output_len=16

Every run is a process of its own. Other options go to `llmopt run ci-regression`. The table has a row a
run: the exit code, the verdict of each aspect, the limits on speed that the start of the run said this
machine can tell, and those that ended with a verdict. The tool ends with 1 where a run is a regression, or
its exit code is not 0.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

HEADER = (
    "run",
    "exit code",
    "quality",
    "memory",
    "speed",
    "limits on speed told at the start",
    "decided at the end",
    "load",
    "minutes",
)


def run_pair(folder: Path, words: list[str]) -> tuple[int, dict[str, Any]]:
    """Exit code and result of a run of the recipe."""
    command = [sys.executable, "-m", "llmopt", "run", "ci-regression", "-o", str(folder), *words]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode not in (0, 1, 3):
        sys.exit(done.stderr)
    return done.returncode, json.loads((folder / "result.json").read_text(encoding="utf-8"))


def row_of(result: dict[str, Any]) -> list[str]:
    """The verdicts of the aspects, and the limits on speed before and after."""
    (variant,) = result["variants"].values()
    comparison, reach = variant["comparison"], result["speed_reach"]
    verdicts = {aspect["aspect"]: aspect["verdict"] for aspect in comparison["aspects"]}
    told = [limit["limit"] for limit in reach if limit["is_told"]]
    ended = [delta for delta in comparison["deltas"] if delta["outcome"] != "no verdict"]
    counts = f"{len(told)} of {len(reach)}", f"{len(ended)} of {len(comparison['deltas'])}"
    return [*(verdicts[name] for name in ("quality", "memory", "speed")), *counts]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("output", type=Path, help="folder of the runs; finished ones are kept")
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--table", type=Path, help="the Markdown file to write after every run")
    options, words = parser.parse_known_args()
    rows: list[list[str]] = []
    for index in range(1, options.runs + 1):
        folder = options.output / f"{index:02}"
        row = folder / "row.json"
        if not row.is_file():
            began, load = time.monotonic(), os.getloadavg()[1]
            code, result = run_pair(folder, words)
            minutes = (time.monotonic() - began) / 60
            cells = [f"{index}", f"{code}", *row_of(result), f"{load:.1f}", f"{minutes:.1f}"]
            row.write_text(json.dumps(cells), encoding="utf-8")
        rows.append(json.loads(row.read_text(encoding="utf-8")))
        codes = Counter(row[1] for row in rows)
        lines = [
            f"`{shlex.join(['llmopt', 'run', 'ci-regression', *words])}`, both sides identical: "
            f"{len(rows)} runs, exit codes "
            + ", ".join(f"{code}: {count}" for code, count in codes.items())
            + ". Load is the mean number of runnable processes in the five minutes before.",
            "",
            *(f"| {' | '.join(cells)} |" for cells in (HEADER, ["---"] * len(HEADER), *rows)),
        ]
        print(*rows[-1], sep="  ", flush=True)
        if options.table:
            options.table.write_text("\n".join(lines) + "\n", encoding="utf-8")
    if any(row[1] != "0" for row in rows):
        sys.exit(1)


if __name__ == "__main__":
    main()
