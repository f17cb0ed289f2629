"""Error rates of the regression gate on recorded runs: false regressions, undecided jobs, and slowdowns
found.

    python tools/gate_error_rates.py docs/measured/cpu -o docs/measured/cpu/gate-error-rates.md

Three designs of a job of `--minutes`: two single starts (one of each build, all ordered pairs of recorded
starts), pairs of starts one after the other, and pairs whose passes take turns (the last two resampled).
Slowdowns are injected into the recordings, and those that were truly injected while recording are beside
them. Exit code 1 if the design with turns misses its promise beside a busy neighbour core: false regressions
<= 1 %, equal builds undecided <= 10 %, a change of twice the limit found >= 95 %. The recordings whose name
ends in `loaded` were made while ten runnable processes shared two cores, and are under no promise.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from llmopt.base.atomic_io import write_atomically
from llmopt.bench.gate.limits import Limit, parse_gate, with_waiting
from llmopt.bench.page.page import markdown_table

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.support.gate_rates import (
    SLOWDOWNS,
    JobRates,
    RecordedPairs,
    binomial_interval,
    error_rates,
    job_rates,
    read_pairs,
    read_starts,
)

OLD = ("identical-runs", "identical-runs-quiet", "identical-runs-held-out")
STARTS = ("identical-starts", "identical-starts-loaded")
TURNS = "paired-passes"
TURNS_LOADED = "paired-passes-loaded"
# The second is that of tools/premerge.sh.
GATES = ("duration<=+10%", "duration<=+10% cpu_seconds<=+10%", "cpu_seconds<=+5%")
INJECTED = (1.0, 1.03, 1.05, 1.10, 1.15, 1.20, 1.30)
# Sides of `paired-passes` beyond the two equal ones, and the factor that was really injected.
REAL = {2: "spin", 3: "sleep"}
REAL_FACTOR = 1.1
HEADER = (
    "recording",
    "pairs",
    "gate",
    "new build",
    "pairs a job",
    "regression",
    "no verdict",
    "pass",
)
SINGLE = ("recording", "gate", "new build", "comparisons", "regression", "no verdict", "pass")


def share_words(count: int, trials: int) -> str:
    """A share with its 95 % interval."""
    low, high = binomial_interval(count, trials)
    return f"{count / trials:.1%} ({low:.1%} to {high:.1%})"


def outcome_words(found: JobRates) -> list[str]:
    return [
        f"{found.mean_pairs:.1f} of {found.max_pairs}",
        *(
            share_words(count, found.jobs)
            for count in (found.regression, found.no_verdict, found.passed)
        ),
    ]


def pairs_words(pairs: RecordedPairs, limits: Sequence[Limit]) -> str:
    """How many pairs were recorded, and the deviation of their change."""
    return f"{pairs.num_pairs} ± {pairs.changes[limits[0].quantity.key].std():.1%}"


def job_rows(
    pairs: RecordedPairs, gate: str, seconds: float, jobs: int
) -> tuple[list[list[str]], list[str]]:
    """(a row for every change under one gate, promises that are missed)."""
    limits = with_waiting(parse_gate(gate))
    twice = 1 + 2 * limits[0].bound
    rows, missed = [], []
    for factor in sorted({*INJECTED, twice}):
        for slowdown in SLOWDOWNS[:1] if factor == 1.0 else SLOWDOWNS:
            found = job_rates(pairs, limits, slowdown.added(factor), seconds=seconds, jobs=jobs)
            same = factor == 1.0
            words = "the same" if same else f"{factor - 1:.0%} slower ({slowdown.name})"
            rows.append(
                [pairs.name, pairs_words(pairs, limits), gate, words, *outcome_words(found)]
            )
            if same and found.regression > 0.01 * jobs:
                missed.append(f"{gate}: false regressions of {pairs.name}")
            if same and found.no_verdict > 0.10 * jobs:
                missed.append(f"{gate}: equal builds of {pairs.name} undecided")
            if factor == twice and found.regression < 0.95 * jobs:
                missed.append(f"{gate}: {words} of {pairs.name} not found")
    return rows, missed


def single_rows(path: Path, gate: str) -> list[list[str]]:
    """Two single starts: every ordered pair of recorded starts, the second as it is or slower."""
    starts = read_starts(path)
    rows = []
    for factor in (1.0, 1.10, 1.20, 1.30):
        found = error_rates(starts, factor=factor, limits=parse_gate(gate))
        words = "the same" if factor == 1.0 else f"{factor - 1:.0%} slower"
        counts = [
            round(share * found.pairs)
            for share in (found.regression, found.no_verdict, found.passed)
        ]
        shares = [share_words(count, found.pairs) for count in counts]
        rows.append([path.stem, gate, words, str(found.pairs), *shares])
    return rows


def real_rows(path: Path, seconds: float, jobs: int) -> list[list[str]]:
    """Slowdowns that were injected while recording: what they did to the pairs, and what jobs of them say."""
    rows = []
    for side, name in REAL.items():
        pairs = read_pairs(path, side)
        seen = [
            f"{np.median(pairs.changes[key]):+.3f} ± {pairs.changes[key].std() / pairs.num_pairs**0.5:.3f}"
            for key in ("duration", "cpu_seconds", "waiting_seconds")
        ]
        limits = with_waiting(parse_gate("cpu_seconds<=+5%"))
        zero = dict.fromkeys(pairs.changes, 0.0)
        found = job_rates(pairs, limits, zero, seconds=seconds, swaps=False, jobs=jobs)
        rows.append(
            [f"{name} {REAL_FACTOR:g}", str(pairs.num_pairs), *seen, outcome_words(found)[1]]
        )
    return rows


def tables(folder: Path, seconds: float, jobs: int) -> tuple[list[str], list[str]]:
    """(the lines of all tables, missed promises of the design with turns)."""
    lines, missed = ["**Pairs whose passes take turns**", ""], []
    turns = read_pairs(folder / f"{TURNS}.parquet")
    rows = []
    for gate in GATES:
        found, wrong = job_rows(turns, gate, seconds, jobs)
        rows += found
        missed += wrong
    loaded = read_pairs(folder / f"{TURNS_LOADED}.parquet")
    for gate in GATES:
        rows += job_rows(loaded, gate, seconds, jobs)[0]
    lines += [*markdown_table(HEADER, rows), "", "**Pairs of starts one after the other**", ""]
    rows = []
    for name in (*OLD, *STARTS):
        rows += job_rows(read_pairs(folder / f"{name}.parquet"), "duration<=+10%", seconds, jobs)[0]
    for name in STARTS:
        rows += job_rows(read_pairs(folder / f"{name}.parquet"), "cpu_seconds<=+5%", seconds, jobs)[
            0
        ]
    lines += [*markdown_table(HEADER, rows), "", "**Two single starts**", ""]
    singles = [
        row for name in OLD for row in single_rows(folder / f"{name}.parquet", "duration<=+10%")
    ]
    lines += [*markdown_table(SINGLE, singles), "", "**Slowdowns injected while recording**", ""]
    header = (
        "injected",
        "pairs",
        "ln wall",
        "ln CPU",
        "waiting / wall",
        "cpu_seconds<=+5%: regression",
    )
    lines += markdown_table(header, real_rows(folder / f"{TURNS}.parquet", seconds, jobs))
    return lines, missed


def budget_rows(folder: Path, pairs: int, jobs: int) -> list[list[str]]:
    """Jobs that may make so many pairs: equal builds, and a change of twice the limit."""
    rows = []
    for name in (TURNS, TURNS_LOADED):
        recorded = read_pairs(folder / f"{name}.parquet")
        seconds = (pairs + 0.5) * float(recorded.seconds.mean())
        for gate in GATES:
            limits = with_waiting(parse_gate(gate))
            for factor in (1.0, 1 + 2 * limits[0].bound):
                added = SLOWDOWNS[0].added(factor)
                found = job_rates(recorded, limits, added, seconds=seconds, jobs=jobs)
                words = "the same" if factor == 1.0 else f"{factor - 1:.0%} slower"
                rows.append([name, gate, words, *outcome_words(found)])
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description="Print how often the gate is wrong.")
    parser.add_argument("recordings", type=Path, help="folder of the recordings")
    parser.add_argument("--minutes", type=float, default=8.0, help="of a job, without its set-up")
    parser.add_argument("--jobs", type=int, default=2000)
    parser.add_argument("--within", type=int, help="print only jobs of at most so many pairs")
    parser.add_argument("--output", "-o", type=Path)
    given = parser.parse_args()
    if given.within is not None:
        header = ("recording", "gate", "new build", *HEADER[4:])
        print(
            "\n".join(
                markdown_table(header, budget_rows(given.recordings, given.within, given.jobs))
            )
        )
        return 0
    lines, missed = tables(given.recordings, 60 * given.minutes, given.jobs)
    lines += ["", *(f"Missed: {words}." for words in missed)]
    text = "\n".join(lines).rstrip() + "\n"
    print(text, end="")
    if given.output is not None:
        write_atomically(given.output, text)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
