"""One start: a fresh process on chosen CPUs that loads the weights, makes passes, and writes a run folder.

Both starts of a pair run on the CPUs that were idle longest, one after the other, or in turns pass by pass:
neighbouring passes share the mood of the machine (`session.pass_turns`).
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from ...base.atomic_io import interrupts_held
from ...base.errors import BadInput
from ..load.started_server import stop
from ..machine.pass_usage import PROC, allowed_cpus, thread_ids
from ..record.result import has_result
from ..session.run_sessions import TurnPipe, give_turns
from .starts_plan import value_of

AUTO, NONE = "auto", "none"
LOOK_SECONDS = 0.2
RANGE = re.compile(r"(\d+)(?:-(\d+))?")


def parse_cpus(text: str) -> frozenset[int]:
    """`0,2-3` as a set of CPUs. Raises BadInput: malformed, or a CPU that this process may not use."""
    cpus: set[int] = set()
    for part in text.split(","):
        match = RANGE.fullmatch(part.strip())
        if match is None:
            raise BadInput(f"--pin-cpus {text!r}: write {AUTO}, {NONE}, or CPUs such as 0,2-3")
        first, last = match.groups()
        cpus |= set(range(int(first), int(last or first) + 1))
    allowed = allowed_cpus(None)
    if not cpus or not cpus <= allowed:
        raise BadInput(f"--pin-cpus {text!r}: this process may use {sorted(allowed)}")
    return frozenset(cpus)


def cpus_of_pair(pin: str, options: Sequence[str], *, has_server: bool) -> frozenset[int] | None:
    """CPUs of the next two starts, as many as threads; None: the scheduler's, with servers or all CPUs."""
    if pin == NONE:
        return None
    if pin != AUTO:
        return parse_cpus(pin)
    threads, allowed = value_of(options, "--num-threads") or "", allowed_cpus(None)
    if has_server or not threads.isdigit() or not 0 < int(threads) < len(allowed):
        return None
    return idlest(allowed, int(threads))


def idlest(allowed: set[int], count: int, proc: Path = PROC) -> frozenset[int] | None:
    """The `count` CPUs that were idle longest during a short look; None where the system does not tell."""
    before = idle_ticks(proc)
    time.sleep(LOOK_SECONDS)
    after = idle_ticks(proc)
    if not allowed <= before.keys() & after.keys():
        return None
    # Of equally idle ones the last: interrupts are usually handled by the first.
    order = sorted(allowed, key=lambda cpu: (after[cpu] - before[cpu], cpu), reverse=True)
    return frozenset(order[:count])


def idle_ticks(proc: Path = PROC) -> dict[int, int]:
    """{CPU: clock ticks of idle time since boot}; empty where the system does not tell."""
    try:
        lines = (proc / "stat").read_text().splitlines()
    except OSError:
        return {}
    rows = [line.split() for line in lines if re.match(r"cpu\d", line)]
    return {int(row[0][3:]): int(row[4]) for row in rows}


def pin(pid: int, cpus: frozenset[int] | None) -> None:
    for thread in thread_ids(pid) if cpus is not None else ():
        with suppress(OSError):
            os.sched_setaffinity(thread, cpus or set())


@contextmanager
def affinity(cpus: frozenset[int] | None) -> Iterator[None]:
    """Processes started inside run on `cpus`; None changes nothing."""
    if cpus is None:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cpus)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


HELP_SECONDS = 30.0
# What an environment of its own must not inherit: the sources of this installation.
NOT_INHERITED = ("PYTHONPATH", "PYTHONHOME", "__PYVENV_LAUNCHER__")


class Crash(Exception):
    """A start of the build `name` ended without a result; the message has its exit code and last words."""

    def __init__(self, name: str, message: str) -> None:
        super().__init__(message)
        self.name = name


class OutOfTime(Exception):
    """The budget ended while a start was running."""


@dataclass(slots=True)
class Start:
    """A start of the build `name`, which writes its run to `folder`; another tool needs the folder made. Its
    process is in a session of its own: Ctrl-C reaches the runner alone, which stops it."""

    name: str
    command: Sequence[str]
    folder: Path
    inherit_sources: bool
    makes_folder: bool = False
    _process: subprocess.Popen[bytes] = field(init=False)

    @property
    def _log(self) -> Path:
        return self.folder.with_name(f"{self.folder.name}.log")

    def begin(
        self, extra: Mapping[str, str] | None = None, descriptors: Sequence[int] = ()
    ) -> None:
        if self.makes_folder:
            self.folder.mkdir(exist_ok=True)
        with self._log.open("wb") as output:
            self._process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=output,
                env={**environment_of(self.inherit_sources), **(extra or {})},
                pass_fds=descriptors,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait(self, deadline: float) -> None:
        """Wait for its end. Raises OutOfTime: it is still running at `deadline` (`time.monotonic`)."""
        try:
            self._process.wait(max(deadline - time.monotonic(), 0.0))
        except subprocess.TimeoutExpired:
            raise OutOfTime from None

    def stop(self) -> None:
        if self._process.poll() is None:
            stop(self._process)
            shutil.rmtree(self.folder, ignore_errors=True)  # what it wrote is part of a run

    def check(self) -> None:
        """Raise `Crash` if it wrote no run; else drop the log. Another tool's output must not fail."""
        code = self._process.returncode
        if has_result(self.folder) and (not code or not self.makes_folder):
            self._log.unlink()
            return
        ending = f"signal {-code}" if code < 0 else f"exit code {code}"
        lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")[:500]
        message = f"{ending}: {last or 'it said nothing'}"
        raise Crash(self.name, f"start {self.folder.name} ended with {message}")


def run_alone(start: Start, *, cpus: frozenset[int] | None, deadline: float) -> None:
    """Run one start to its end, or `deadline`. Crash: no run; OutOfTime; KeyboardInterrupt: stopped."""
    with affinity(cpus):
        start.begin()
    try:
        start.wait(deadline)
    finally:
        with interrupts_held():
            start.stop()
    start.check()


def run_in_turns(starts: Sequence[Start], *, cpus: frozenset[int] | None, deadline: float) -> None:
    """Run starts that load together, then take turns on `cpus`. Raises as `run_alone`, in order."""
    pair = uuid.uuid4().hex
    turns = [TurnPipe(pair) for _ in starts]
    running: list[Start] = []
    # Reading a turn blocks; a process that is stopped ends it.
    left = max(deadline - time.monotonic(), 0.0)
    watchdog = threading.Timer(left, lambda: [start.stop() for start in running])
    try:
        for start, turn in zip(starts, turns, strict=True):
            start.begin(turn.environment, turn.descriptors)
            running.append(start)
            turn.started()
        watchdog.start()
        for start, turn in zip(starts, turns, strict=True):
            if not turn.ready():
                start.wait(deadline)
                start.check()
        for start in starts:
            pin(start.pid, cpus)
        give_turns(turns)
        for start in starts:
            start.wait(deadline)
    except Crash:
        if time.monotonic() < deadline:
            raise
    finally:
        watchdog.cancel()
        with interrupts_held():
            for turn in turns:
                turn.close()
            for start in running:
                start.stop()
    if time.monotonic() >= deadline:
        raise OutOfTime
    for start in starts:
        start.check()


def environment_of(inherit_sources: bool) -> dict[str, str]:
    hidden = () if inherit_sources else NOT_INHERITED
    return {key: value for key, value in os.environ.items() if key not in hidden}


def has_option(command: Sequence[str], option: str, *, inherit_sources: bool) -> bool:
    """True if a help screen of the command names the option: an older version may not know it."""
    environment = {**environment_of(inherit_sources), "COLUMNS": "200"}
    for screen in ("--help-all", "--help"):
        try:
            done = subprocess.run(
                [*command, screen],
                capture_output=True,
                text=True,
                timeout=HELP_SECONDS,
                env=environment,
                stdin=subprocess.DEVNULL,
            )
        except (OSError, subprocess.TimeoutExpired):
            return False
        if done.returncode == 0:
            return option in done.stdout
    return False
