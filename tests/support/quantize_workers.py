"""Measure quantizing in workers: `python -m tests.support.quantize_workers MODEL METHOD [OPTION ...] > FILE`.

One worker with one thread, two workers with one thread each, and one worker with two threads, in turns. A
speed-up is of the seconds of one round, from the first worker's first line to its last; the start of torch in
the processes is outside. CPU seconds are those of all processes, their start included.
"""

from __future__ import annotations

import hashlib
import json
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from llmopt.engine.base.host import cpu_model

ROUNDS = 3
SETTINGS = {"1 x 1": (1, 1), "2 x 1": (2, 1), "1 x 2": (1, 2)}  # workers x threads
SPEEDUPS = {"over one thread": "1 x 1", "over two threads": "1 x 2"}


def quantized(words: list[str], workers: int, threads: int) -> dict[str, Any]:
    """Seconds of a run, and a digest of the files that it wrote."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "out"
        command = [sys.executable, "-m", "llmopt", "quantize", *words, "--json"]
        command += ["--nproc", str(workers), "--output", str(output)]
        environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
        digest = hashlib.sha256()
        for path in sorted(output.iterdir()):
            digest.update(path.name.encode() + path.read_bytes())
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    record = json.loads(done.stdout)
    return {
        "seconds": record["seconds"],
        "layer_seconds": sum(record["layer_seconds"]),
        "cpu_seconds": used.ru_utime + used.ru_stime - before.ru_utime - before.ru_stime,
        "load": os.getloadavg()[0],
        "sha256": digest.hexdigest(),
    }


def main() -> None:
    model, *options = sys.argv[1:]
    runs: dict[str, list[dict[str, Any]]] = {setting: [] for setting in SETTINGS}
    for _ in range(ROUNDS):
        for setting, numbers in SETTINGS.items():
            runs[setting].append(quantized([model, "--method", *options], *numbers))
            print(setting, runs[setting][-1], file=sys.stderr, flush=True)
    seconds = {setting: [run["seconds"] for run in each] for setting, each in runs.items()}
    ratios = {
        name: sorted(other / two for other, two in zip(seconds[of], seconds["2 x 1"], strict=True))
        for name, of in SPEEDUPS.items()
    }
    record = {
        "words": [Path(model).name, *options],
        "processor": cpu_model(),
        "runs": runs,
        "speedups": {
            name: {"median": median(each), "lowest": each[0], "highest": each[-1]}
            for name, each in ratios.items()
        },
    }
    print(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
