"""`llmopt doctor --gpu`: stages in processes that are watched, so that a hang or a crash is a finding.

A stage writes a line before and after each case. If it ends or exceeds its time within one, that case has
failed, and a new process continues with the next.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ...base.atomic_io import end_with_parent, write_atomically
from ...base.errors import BadInput, first_line
from ...engine.base.host import usable_cores
from ...engine.planner.own_runs import GPU_SCHEMA

COMMAND: Sequence[str] = (sys.executable, "-m", "llmopt.bench.gpu_check.stages")
POLL_SECONDS = 0.1
LOST = 3
"""Exit code of a process whose card no longer answers."""
MOST_PROCESSES = 16
"""Processes of a pooled stage: each holds about 3 GB of memory and 0.5 GB of the card."""
LOG_CHARACTERS = 4000
WHOLE = "whole"
"""The end of a stage that ran all of its cases."""
Record = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Stage:
    """A part of the check, with processes of its own. `seconds` is its time limit, to which it may add what
    earlier stages left of theirs; the cases of a pooled stage are shared by one process for each core."""

    name: str
    seconds: int
    is_pooled: bool = False


STAGES = (
    Stage("environment", 40),
    Stage("kernels", 200, is_pooled=True),
    Stage("llama-bf16", 80),
    Stage("llama-int4", 60),
    Stage("llama-fp8", 50),
    Stage("mixture", 35),
    Stage("hybrid", 35),
    Stage("quantizers", 40),
)
"""Nine minutes in all. A test checks the limit of `kernels` against their number."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One result: `met` the expectation, None without one; `numbers` of a measurement, for programs."""

    what: str
    expected: str = ""
    seen: str = ""
    met: bool | None = None
    numbers: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Case:
    """A part of a stage; it counts as hung after `seconds`."""

    name: str
    run: Callable[[], Iterable[Finding]]
    seconds: float = 60.0


def run_cases(
    cases: Iterable[Case], marks: Path, lines: Path, synchronize: Callable[[], None]
) -> int:
    """Run cases not begun, by files of `marks`; `lines` gets JSON, `synchronize` raises without a card."""
    with lines.open("a") as file:

        def write(**line: Any) -> None:
            print(json.dumps(line), file=file, flush=True)

        def fail(name: str, expected: str, error: Exception) -> None:
            write(finding=asdict(Finding(name, expected, _described(error), False)))

        try:
            for number, case in enumerate(cases):
                try:
                    marks.with_name(f"{marks.name}-{number}").touch(exist_ok=False)
                except FileExistsError:
                    continue
                write(begin=case.name, seconds=case.seconds)
                try:
                    for finding in case.run():
                        write(finding=asdict(finding))
                except Exception as error:
                    fail(case.name, "ends", error)
                try:
                    synchronize()
                except Exception as error:  # every later call would fail too
                    fail(case.name, "leaves the card usable", error)
                    write(end=case.name)
                    return LOST
                write(end=case.name)
        except Exception as error:
            write(failed=_described(error))
            raise
    return 0


def _described(error: Exception) -> str:
    kind = "" if isinstance(error, BadInput) else f"{type(error).__name__}: "
    return kind + first_line(error)


def add_stage(record: Record, stage: Mapping[str, Any]) -> None:
    """Add a stage, and update what a plan reads: the measured roofs, and the shares of them by weights."""
    record["stages"].append(stage)
    for numbers in (finding["numbers"] for finding in stage["findings"]):
        record["environment"] |= numbers.get("environment", {})
        if "rate" in numbers:
            record["roofs"][numbers["phase"]] = numbers["rate"]
        if "share" in numbers:
            # The first of each kind of weights is the whole dense model, with one sequence.
            shares = record["shares"].setdefault(numbers["weights"], {})
            shares.setdefault(numbers["phase"], numbers["share"])


def line_of(stage: str, finding: Mapping[str, Any]) -> str:
    mark = "FAILED: " if finding["met"] is False else ""
    expected = f" (expected: {finding['expected']})" if finding["expected"] else ""
    return f"{stage}: {mark}{finding['what']}: {finding['seen']}{expected}"


def failures(record: Mapping[str, Any]) -> list[str]:
    """A line for each expectation that failed, and for each stage that did not end."""
    lines = []
    for stage in record["stages"]:
        if stage["ended"] != WHOLE:
            lines.append(f"{stage['name']}: {stage['ended']}")
        failed = [finding for finding in stage["findings"] if finding["met"] is False]
        lines += [line_of(stage["name"], finding) for finding in failed]
    return lines


class Worker:
    """A process of a stage, restarted after a case that ended it; `ended`: its end, `log`: its output."""

    def __init__(self, stage: Stage, folder: Path, number: int, say: Callable[[str], None]) -> None:
        self.ended: str | None = None
        self.findings: list[dict[str, Any]] = []
        self._stage, self._say, self._failed = stage, say, ""
        self._lines = folder / f"{stage.name}.{number}.jsonl"
        self._lines.touch()
        self._file, self._rest = self._lines.open(), ""
        self.log = self._lines.with_suffix(".log")
        self._start()

    def _start(self) -> None:
        self._case: str | None = None
        self._limit, self._hangs_at = math.inf, math.inf
        threads = {"OMP_NUM_THREADS": "1"} if self._stage.is_pooled else {}
        environment = os.environ | {"HF_HUB_OFFLINE": "1"} | threads
        with self.log.open("ab") as log:
            # A session of its own: what the process starts is killed with it.
            self._process = subprocess.Popen(
                [*COMMAND, self._stage.name, str(self._lines)],
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,
                preexec_fn=end_with_parent,
            )

    def goes_on(self, ends: float) -> bool:
        """Read what the process wrote; replace a process that ended in a case. False: the stage has ended."""
        if self.ended is not None:
            return False
        code, now = self._process.poll(), time.monotonic()
        self._read()
        if code is None and now < min(ends, self._hangs_at):
            return True
        self.kill()
        if code == 0:
            reason = WHOLE
        elif code is not None:
            last = self.log.read_text(errors="replace").rstrip().rpartition("\n")[2]
            name = signal.Signals(-code).name if code < 0 else ""
            reason = f"killed by {name}" if name else f"exit code {code}: {last}"
        elif now >= ends:
            reason = "cut off at its limit"
        else:
            reason = f"hung: no end in {self._limit:.0f} s"
        can_restart = now < ends and (self._case is not None or code == LOST)
        if self._case is not None:
            self._add(asdict(Finding(self._case, "ends", reason, False)))
        if can_restart:
            self._start()
            return True
        self.ended = self._failed or reason
        return False

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _read(self) -> None:
        *lines, self._rest = (self._rest + self._file.read()).split("\n")
        for line in map(json.loads, lines):
            self._failed = line.get("failed", self._failed)
            if "begin" in line:
                self._case, self._limit = line["begin"], line["seconds"]
                self._hangs_at = time.monotonic() + self._limit
            if "finding" in line:
                self._add(line["finding"])
            if "end" in line:
                self._case, self._hangs_at = None, math.inf

    def _add(self, finding: dict[str, Any]) -> None:
        self.findings.append(finding)
        self._say(line_of(self._stage.name, finding))


def check_gpu(
    output: Path | None, say: Callable[[str], None], stages: Sequence[Stage] = STAGES
) -> Record:
    """Run the stages, with a line to `say` for each finding. BadInput: no card can serve, or it is busy."""
    today = datetime.now(UTC).date().isoformat()
    record: Record = {"schema": GPU_SCHEMA, "date": today, "environment": {}}
    record |= {"roofs": {}, "shares": {}, "stages": []}
    spare = 0.0
    with TemporaryDirectory(prefix="llmopt-gpu-") as name:
        for stage in stages:
            limit = stage.seconds + spare
            result = run_stage(stage, limit, Path(name), say)
            if not record["stages"] and result["ended"] != WHOLE:
                raise BadInput(result["ended"])
            add_stage(record, result)
            spare = max(0.0, limit - result["seconds"])
            say(f"{stage.name}: {result['ended']} in {result['seconds']:.0f} s")
            if output is not None:
                write_atomically(output, (json.dumps(record, indent=1) + "\n").encode())
    return record


def run_stage(
    stage: Stage, limit: float, folder: Path, say: Callable[[str], None]
) -> dict[str, Any]:
    """Run a stage to its end; returns its part of the record."""
    begin = time.monotonic()
    count = min(usable_cores(), MOST_PROCESSES) if stage.is_pooled else 1
    workers: list[Worker] = []
    try:
        for number in range(count):
            workers.append(Worker(stage, folder, number, say))
        while sum(worker.goes_on(begin + limit) for worker in workers):
            time.sleep(POLL_SECONDS)
    finally:
        for worker in workers:
            worker.kill()
    ended = next((worker.ended for worker in workers if worker.ended != WHOLE), WHOLE)
    findings = [finding for worker in workers for finding in worker.findings]
    seconds = round(time.monotonic() - begin, 1)
    result = {"name": stage.name, "ended": ended, "seconds": seconds, "findings": findings}
    if ended != WHOLE:
        logs = "".join(worker.log.read_text(errors="replace") for worker in workers)
        result["log"] = logs[-LOG_CHARACTERS:]
    for leftover in folder.iterdir():
        shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
    return result
