"""Start-up of the engines of tools/cpu_peers.py: loading, first token, and the process with its imports."""

from __future__ import annotations

import statistics
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
        rotation = number % max(1, len(names))
        for name in [*names[rotation:], *names[:rotation]]:
            worker = starts[name]()
            worker.close()
            measured += load_of(name, number, worker.about)
            print(f"round {number} start {name:<40} {worker.about}", flush=True)
    return measured


def load_of(name: str, number: int, about: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The seconds of one start; nothing of one that failed."""
    if "error" in about:
        return []
    return [{"round": number, "row": name, **{column: about[column] for column in COLUMNS}}]


def seconds(measured: Sequence[Mapping[str, Any]], row: str, column: str) -> dict[int, float]:
    """By round."""
    return {entry["round"]: entry[column] for entry in measured if entry["row"] == row}


def loads_table(
    measured: Sequence[Mapping[str, Any]], goals: Sequence[Mapping[str, Any]]
) -> list[str]:
    """The medians with the lowest and highest round, and the ratios to what is asked of loading."""
    lines = ["| start, seconds | " + " | ".join(COLUMNS.values()) + " |"]
    lines.append("|---|" + "---|" * len(COLUMNS))
    for name in dict.fromkeys(entry["row"] for entry in measured):
        cells = []
        for column in COLUMNS:
            seen = list(seconds(measured, name, column).values())
            cells.append(f"{statistics.median(seen):.2f} ({min(seen):.2f}-{max(seen):.2f})")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    if goals:
        lines += ["", "| seconds, ours / theirs | | ratio | goal |", "|---|---|---|---|"]
    for one in goals:
        met = "" if one["goal"] is None else "met" if one["median"] <= one["goal"] else "missed"
        asked = f"at most {one['goal']:.2f}, {met}" if met else "none"
        ratio = f"{one['median']:.2f} ({one['lowest']:.2f}-{one['highest']:.2f})"
        name = f"{one['ours']} / {one['theirs']}"
        lines.append(f"| {name} | {COLUMNS[one['column']]} | {ratio} | {asked} |")
    return lines
