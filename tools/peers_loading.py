"""Start-up of the engines of tools/cpu_peers.py: loading, first token, and the process with its imports."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

COLUMNS = {
    "load_seconds": "loading",
    "first_token_seconds": "first token",
    "process_seconds": "process to first token",
}


class Started(Protocol):
    """A worker that has loaded its model and generated a token."""

    about: dict[str, Any]

    def close(self) -> None: ...


def measure_loads(starts: Mapping[str, Callable[[], Started]], rounds: int) -> list[dict[str, Any]]:
    """Start every engine once a round, in turns, alone; each from the page cache from the second round on."""
    measured: list[dict[str, Any]] = []
    names = list(starts)
    for number in range(rounds):
        rotation = number % len(names)
        for name in [*names[rotation:], *names[:rotation]]:
            begin = time.perf_counter()
            worker = starts[name]()
            seconds = time.perf_counter() - begin
            worker.close()
            about = worker.about
            entry = {"round": number, "row": name, "process_seconds": seconds}
            if "error" not in about:
                entry |= {column: about[column] for column in COLUMNS if column in about}
                measured.append(entry)
            print(f"round {number} start {name:<40} {about.get('error') or entry}", flush=True)
    return measured


def loads_table(measured: Sequence[Mapping[str, Any]]) -> list[str]:
    """The medians with the lowest and highest round, in Markdown."""
    lines = ["| start, seconds | " + " | ".join(COLUMNS.values()) + " |"]
    lines.append("|---|" + "---|" * len(COLUMNS))
    for name in dict.fromkeys(entry["row"] for entry in measured):
        cells = []
        for column in COLUMNS:
            seen = [entry[column] for entry in measured if entry["row"] == name]
            cells.append(f"{statistics.median(seen):.2f} ({min(seen):.2f}-{max(seen):.2f})")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return lines
