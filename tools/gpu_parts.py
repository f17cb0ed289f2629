"""A record of a GPU measured part by part, each in a process of its own, within its time.

What `gpu_bench` calls sections and `gpu_first` stages: a part that fails or takes too long loses only what it
had not yet found. What a part leaves of its time, the next may take.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

LINES = "findings.jsonl"
INTERPRETED_FACTOR = 6
"""Triton's interpreter on a slow CPU takes this many times the time limit that a part has on a GPU."""
Finding = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of a record.

    Attributes:
        schema: of the record.
        noun: what a part is called: "section".
        seconds: the time limit of each part, by name.
        command: what starts a part in a process of its own; its name and its folder follow.
        collect: a part's entries, from what it found.
        write: writes the record, after each part.
    """

    schema: str
    noun: str
    seconds: Mapping[str, float]
    command: Sequence[str]
    collect: Callable[[list[Finding]], dict[str, Any]]
    write: Callable[[Path, dict[str, Any]], None]

    def run(self, given: argparse.Namespace) -> dict[str, Any]:
        """Every part that was asked for; returns what the file holds.

        Raises:
            SystemExit: an unknown part.
        """
        asked = getattr(given, f"{self.noun}s")
        names = asked.split(",") if asked else list(self.seconds)
        if unknown := [name for name in names if name not in self.seconds]:
            sys.exit(f"no {self.noun} {unknown[0]!r}: choose {', '.join(self.seconds)}")
        parts: list[dict[str, Any]] = []
        record: dict[str, Any] = {
            "schema": self.schema,
            "date": datetime.now(UTC).date().isoformat(),
        }
        record |= {"commit": given.commit, "small": given.small, "environment": {}}
        record[f"{self.noun}s"] = parts
        spare = 0.0
        for name in names:
            factor = INTERPRETED_FACTOR if given.interpret else 1
            limit = self.seconds[name] * factor + spare
            part, environment = self.in_a_process(name, limit, given)
            spare = max(0.0, limit - part["seconds"])
            record["environment"] = record["environment"] or environment
            record["commit"] = record["commit"] or environment.get("commit")
            parts.append(part)
            given.out.parent.mkdir(parents=True, exist_ok=True)
            self.write(given.out, record)
            print(f"{name}: {part['ended']} in {part['seconds']:.0f} s", file=sys.stderr)
        return record

    def in_a_process(
        self, name: str, limit: float, given: argparse.Namespace
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """What a part found, and the environment that it ran in."""
        with tempfile.TemporaryDirectory(dir=roomy()) as home:
            words = [*self.command, name, home]
            words += [f"--{flag}" for flag in ("small", "interpret") if getattr(given, flag)]
            begin = time.perf_counter()
            try:
                code = subprocess.run(words, timeout=limit, stdout=sys.stderr).returncode
                ended = "whole" if code == 0 else f"failed with exit code {code}"
            except subprocess.TimeoutExpired:
                ended = f"cut off after {limit:.0f} s"
            seconds = round(time.perf_counter() - begin, 1)
            lines = Path(home) / LINES
            text = lines.read_text() if lines.exists() else ""
        found: list[Finding] = [json.loads(line) for line in text.splitlines()]
        environment = next((line["environment"] for line in found if "environment" in line), {})
        return {"name": name, "ended": ended, "seconds": seconds} | self.collect(found), environment


def parse(description: str, noun: str, out: Path) -> argparse.Namespace:
    """The command line of a record; `run` is a part's name and folder, where a process is one part's."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--out", type=Path, default=out)
    parser.add_argument(f"--{noun}s", help="names, with commas between them; all by default")
    parser.add_argument("--small", action="store_true", help="tiny shapes; serves the CPU too")
    parser.add_argument("--interpret", action="store_true", help="Triton's interpreter on the CPU")
    parser.add_argument("--commit", help="to note, where this is no clone")
    parser.add_argument("--run", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.interpret:
        os.environ |= {"LLMOPT_TRITON": "interpret", "TRITON_INTERPRET": "1"}
    return given


def device_of(small: bool, interpret: bool) -> str:
    """Where a part runs.

    Raises:
        SystemExit: shapes of a real model, without a GPU.
    """
    import torch

    has_gpu = torch.cuda.is_available() and not interpret
    if not has_gpu and not small:
        sys.exit("torch sees no CUDA device: --small takes shapes that a CPU can serve")
    return "cuda" if has_gpu else "cpu"


@contextmanager
def findings(home: Path) -> Iterator[Callable[..., None]]:
    """Takes a part's findings: each is a line of JSON in `home` as soon as it is known."""
    with (home / LINES).open("w") as file:

        def say(**line: Any) -> None:
            print(json.dumps(line), file=file, flush=True)

        yield say


def write(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    part = path.with_name(path.name + ".part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)


def write_json(path: Path, record: dict[str, Any]) -> None:
    """Write a record."""
    write(path, json.dumps(record, indent=1) + "\n")


def roomy() -> str | None:
    """Folder for checkpoints: in memory where there is enough of it, else the temporary folder."""
    shared, needed = Path("/dev/shm"), 40 * 2**30
    if not shared.is_dir():
        return None
    found = os.statvfs(shared)
    return str(shared) if found.f_bavail * found.f_frsize > needed else None
