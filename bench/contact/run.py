"""Stages of a first contact, each in a process that is watched: what hangs, crashes or raises is a row.

A stage is a list of cases. Its process tells each case before it is run and after; where the process ends in
one, or the case takes longer than it may, the case is told as failed and a new process goes on behind it.
What was found is written after every stage, and the same command goes on where an earlier one ended.

`python -m llmopt.bench.contact.run` serves where the command line's packages are not installed.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ...quant.base.atomic_io import check_output, end_with_parent, write_atomically
from ...quant.base.errors import BadInput
from .record import (
    STAGES,
    WHOLE,
    Finding,
    Record,
    Stage,
    failures,
    gpu_slug,
    new_record,
    page,
    read_record,
    summarize,
)

COMMAND: Sequence[str] = (sys.executable, "-m", "llmopt.bench.contact.stages")
POLL_SECONDS = 0.1
LOST, REFUSED = 3, 2
"""Exit codes of a process whose card answers no more, and of one that refuses the machine."""
LOG_CHARACTERS = 4000
KEPT_CHECKPOINT_BYTES = 40 << 30
FOLDER, MEMORY = "llmopt-contact-", "/dev/shm"
Line = dict[str, Any]


class Refused(Exception):
    """A machine on which nothing of a contact can run; the message says what to do."""


@dataclass(frozen=True, slots=True)
class Case:
    """A part of a stage: what it raises is its own failure; `seconds`: after which it counts as hung."""

    name: str
    run: Callable[[], Iterable[Finding]]
    seconds: float = 60.0


def run_cases(
    cases: Iterable[Case],
    lines_file: Path,
    answers: Callable[[], None],
    environment: Callable[[], dict[str, Any]],
) -> int:
    """Run the cases of a stage that were not begun yet, with a line for each thing that is found.

    `answers` raises where the card is lost. Returns the exit code of the stage's process.
    """
    begun = _cases(read(lines_file))
    with lines_file.open("a") as file:

        def say(**line: Any) -> None:
            print(json.dumps(line), file=file, flush=True)

        try:
            for number, case in enumerate(cases):
                if number == 0:  # a machine that is refused gives no case
                    say(environment=environment())
                if case.name in begun:
                    continue
                say(begin=case.name, seconds=case.seconds, at=time.monotonic())
                try:
                    for finding in case.run():
                        say(finding=asdict(finding))
                except Exception as error:
                    say(finding=asdict(Finding(case.name, "ends", told(error), False)))
                say(end=case.name, at=time.monotonic())
                try:
                    answers()
                except Exception:  # every later call would fail too
                    return LOST
        except Refused as error:
            say(refused=str(error))
            return REFUSED
        except Exception as error:
            say(failed=told(error))
            raise
    return 0


def told(error: Exception) -> str:
    """An exception in one line."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"


def lines_of(folder: Path, stage: str) -> Path:
    """The file of a stage's lines."""
    return folder / f"{stage}.jsonl"


@dataclass(frozen=True, slots=True)
class ContactRequest:
    """Options of a contact.

    Attributes:
        output: the record's file; None: named by the GPU under `runs/contact`.
        stages: of these names alone; empty: all.
        small: tiny shapes, which a CPU serves too.
        again: do not go on with the record that is there.
    """

    device: str = "cuda"
    output: Path | None = None
    stages: Sequence[str] = ()
    small: bool = False
    again: bool = False

    def __post_init__(self) -> None:
        if self.device not in ("cuda", "cpu"):
            raise BadInput(
                f"--device {self.device}: cuda or cpu; CUDA_VISIBLE_DEVICES chooses among cards"
            )
        if self.output is not None:
            if self.output.suffix != ".json":
                raise BadInput(f"--output {self.output}: the record is JSON; name it .json")
            check_output(self.output, "--output", folder=False)


