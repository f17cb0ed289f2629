"""Trials of the regression job: does tools/premerge.sh say what is true, again and again?

    python tools/regression_job_trials.py install WORK
    python tools/regression_job_trials.py trial WORK equal|spinning|sleeping
    python tools/regression_job_trials.py table WORK --output docs/measured/cpu/regression-job-trials.json

`install` makes three heads of this commit: an equal one, and two whose engine makes every step 1.3 times as
long, by spinning and by sleeping; each is installed as the job does it. `trial` is one run of the job's
measuring step against the base; run it where nothing else runs. `table` prints what the trials said.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FACTOR = 1.3
SLOWED = """

# A trial of the regression job: every step takes {factor} times as long.
_step = Engine.step


def _slow_step(engine):
    begun = time.perf_counter()
    outputs = _step(engine)
    until = time.perf_counter() + {extra} * (time.perf_counter() - begun)
    {wait}
    return outputs


Engine.step = _slow_step
"""
WAITS = {
    "equal": None,
    "spinning": "while time.perf_counter() < until: pass",
    "sleeping": "time.sleep(max(0.0, until - time.perf_counter()))",
}
EXPECTED = {"equal": "never 1", "spinning": "always 1", "sleeping": "always 1"}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("step", choices=("install", "trial", "table"))
    parser.add_argument("work", type=Path)
    parser.add_argument("kind", nargs="?", choices=tuple(WAITS))
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    work = given.work.resolve()
    if given.step == "install":
        for kind in WAITS:
            install(work, kind)
    elif given.step == "table":
        table(work, given.output)
    elif given.kind is None:
        parser.error("trial needs equal, spinning or sleeping")
    else:
        trial(work, given.kind)


def job(work: Path, step: str, **variables: str) -> int:
    """The exit code of one step of the job."""
    environment = {
        **os.environ,
        "BASE": "HEAD",
        "WORK": str(work),
        "PYTHON": sys.executable,
        **variables,
    }
    return subprocess.run([ROOT / "tools" / "premerge.sh", step], env=environment).returncode


def install(work: Path, kind: str) -> None:
    """The job's first two steps for one kind of head; all share the dependencies."""
    folder = work / kind
    if code := job(folder, "checkout"):
        sys.exit(code)
    if (wait := WAITS[kind]) is not None:
        engine = folder / "head" / "engine" / "engine.py"
        patch = SLOWED.format(factor=FACTOR, extra=FACTOR - 1, wait=wait)
        engine.write_text(engine.read_text(encoding="utf-8") + patch, encoding="utf-8")
    for shared in work.glob("*/dependencies-*"):
        link = folder / shared.name
        if not link.exists():
            link.symlink_to(shared.resolve())
    if code := job(folder, "install"):
        sys.exit(code)


def trial(work: Path, kind: str) -> None:
    """One run of the job's measuring step; its result is appended to `trials.jsonl`."""
    folder = work / kind
    began = time.perf_counter()
    code = job(folder, "measure")
    record: dict[str, Any] = {
        "kind": kind,
        "exit_code": code,
        "minutes": (time.perf_counter() - began) / 60,
    }
    result = folder / "result" / "comparison.json"
    if result.is_file():
        comparison = json.loads(result.read_text(encoding="utf-8"))
        record |= {
            "outcome": comparison["outcome"],
            "pairs": comparison["num_pairs"],
            "stopped_because": comparison["stopped_because"],
            "gate": comparison["plan"]["limits"]["gate"],
            "changes": {delta["key"]: delta["change"] for delta in comparison["deltas"]},
            "starts": comparison["starts"],
        }
    with (work / "trials.jsonl").open("a", encoding="utf-8") as lines:
        lines.write(json.dumps(record) + "\n")
    shutil.rmtree(folder / "result", ignore_errors=True)
    print(kind, "exit code", code)


def table(work: Path, output: Path | None) -> None:
    """Print the trials, and write them."""
    lines = (work / "trials.jsonl").read_text(encoding="utf-8").splitlines()
    trials = [json.loads(line) for line in lines]
    print("| head | trials | exit 0 | exit 1 | exit 3 | expected | pairs | minutes |")
    print("| --- | ---: | ---: | ---: | ---: | --- | ---: | ---: |")
    for kind in WAITS:
        of_kind = [one for one in trials if one["kind"] == kind]
        if not of_kind:
            continue
        codes = [sum(one["exit_code"] == code for one in of_kind) for code in (0, 1, 3)]
        pairs = span([one.get("pairs", 0) for one in of_kind], 0)
        minutes = span([one["minutes"] for one in of_kind], 1)
        cells = [kind, len(of_kind), *codes, EXPECTED[kind], pairs, minutes]
        print("| " + " | ".join(map(str, cells)) + " |")
    if output is not None:
        output.write_text(
            json.dumps({"factor": FACTOR, "trials": trials}, indent=1) + "\n", encoding="utf-8"
        )


def span(values: list[float], digits: int) -> str:
    low, high = (f"{value:.{digits}f}" for value in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


if __name__ == "__main__":
    main()
