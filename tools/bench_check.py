"""Check that `bench` and `compare` judge this machine right: `make bench-check`, on a machine at rest.

Measures the bundled model, measures it again, and measures it with every step slowed twice; judges the second
and the third run against the first. Then measures a client that is kept busy for 100 ms at a time, which has
to be noticed. The tests assert the same on a simulated clock; only this command depends on the machine.

Exits by 0 if every check is right, 1 if one is wrong, 3 if the machine was too noisy for a verdict.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from llmopt.bench.load.fleet import Fleet, measure_client

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "build" / "bench-check"
LOAD = (
    "--num-prompts",
    "16",
    "--output-len",
    "32",
    "--num-threads",
    "1",
    "--num-runs",
    "6",
    "--no-quality",
)
ATTEMPTS = 3
PASS, REGRESSION, NO_VERDICT = 0, 1, 3
BURDEN_SECONDS = 0.1
LEAST_LAG_MS = 20.0


def llmopt(*words: str | Path) -> int:
    command = [sys.executable, "-m", "llmopt.cli.main", *map(str, words)]
    finished = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
    if finished.returncode not in (PASS, REGRESSION, NO_VERDICT):
        print(finished.stderr)
    return finished.returncode


def measured(name: str, slowdown: float) -> Path:
    """Run folder of the bundled model with every step slowed by a factor."""
    folder = FOLDER / name
    shutil.rmtree(folder, ignore_errors=True)
    words = ("--name", name, "--slowdown", str(slowdown), "--result-dir", folder)
    if code := llmopt("bench", "--model", "stories3M", *LOAD, *words):
        raise SystemExit(f"llmopt bench of {name} failed with exit code {code}")
    (run,) = folder.iterdir()
    return run


def check_pair(name: str, slowdown: float, expected: int) -> int:
    """Judge a run against a base until there is a verdict; 0 if it is the expected one."""
    for attempt in range(1, ATTEMPTS + 1):
        base, new = measured("base", 1.0), measured(name, slowdown)
        code = llmopt("compare", base, new, "--html", FOLDER / f"{name}.html")
        print(f"{name}, attempt {attempt}: exit code {code}, expected {expected}", flush=True)
        if code != NO_VERDICT:
            return int(code != expected)
    return NO_VERDICT


def check_starved_client() -> int:
    """Measure the lag of a client's event loop that is kept busy; 0 if it shows."""
    with Fleet(1) as fleet:
        lag = measure_client(fleet, 1, 4, burden=BURDEN_SECONDS).loop_lag_ms["mean"]
    print(f"starved client: mean lag {lag:.1f} ms, expected more than {LEAST_LAG_MS:.0f} ms")
    return int(lag <= LEAST_LAG_MS)


def main() -> int:
    codes = [
        check_pair("equal pair", 1.0, PASS),
        check_pair("slowed twice", 2.0, REGRESSION),
        check_starved_client(),
    ]
    print(f"the runs and their pages are in {FOLDER.relative_to(ROOT)}")
    return 1 if 1 in codes else max(codes)


if __name__ == "__main__":
    sys.exit(main())