def contact(
    request: ContactRequest, say: Callable[[str], None], stages: Sequence[Stage] | None = None
) -> tuple[Path, Record]:
    """Run the stages that the record does not have yet; returns its file and it.

    Raises:
        BadInput: an unknown stage, no card that serves, or a record of something else.
    """
    stages = STAGES if stages is None else stages
    if unknown := [name for name in request.stages if name not in {s.name for s in stages}]:
        names = ", ".join(stage.name for stage in stages)
        raise BadInput(f"--stages {unknown[0]}: choose of {names}")
    if request.output is not None and request.output.exists():
        read_record(request.output)  # before the first stage: a file of something else is kept
    first, *others = stages
    with work_folder() as folder:
        watched = Watched(request, folder)
        part, environment = watched.run(first, first.seconds)
        path = request.output or _default_output(environment)
        record = _begun(path, environment, request)
        _put(record, part, stages)
        _write(path, record)
        say(f"{first.name}: {part['ended']} in {part['seconds']:.0f} s; record: {path}")
        spare = max(0.0, first.seconds - part["seconds"])
        done = {one["name"] for one in record["stages"] if one["ended"] == WHOLE}
        for stage in others:
            if request.stages and stage.name not in request.stages:
                continue
            if stage.name in done:
                say(f"{stage.name}: whole, of the run before")
                continue
            limit = stage.seconds + spare
            reason = _left_out(stage, environment)
            part = watched.run(stage, limit)[0] if reason is None else _empty(stage, reason)
            spare = max(0.0, limit - part["seconds"])
            _put(record, part, stages)
            _write(path, record)
            failed = sum(each["met"] is False for each in part["findings"])
            told = f", {failed} expectations failed" if failed else ""
            say(f"{stage.name}: {part['ended']} in {part['seconds']:.0f} s{told}")
    return path, record


def _default_output(environment: Mapping[str, Any]) -> Path:
    name = environment.get("gpu", {}).get("name", "cpu")
    return Path("runs") / "contact" / f"{gpu_slug(name)}.json"


def _left_out(stage: Stage, environment: Mapping[str, Any]) -> str | None:
    """Why a stage is not run; None: it is."""
    if (cards := environment.get("gpus", 0)) < stage.cards:
        return f"it needs {stage.cards} cards, and the machine has {cards}"
    if stage.package and find_spec(stage.package) is None:
        return f"{stage.package} is not installed here"
    return None


def _empty(stage: Stage, reason: str) -> dict[str, Any]:
    found = asdict(Finding(stage.name, seen=f"left out: {reason}"))
    return {"name": stage.name, "ended": WHOLE, "seconds": 0.0, "findings": [found]}


def _begun(path: Path, environment: Mapping[str, Any], request: ContactRequest) -> Record:
    """The record that the run goes on with; a new one where there is none.

    Raises:
        BadInput: it is of other code, another device or other sizes.
    """
    today = datetime.now(UTC).date().isoformat()
    new = new_record(environment, today, small=request.small)
    if not path.exists():
        return new
    before = read_record(path)
    if request.again:
        return new
    was, now = (each["environment"] | {"sizes": each["small"]} for each in (before, new))
    names = ("sizes", "gpu", "machine", "commit", "libraries")
    differs = next((name for name in names if was.get(name) != now.get(name)), None)
    if differs is not None:
        raise BadInput(f"{path} differs in {differs}: --again begins anew, --output names another")
    return before


def _put(record: Record, part: dict[str, Any], stages: Sequence[Stage]) -> None:
    """Put a stage at its place in the record."""
    parts = {one["name"]: one for one in record["stages"]} | {part["name"]: part}
    record["stages"] = [parts[stage.name] for stage in stages if stage.name in parts]
    summarize(record)


def _write(path: Path, record: Record) -> None:
    """Write the record, and beside it the page."""
    write_atomically(path, (json.dumps(record, indent=1) + "\n").encode())
    write_atomically(path.with_suffix(".md"), page(record).encode())


class Watched:
    """Runs stages in processes of their own, with `folder` for their checkpoints."""

    def __init__(self, request: ContactRequest, folder: Path) -> None:
        self._request = request
        self._folder = folder

    def run(self, stage: Stage, limit: float) -> tuple[dict[str, Any], dict[str, Any]]:
        """Run a stage to its end; returns what it found, and its environment.

        Raises:
            BadInput: the stage refuses the machine.
        """
        lines_file = lines_of(self._folder, stage.name)
        begin = time.monotonic()
        ends = begin + limit
        while True:
            told = len(_cases(read(lines_file)))
            why = self._attempt(stage, lines_file, ends)
            found = read(lines_file)
            if refused := next((line["refused"] for line in found if "refused" in line), None):
                raise BadInput(refused)
            is_late = time.monotonic() > ends
            open_case = next((name for name, whole in _cases(found).items() if not whole), None)
            if open_case is not None:
                _close(lines_file, open_case, why or "ended without a word")
                found = read(lines_file)
            is_over = why is None or is_late or any("failed" in line for line in found)
            if is_over or len(_cases(found)) == told:
                break
        ended = _ended(why, limit if is_late else None, found)
        log = lines_file.with_suffix(".log").read_text(errors="replace")[-LOG_CHARACTERS:]
        if not stage.keeps:
            for leftover in self._folder.iterdir():
                shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
        environment = next((line["environment"] for line in found if "environment" in line), {})
        findings = [line["finding"] for line in found if "finding" in line]
        seconds = round(time.monotonic() - begin, 1)
        part = {"name": stage.name, "ended": ended, "seconds": seconds, "findings": findings}
        if ended != WHOLE:
            part["log"] = log
        return part, environment

    def _attempt(self, stage: Stage, lines_file: Path, ends: float) -> str | None:
        """Run the stage's process to its end, or until a case has taken too long; None: it ended well."""
        words = [*COMMAND, stage.name, str(self._folder), "--device", self._request.device]
        words += ["--small"] if self._request.small else []
        # A session of its own: what the process starts is ended with it.
        environment = os.environ | {"HF_HUB_OFFLINE": "1"}
        with lines_file.with_suffix(".log").open("ab") as log:
            process = subprocess.Popen(
                words,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,
                preexec_fn=end_with_parent,
            )
        try:
            while (code := process.poll()) is None:
                now = time.monotonic()
                last = next((line for line in reversed(read(lines_file)) if "at" in line), None)
                if now > ends:
                    return "cut off at the end of the stage's time"
                if last and "begin" in last and now > last["at"] + last["seconds"]:
                    return f"hung: no end after {last['seconds']:.0f} s"
                time.sleep(POLL_SECONDS)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if code == 0:
            return None
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def _cases(found: Sequence[Line]) -> dict[str, bool]:
    """The cases that were begun, and whether they ended."""
    ended = {line["end"] for line in found if "end" in line}
    return {line["begin"]: line["begin"] in ended for line in found if "begin" in line}


