"""Protocol of the workers of tools/cpu_peers.py; it runs in any package's environment.

A worker loads its model, reports it, and replies to each task, one JSON line each, on what was its standard
output; what its package prints goes to the standard error.
"""

from __future__ import annotations

import json
import os
import random
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Run = Callable[[list[list[int]], int], list[list[float]]]
"""Prompts and the number of new tokens → the times at which each sequence's tokens came."""
Open = Callable[[dict[str, Any]], tuple[Run, dict[str, Any]]]
"""Options of a model → its run, and what there is to say of it, the package's version first."""


def serve(opened: Open) -> None:
    """Answer tasks until there are no more."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    options = json.loads(sys.argv[1])

    def answer(found: dict[str, Any]) -> None:
        answers.write(json.dumps(found) + "\n")
        answers.flush()

    try:
        begin = time.perf_counter()
        run, about = opened(options)
        loaded = time.perf_counter()
        run(_prompts(1, 16, 0), 1)
        seconds = {
            "load_seconds": loaded - begin,
            "first_token_seconds": time.perf_counter() - begin,
            "started_rss": _resident_bytes(),
        }
        answer({**about, **seconds})
        is_cold = True
        for line in sys.stdin:
            if is_cold:
                run(_prompts(2, 16, 0), 3)
                is_cold = False
            answer(_answer(run, json.loads(line)))
    except Exception as error:  # whatever a package raises is its answer
        answer({"error": f"{type(error).__name__}: {error}"[:300]})


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _prompts(count: int, length: int, seed: int) -> list[list[int]]:
    source = random.Random(seed)
    return [[source.randrange(3, 32000) for _ in range(length)] for _ in range(count)]


def _answer(run: Run, task: dict[str, Any]) -> dict[str, Any]:
    prompts = _prompts(task["batch"], task["context"], task["seed"])
    begin = time.perf_counter()
    times = run(prompts, task["new"])
    started = max(own[0] for own in times)
    ended = max(own[-1] for own in times)
    after = sum(moment > started for own in times for moment in own)
    return {
        "prompt_seconds": started - begin,
        "decode_rate": after / (ended - started) if ended > started else None,
        "peak_rss": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }
