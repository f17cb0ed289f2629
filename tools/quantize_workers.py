"""Measure quantizing in workers: `python -m tools.quantize_workers MODEL [OPTION ...] > FILE`.

One worker with one thread, two workers with one thread each, and one worker with two threads, in turns; each
run quantizes `LAYERS` layers and ends. Beside the seconds by the clock, which a neighbour on the cores makes
longer, stands the path that no neighbour does: workers wait for each other where they meet, so that it is the
sum, over the stretches between two meetings, of the most CPU seconds that a worker has in it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from llmopt.base.processor import cpu_model
from llmopt.cli.main import main as llmopt
from llmopt.quant.base import workers
from llmopt.quant.pipeline import pipeline
from llmopt.quant.plan.journal import Journal
from torch import distributed

ROUNDS, LAYERS = 2, 8
SETTINGS = {"1 x 1": (1, 1), "2 x 1": (2, 1), "1 x 2": (1, 2)}  # workers x threads
TIMES = "LLMOPT_TIMES"


def watch(folder: Path) -> None:
    """Have a worker note its CPU seconds at each meeting, from its first layer to the last, and end there."""
    stretches: list[float] = []
    began: list[float] = []
    quantize_layers = pipeline._quantize_layers

    def meeting(name: str) -> None:
        meet = getattr(distributed, name)

        def met(*arguments: Any, **named: Any) -> Any:
            stretches.append(time.process_time())
            answer = meet(*arguments, **named)
            stretches.append(time.process_time())
            return answer

        setattr(distributed, name, met)

    def start(*arguments: Any) -> None:
        workers.meet()
        stretches[:], began[:] = [time.process_time()], [time.monotonic()]
        quantize_layers(*arguments)

    def stop(self: Journal, index: int) -> None:
        if index + 1 == LAYERS:
            seconds = time.monotonic() - began[0]
            own = [*stretches, time.process_time()]
            cpu = [after - before for before, after in list(pairwise(own))[::2]]
            times = {"seconds": seconds, "stretches": cpu}
            (folder / f"{workers.rank()}.json").write_text(json.dumps(times))
            workers.meet()
            os._exit(0)

    for name in ("broadcast", "all_gather_object", "all_reduce"):
        meeting(name)
    pipeline._quantize_layers, Journal.forget_hidden = start, stop


def measured(words: list[str], number: int, threads: int) -> dict[str, Any]:
    """Seconds of the layers by the clock, and CPU seconds of the longest path and of all workers."""
    with tempfile.TemporaryDirectory() as parent:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(number), "-m", "tools.quantize_workers"]
        environment = os.environ | {"OMP_NUM_THREADS": str(threads), TIMES: parent}
        command += ["quantize", *words, "--output", f"{parent}/out"]
        subprocess.run(command, env=environment, check=True, stdout=sys.stderr)
        times = [json.loads(path.read_text()) for path in sorted(Path(parent).glob("?.json"))]
    stretches = [each["stretches"] for each in times]
    return {
        "seconds": times[0]["seconds"],
        "path_cpu_seconds": sum(map(max, zip(*stretches, strict=True))),
        "cpu_seconds": sum(map(sum, stretches)),
        "load": os.getloadavg()[0],
    }


def main() -> None:
    if TIMES in os.environ:
        watch(Path(os.environ[TIMES]))
        llmopt()
    model, *options = sys.argv[1:]
    runs: dict[str, list[dict[str, Any]]] = {setting: [] for setting in SETTINGS}
    for _ in range(ROUNDS):
        for setting, numbers in SETTINGS.items():
            runs[setting].append(measured([model, *options], *numbers))
            print(setting, runs[setting][-1], file=sys.stderr, flush=True)

    def speedups(of: str, by: str) -> dict[str, float]:
        pairs = zip(runs[of], runs["2 x 1"], strict=True)
        ratios = sorted(other[by] / two[by] for other, two in pairs)
        return {"median": median(ratios), "lowest": ratios[0], "highest": ratios[-1]}

    record = {
        "words": [Path(model).name, *options],
        "layers": LAYERS,
        "processor": cpu_model(),
        "speedup of two workers over one": {
            "by the path": speedups("1 x 1", "path_cpu_seconds"),
            "by the clock": speedups("1 x 1", "seconds"),
        },
        "speedup of two workers over two threads": {"by the clock": speedups("1 x 2", "seconds")},
        "runs": runs,
    }
    print(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