def _close(lines_file: Path, case: str, reason: str) -> None:
    """Note that the process ended in a case."""
    finding = asdict(Finding(case, "ends", reason, False))
    with lines_file.open("a") as file:
        for line in ({"finding": finding}, {"end": case, "at": time.monotonic()}):
            file.write(json.dumps(line) + "\n")


def _ended(why: str | None, limit: float | None, found: Sequence[Line]) -> str:
    """How a stage ended, and after which case."""
    if why is None:
        return WHOLE
    failed = next((line["failed"] for line in found if "failed" in line), None)
    how = f"cut off after {limit:.0f} s" if limit else f"failed: {failed}" if failed else why
    last = next((line["end"] for line in reversed(found) if "end" in line), None)
    return how if last is None else f"{how}, after {last}"


def read(lines_file: Path) -> list[Line]:
    """Lines of a stage, but one that was being written when its process ended."""
    text = lines_file.read_text() if lines_file.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


@contextmanager
def work_folder() -> Iterator[Path]:
    """A folder for checkpoints, locked while this process lives; those of killed runs are removed."""
    for parent in {*map(Path, (MEMORY, tempfile.gettempdir(), roomy())), Path.cwd()}:
        for left in parent.glob(f"{FOLDER}????????"):  # as tempfile names them
            # One that another run has made and not locked yet is empty.
            with suppress(OSError), _locked(left):  # which fails where the run that has it goes on
                if any(left.iterdir()):
                    shutil.rmtree(left)
    with tempfile.TemporaryDirectory(prefix=FOLDER, dir=roomy()) as name, _locked(Path(name)):
        yield Path(name)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def roomy() -> str:
    """Folder for checkpoints: in memory where there is enough of it, else the one with the most room."""
    shared = Path(MEMORY)
    if shared.is_dir() and room(shared) > KEPT_CHECKPOINT_BYTES:
        return str(shared)
    return str(max((Path(tempfile.gettempdir()), Path.cwd()), key=room))


def room(folder: Path) -> int:
    """Free bytes of the file system of a folder."""
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


def words_of(names: str | None) -> tuple[str, ...]:
    """Stages as they are given on a command line, with commas.

    Raises:
        BadInput: commas alone.
    """
    words = tuple(name.strip() for name in (names or "").split(",") if name.strip())
    if names is not None and not words:
        raise BadInput(f"--stages {names!r}: name a stage, or leave the option out for all")
    return words


def main() -> int:
    """The command without the command line's packages; returns the exit code."""
    parser = argparse.ArgumentParser(prog="llmopt.bench.contact.run")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--output", "-o", type=Path)
    parser.add_argument("--stages")
    for flag in ("--small", "--again"):
        parser.add_argument(flag, action="store_true")
    given: dict[str, Any] = vars(parser.parse_args())
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends the stage, and its folder
    try:
        given["stages"] = words_of(given["stages"])
        request = ContactRequest(**given)
        _, record = contact(request, lambda line: print(line, file=sys.stderr))
    except KeyboardInterrupt:
        print("interrupted: the same command goes on", file=sys.stderr)
        return 130
    except BadInput as problem:
        print(f"error: {problem}", file=sys.stderr)
        return 2
    return 1 if failures(record) else 0


if __name__ == "__main__":
    sys.exit(main())
