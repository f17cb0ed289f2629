"""Decoding beside busy processes: `python tools/busy_neighbour.py MODEL`.

The C kernels' threads are the pool, or OpenMP's as libgomp spins by default (GOMP_SPINCOUNT=300000). Each
measurement is a process of its own, both in turns; a busy process is a loop that never sleeps.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

WAYS = {"pool": {}, "OpenMP": {"GOMP_SPINCOUNT": "300000"}}
PROMPT_TOKENS, NEW_TOKENS = 16, 64
BUSY = "while True: pass"


def measure(model: Path, threads: int) -> float:
    """Tokens per second of one stream, the best of three passes."""
    from llmopt.engine import LLM, SamplingParams

    llm = LLM(model, device="cpu", num_threads=threads, max_model_len=256, max_num_seqs=1)
    params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
    llm.generate([[3] * PROMPT_TOKENS], params)
    seconds = []
    for _ in range(3):
        begin = time.perf_counter()
        llm.generate([[3] * PROMPT_TOKENS], params)
        seconds.append(time.perf_counter() - begin)
    return NEW_TOKENS / min(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("model", type=Path)
    parser.add_argument("--neighbours", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--one", action="store_true", help="a single measurement")
    given = parser.parse_args()
    if given.one:
        print(measure(given.model, given.threads))
        return
    print(
        "| busy processes | pool, tokens/s | OpenMP, tokens/s | pool / OpenMP |\n|---|---|---|---|"
    )
    for count in given.neighbours:
        busy = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(count)]
        rates: dict[str, list[float]] = {way: [] for way in WAYS}
        try:
            for _ in range(given.rounds):
                for way, environment in WAYS.items():
                    command = [sys.executable, __file__, str(given.model), "--one"]
                    command += ["--threads", str(given.threads)]
                    variables = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
                    done = subprocess.run(
                        command,
                        check=True,
                        capture_output=True,
                        text=True,
                        env=variables | environment,
                    )
                    rates[way].append(float(done.stdout.split()[-1]))
        finally:
            for process in busy:
                process.kill()
        pool, openmp = (statistics.median(rates[way]) for way in WAYS)
        print(f"| {count} | {pool:.1f} | {openmp:.1f} | {pool / openmp:.2f} |", flush=True)


if __name__ == "__main__":
    main()
