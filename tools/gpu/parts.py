"""A record of a GPU measured part by part, each in a process of its own, within its time.

What `gpu_bench` calls sections and `gpu_first` stages: a part that fails or takes too long loses only what it
had not yet found. What a part leaves of its time, the next may take.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
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
WHOLE = "whole"
"""How a part ended that found all that it looks for."""
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
        before = self._before(given) if given.resume else record
        record["environment"] = before["environment"]
        whole = {
            part["name"]: part for part in before.get(f"{self.noun}s", ()) if part["ended"] == WHOLE
        }
        record[f"{self.noun}s"] = parts
        spare = 0.0
        for name in names:
            factor = INTERPRETED_FACTOR if given.interpret else 1
            limit = self.seconds[name] * factor + spare
            if name in whole:
                print(f"{name}: {WHOLE}, of the run before", file=sys.stderr)
                parts.append(whole[name])
                continue
            part, environment = self.in_a_process(name, limit, given)
            spare = max(0.0, limit - part["seconds"])
            record["environment"] = record["environment"] or environment
            record["commit"] = record["commit"] or environment.get("commit")
            parts.append(part)
            given.out.parent.mkdir(parents=True, exist_ok=True)
            self.write(given.out, record)
            print(f"{name}: {part['ended']} in {part['seconds']:.0f} s", file=sys.stderr)
        return record

    def _before(self, given: argparse.Namespace) -> dict[str, Any]:
        """The record of the run that is gone on with; an empty one where there is none.

        Raises:
            SystemExit: it is of other code, or of other sizes.
        """
        from llmopt.bench.machine.environment import commit

        now = given.commit or commit()
        try:
            before = json.loads(given.out.read_text())
        except FileNotFoundError:
            return {"environment": {}}
        if (before["schema"], before["small"]) != (self.schema, given.small):
            sys.exit(f"{given.out} is another kind of run: leave --resume out")
        if before["commit"] != now:
            sys.exit(
                f"{given.out} is of commit {before['commit']}, and this is {now}: leave --resume out"
            )
        return before

    def in_a_process(
        self, name: str, limit: float, given: argparse.Namespace
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """What a part found, and the environment that it ran in."""
        with tempfile.TemporaryDirectory(dir=roomy()) as home:
            words = [*self.command, name, home, "--seconds", f"{limit:.0f}"]
            words += [f"--{flag}" for flag in ("small", "interpret") if getattr(given, flag)]
            begin = time.perf_counter()
            try:
                code = subprocess.run(words, timeout=limit, stdout=sys.stderr).returncode
            except subprocess.TimeoutExpired:
                code = None
            seconds = round(time.perf_counter() - begin, 1)
            found = read(Path(home))
        ended = _ended(code, limit, found)
        environment = next((line["environment"] for line in found if "environment" in line), {})
        return {"name": name, "ended": ended, "seconds": seconds} | self.collect(found), environment


def _ended(code: int | None, limit: float, found: Sequence[Finding]) -> str:
    """How a part ended, by the exit code of its process, None: it was cut off; and after what, if it told."""
    if code == 0:
        return WHOLE
    reason = next((line["failed"] for line in found if "failed" in line), None)
    if code is None:
        how = f"cut off after {limit:.0f} s"
    elif reason is not None:
        how = f"failed: {reason}"
    elif code < 0:
        how = f"killed by {signal.Signals(-code).name}"
    else:
        how = f"failed with exit code {code}"
    last = next((line["done"] for line in reversed(found) if "done" in line), None)
    return how if last is None else f"{how}, after {last}"


def parse(description: str, noun: str, out: Path) -> argparse.Namespace:
    """The command line of a record; `run` is a part's name and folder, where a process is one part's."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--out", type=Path, default=out)
    parser.add_argument(f"--{noun}s", help="names, with commas between them; all by default")
    parser.add_argument("--small", action="store_true", help="tiny shapes; serves the CPU too")
    parser.add_argument("--interpret", action="store_true", help="Triton's interpreter on the CPU")
    parser.add_argument(
        "--resume", action="store_true", help=f"keep what --out has of {noun}s that ended"
    )
    parser.add_argument("--seconds", type=float, default=math.inf, help=argparse.SUPPRESS)
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
        sys.exit(
            f"torch sees no CUDA device ({_no_cuda()}): --small takes shapes that a CPU can serve"
        )
    return "cuda" if has_gpu else "cpu"


def _no_cuda() -> str:
    """Why torch has no CUDA device: how it was built, the driver, what is visible."""
    import torch

    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    try:
        torch.cuda.init()
    except Exception as error:  # of torch, or of the driver
        return _first_line(error)
    return "none is visible"


@contextmanager
def findings(home: Path) -> Iterator[Callable[..., None]]:
    """Takes a part's findings: each is a line of JSON in `home` as soon as it is known.

    The last is `failed`, where the part raises; `done` names what was tried.
    """
    with (home / LINES).open("w") as file:

        def say(**line: Any) -> None:
            print(json.dumps(line), file=file, flush=True)

        try:
            yield say
        except SystemExit as error:
            say(failed=str(error))
            raise
        except Exception as error:
            say(failed=f"{type(error).__name__}: {_first_line(error)}")
            raise


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def read(home: Path) -> list[Finding]:
    """The findings of a part, but one that was being written when its process ended."""
    path = home / LINES
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def write(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    part = path.with_name(path.name + ".part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)


def write_json(path: Path, record: dict[str, Any]) -> None:
    """Write a record."""
    write(path, json.dumps(record, indent=1) + "\n")


def roomy() -> str:
    """Folder for checkpoints: in memory where there is enough of it, else the one with the most room."""
    shared, needed = Path("/dev/shm"), 40 * 2**30
    if shared.is_dir() and room(shared) > needed:
        return str(shared)
    return str(max((Path(tempfile.gettempdir()), Path.cwd()), key=room))


def room(folder: Path) -> int:
    """Free bytes of the file system of a folder."""
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize
