"""Error rates of the regression gate on recorded runs: false alarms and missed slowdowns.

    python tools/gate_error_rates.py docs/measured/cpu/identical-runs*.parquet

Exit code 1 if a false alarm is more frequent than 2 %, or if a slowdown of 15 % ever passes.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from llmopt.bench.gate.judge import FALSE_ALARMS
from llmopt.bench.gate.rates import SLOWDOWN, error_rates, read_starts
from llmopt.bench.page.page import markdown_table

HEADER = ("recording", "machine", "passes", "new run", "pairs", "regression", "no verdict", "pass")


def main() -> int:
    parser = argparse.ArgumentParser(description="Print how often the gate is wrong.")
    parser.add_argument("recordings", type=Path, nargs="+")
    parser.add_argument("--threshold", type=float, default=0.05)
    parser.add_argument("--passes", type=int, nargs="+", default=[5, 3, 2, 1])
    given = parser.parse_args()
    rows, is_right = [], True
    for path in given.recordings:
        starts = read_starts(path)
        for passes in given.passes:
            for factor in (1.0, SLOWDOWN):
                for found in error_rates(
                    starts, factor=factor, threshold=given.threshold, passes=passes
                ):
                    shares = (found.regression, found.no_verdict, found.passed)
                    work = "the same" if factor == 1.0 else f"{factor - 1:.0%} slower"
                    words = (path.stem, found.kind, str(passes), work, str(found.pairs))
                    rows.append([*words, *(f"{share:.1%}" for share in shares)])
                    wrong = found.passed > 0 if factor > 1.0 else found.regression > FALSE_ALARMS
                    is_right = is_right and not wrong
    print("\n".join(markdown_table(HEADER, rows)))
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
