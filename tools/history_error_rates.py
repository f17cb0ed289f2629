"""Error rates of a history's change points: on synthetic and recorded series, and where nothing changed.

    python tools/history_error_rates.py docs/measured/cpu/identical-runs*.parquet

A synthetic series has changes of five standard deviations of its noise, at least eight runs apart; the noise
is normal, Student's t with three degrees of freedom, or drawn from the recorded starts. Exit code 1 if a
change of the 60 synthetic or of the slowed recorded series is not seen within one run of the truth, or if
more than one of 500 runs in them, of 500 series without a change, or of 500 checks of a growing history
without one, raises a false alarm.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
from llmopt.bench.page.page import markdown_table

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.support.change_point_rates import (
    Noise,
    false_alarms_of_checks,
    of_recorded,
    of_synthetic,
    points_of,
    recorded_logs,
)

UNCHANGED, UNCHANGED_RUNS = 500, 60
HEADER = (
    "series",
    "noise",
    "number",
    "runs",
    "changes",
    "within one run",
    "missed",
    "false alarms",
)


def main() -> int:
    parser = argparse.ArgumentParser(description="Print how often change points are wrong.")
    parser.add_argument("recordings", type=Path, nargs="+")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--series", type=int, default=60, help="synthetic ones")
    given = parser.parse_args()
    recordings = {path.stem: recorded_logs(path) for path in given.recordings}
    rng = np.random.default_rng(given.seed)
    pooled = {
        f"{name} {key}": logs for name, each in recordings.items() for key, logs in each.items()
    }
    noise = Noise(pooled, rng)
    tallies = of_synthetic(noise, rng, given.series) | of_recorded(recordings)
    rows = [tally.row(*names) for names, tally in tallies.items()]
    print("\n".join(markdown_table(HEADER, rows)))
    missed = sum(tally.changes - tally.near for tally in tallies.values())
    alarms = sum(tally.extra for tally in tallies.values())
    runs = sum(tally.runs for tally in tallies.values())
    print(f"\n{missed} changes missed, {alarms} false alarms in {runs} runs")
    is_right = not missed and alarms * UNCHANGED <= runs
    for kind in noise.kinds:
        alarms = sum(
            bool(points_of(np.exp(noise.draw(kind, UNCHANGED_RUNS)))) for _ in range(UNCHANGED)
        )
        checks = false_alarms_of_checks(noise, kind, UNCHANGED)
        print(
            f"{kind} noise, no change: {alarms} of {UNCHANGED} series of {UNCHANGED_RUNS} runs have a "
            f"change point; {checks} of {UNCHANGED} checks of a growing history fail"
        )
        is_right = is_right and max(alarms, checks) <= 1
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
