"""Print whether what passes suffered explains their CPU time: the spread of equal builds, with and without
covariates.

    python -m tools.gate_covariates docs/measured/cpu

The covariates' slopes are fitted (least squares, on changes within a pair) on every second block of a
recording and judged on the others, and the other way round. A pair's change is the median of its passes'.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from llmopt.bench.page.page import markdown_table

RECORDINGS = (
    "paired-passes",
    "paired-passes-loaded",
    "identical-starts",
    "identical-starts-loaded",
)
COVARIATES = ("none", "time in the run queue", "involuntary switches", "steal", "wall / CPU")
SETS = ((), (1,), (2,), (3,), (4,), (1, 2, 3))
Pair = tuple[np.ndarray, np.ndarray]
"""Changes of ln CPU time of its passes, and those of the covariates."""


def numbers(passes: pd.DataFrame) -> np.ndarray:
    """ln CPU time, and the covariates of each pass."""
    wall, cpu = passes["duration"], passes["cpu_seconds"]
    shares = (passes["run_delay_seconds"] / wall, np.log1p(passes["involuntary_switches"] / cpu))
    return np.stack([np.log(cpu), *shares, passes["steal_seconds"] / wall, np.log(wall / cpu)], -1)


def pairs(path: Path) -> Iterator[list[Pair]]:
    """The pairs of each block that has both sides."""
    table: pd.DataFrame = pd.read_parquet(path).query("side < 2").sort_values("pass")
    for _, block in table.groupby("block"):
        if len(set(block["side"])) < 2:
            continue
        sides = [
            [numbers(start) for _, start in side.groupby("place")]
            for _, side in block.groupby("side")
        ]
        if not path.stem.startswith("paired"):  # their passes were not beside each other
            sides = [[np.median(start, 0, keepdims=True) for start in side] for side in sides]
        changes = [new - base for base, new in zip(*sides, strict=False)]
        yield [(change[:, 0], change[:, 1:]) for change in changes]


def spread(blocks: Sequence[list[Pair]], chosen: Sequence[int]) -> float:
    """The deviation of the pairs' changes with the covariates' part taken away."""
    columns, left = [one - 1 for one in chosen], []
    for half in (0, 1):
        fitted = [pair for block in blocks[half::2] for pair in block]
        judged = [pair for block in blocks[1 - half :: 2] for pair in block]
        y, x = (np.concatenate([pair[part] for pair in fitted]) for part in (0, 1))
        slope = np.linalg.lstsq(x[:, columns], y, rcond=None)[0]
        left += [np.median(y - x[:, columns] @ slope) for y, x in judged]
    return float(np.std(left))


def main() -> None:
    rows = []
    for name in RECORDINGS:
        blocks = list(pairs(Path(sys.argv[1]) / f"{name}.parquet"))
        found = [f"{spread(blocks, chosen):.1%}" for chosen in SETS]
        rows.append([name, str(sum(map(len, blocks))), *found])
    names = [" and ".join(COVARIATES[one] for one in chosen or (0,)) for chosen in SETS]
    print("\n".join(markdown_table(["recording", "pairs", *names], rows)))


if __name__ == "__main__":
    main()
