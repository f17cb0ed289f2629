"""What a pass shows of its neighbours: the recordings behind the thresholds that reject a pass.

    python tools/pass_evidence.py --output docs/measured/cpu/pass-evidence.json
    python tools/pass_evidence.py --read docs/measured/cpu/pass-evidence.json

One engine makes passes on a CPU of its own, first alone, then while another process takes a share of that CPU
(it spins, then sleeps, in periods of 100 ms), then while others spin on all other CPUs. The table tells how
much each slowed the passes down, what the passes recorded of it, and how many are rejected.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
from llmopt.bench.machine.pass_usage import disturbance
from llmopt.bench.options.options import BenchOptions
from llmopt.bench.session.session import BenchSession
from llmopt.quant.base.progress import Silent

PERIOD_SECONDS = 0.1
NEIGHBOUR = f"""
import os, sys, time
share, cpu = float(sys.argv[1]), int(sys.argv[2])
os.sched_setaffinity(0, {{cpu}})
while True:
    until = time.perf_counter() + share * {PERIOD_SECONDS}
    while time.perf_counter() < until: pass
    time.sleep((1 - share) * {PERIOD_SECONDS})
"""
SHARES = (0.02, 0.05, 0.1, 0.25, 0.5, 1.0)


def record(passes: int) -> list[dict[str, Any]]:
    """The recorded passes, with the neighbour that each had."""
    *others, ours = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {ours})
    given = {"num_threads": 1, "num_prompts": 32, "output_len": 32, "quality": False}
    options = BenchOptions.model_validate({**given, "num_runs": 10**6, "max_redone_passes": 0})
    rows: list[dict[str, Any]] = []
    with BenchSession(options, Silent()) as session:
        for _ in range(3):  # warm
            session.run_pass()
        kinds = [("none", 0.0, [])]
        kinds += [(f"{share:.0%} of the same CPU", share, [ours]) for share in SHARES]
        kinds += [("all of every other CPU", 1.0, others)] if others else []
        for name, share, cpus in kinds:
            neighbours = [
                subprocess.Popen([sys.executable, "-c", NEIGHBOUR, str(share), str(cpu)])
                for cpu in cpus
            ]
            try:
                for _ in range(passes):
                    measured = session._measure(1, "")
                    rows.append(
                        {"neighbour": name, "wall": measured.load.duration, **measured.usage}
                    )
            finally:
                for one in neighbours:
                    one.kill()
                    one.wait()
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    """Print the table of the recordings, a row a neighbour."""
    alone = np.median([row["wall"] for row in rows if row["neighbour"] == "none"])
    print(
        "| neighbour | passes | wall | run queue / wall | steal / wall | switches / CPU s | rejected |"
    )
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    for name in dict.fromkeys(row["neighbour"] for row in rows):
        kept = [row for row in rows if row["neighbour"] == name]
        rejected = sum(verdict(row) is not None for row in kept)
        wall = np.median([row["wall"] for row in kept]) / alone - 1
        cells = [
            name,
            str(len(kept)),
            f"{wall:+.1%}",
            spread([(row["run_delay_seconds"] or 0.0) / row["wall"] for row in kept], "{:.1%}"),
            spread([(row["steal_seconds"] or 0.0) / row["wall"] for row in kept], "{:.1%}"),
            spread([row["involuntary_switches"] / row["cpu_seconds"] for row in kept], "{:.0f}"),
            f"{rejected / len(kept):.0%}",
        ]
        print("| " + " | ".join(cells) + " |")


def verdict(row: dict[str, Any]) -> str | None:
    """Why today's thresholds reject a recorded pass."""
    keys = ("wall", "cpu_seconds", "run_delay_seconds", "involuntary_switches", "steal_seconds")
    return disturbance(*(row[key] for key in keys))


def spread(values: list[float], form: str) -> str:
    """Median and 95th percentile."""
    return " / ".join(form.format(np.percentile(values, q)) for q in (50, 95))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--read", type=Path, help="print the table of a recording; record nothing")
    parser.add_argument("--passes", type=int, default=25)
    given = parser.parse_args()
    rows = json.loads(given.read.read_text()) if given.read else record(given.passes)
    if given.output is not None:
        given.output.write_text(json.dumps(rows) + "\n", encoding="utf-8")
    show(rows)


if __name__ == "__main__":
    main()
