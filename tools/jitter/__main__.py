"""`python -m tools.jitter --seeds 1,2,3 [pytest options]`: the suite per seed, next to busy processes.

Exits by 1 if a seed fails, after all seeds, and prints which.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NUM_BUSY = 4
TIMEOUT_SECONDS = 900
"""Limit of a test, three times that of `make test`: the busy processes take more than half of the cores."""


def run(seed: int, options: list[str]) -> int:
    """Run the tests with the jitter of a seed; return pytest's exit status."""
    command = [
        sys.executable, "-m", "pytest", "-p", "tools.jitter.plugin",
        "--jitter-seed", str(seed), "--timeout", str(TIMEOUT_SECONDS), *options,
    ]  # fmt: skip
    with ExitStack() as stack:
        for _ in range(NUM_BUSY):
            busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
            stack.callback(busy.wait)
            stack.callback(busy.kill)
        return subprocess.run(command, cwd=ROOT, check=False).returncode


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", default="1,2,3", help="seeds, separated by commas")
    arguments, options = parser.parse_known_args()
    failed: list[int] = []
    for seed in map(int, arguments.seeds.split(",")):
        print(f"jitter seed {seed}", flush=True)
        if run(seed, options):
            failed.append(seed)
    for seed in failed:
        print(f"failed with jitter seed {seed}: make test-jitter SEED={seed}")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
