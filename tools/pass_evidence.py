"""What a pass shows of its neighbours: the recorded passes behind the thresholds that reject one.

    python tools/pass_evidence.py docs/measured/cpu/identical-starts-loaded.parquet

All starts of the recording (`tools/record_gate_runs.py`) are of one build. For each kind of evidence the
passes are sorted into ranges; a range whose passes are much slower than the rest is to be rejected.
"""

from __future__ import annotations

import argparse
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
from llmopt.bench.machine.pass_usage import (
    MAX_RUN_DELAY_SHARE,
    MAX_STEAL_SHARE,
    MAX_SWITCHES_PER_CPU_SECOND,
)

# (evidence, its numerator and denominator in the recording, edges of its ranges, threshold)
EVIDENCE = (
    (
        "time in the run queue / wall",
        ("run_delay_seconds", "duration"),
        (0, 0.01, 0.02, 0.05, 0.1, 0.2, 1),
        MAX_RUN_DELAY_SHARE,
    ),
    (
        "steal / wall",
        ("steal_seconds", "duration"),
        (0, 0.01, 0.05, 0.1, 0.2, 1),
        MAX_STEAL_SHARE,
    ),
    (
        "involuntary switches / CPU second",
        ("involuntary_switches", "cpu_seconds"),
        (0, 10, 20, 50, 100, 200, np.inf),
        MAX_SWITCHES_PER_CPU_SECOND,
    ),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("recording", type=Path)
    table = pq.read_table(parser.parse_args().recording)
    columns = {name: table[name].to_numpy().astype(float) for name in columns_read()}
    wall = columns["duration"]
    print("| evidence | from | to | passes | wall, median | 95 % | rejected |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | --- |")
    for name, (part, whole), edges, threshold in EVIDENCE:
        shares = columns[part] / columns[whole]
        usual = np.median(wall[shares <= edges[1]])
        for low, high in pairwise(edges):
            kept = wall[(shares >= low) & (shares < high)]
            if not len(kept):
                continue
            changes = [f"{value / usual - 1:+.0%}" for value in np.percentile(kept, (50, 95))]
            cells = [
                name,
                f"{low:g}",
                f"{high:g}",
                len(kept),
                *changes,
                "yes" if low >= threshold else "",
            ]
            print("| " + " | ".join(map(str, cells)) + " |")


def columns_read() -> set[str]:
    """The columns of the recording that are needed."""
    return {"duration", *(column for _, pair, _, _ in EVIDENCE for column in pair)}


if __name__ == "__main__":
    main()
