"""Stands in for `llmopt bench` in a start: writes a recorded run, changed as `FAKE_STARTS` says."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path

TIMES = (
    "duration",
    "cpu_seconds",
    "waiting_seconds",
    "median_tpot_ms",
    "median_ttft_ms",
    "median_e2el_ms",
)


def main() -> int:
    behaviour = json.loads(Path(os.environ["FAKE_STARTS"]).read_text())
    words = sys.argv[1:]
    if "--help" in words:
        print(behaviour.get("help", "--no-report"))
        return 0
    folder = Path(words[words.index("--output") + 1])
    name = words[words.index("--name") + 1]
    log = Path(behaviour["log"])
    with log.open("a") as lines:
        sources = os.environ.get("PYTHONPATH")
        lines.write(json.dumps({"name": name, "words": words, "sources": sources}) + "\n")
    number = int(folder.name.partition("-")[0])
    if behaviour.get("crash", {}).get(name) == number:
        print("loading\nImportError: no module named 'kernels'\n", file=sys.stderr)
        return 5
    if behaviour.get("hang", {}).get(name) == number:
        time.sleep(600)
    if behaviour.get("interrupt", {}).get(name) == number:
        os.kill(os.getppid(), signal.SIGINT)
        time.sleep(600)
    take_turns(name, log, behaviour.get("turns", 0))
    write_run(Path(behaviour["template"]), folder, name, number, behaviour)
    return 0


def take_turns(name: str, log: Path, passes: int) -> None:
    """Take turns as `llmopt.bench.session.run_sessions` does: one for each pass, and one for scoring."""
    if not passes or "LLMOPT_PASS_TURNS" not in os.environ:
        return
    read, write, pair = os.environ["LLMOPT_PASS_TURNS"].split(",")
    for number in range(passes + 1):
        os.write(int(write), b"r")
        os.read(int(read), 1)
        if number < passes:
            with log.open("a") as lines:
                lines.write(json.dumps({"name": name, "pass": number, "pair": pair}) + "\n")


def write_run(template: Path, folder: Path, name: str, number: int, behaviour: dict) -> None:
    result = json.loads((template / "result.json").read_text())
    ours = result["llmopt"]
    ours["name"], ours["run_id"] = name, f"{name} {number}"
    factor = behaviour.get("factor", {}).get(name, 1.0) * (1 + 0.004 * (number % 3 - 1))
    # The recorded passes vary with the machine, and some may be disturbed: all become the first one.
    first = {**ours["runs"][0], "disturbed": False, "disturbed_because": None}
    ours["runs"] = [dict(first) for _ in ours["runs"]]
    for one in ours["runs"]:
        for key in TIMES:
            one[key] = (one[key] or 0.0) * factor
        one["output_throughput"] /= factor
        if name in behaviour.get("older", ()):
            del one["cpu_seconds"], one["waiting_seconds"], one["disturbed"]
    partial = folder.with_name(f".{folder.name}")
    partial.mkdir(parents=True)
    shutil.copy(template / "requests.parquet", partial)
    (partial / "result.json").write_text(json.dumps(result))
    partial.rename(folder)


if __name__ == "__main__":
    sys.exit(main())
