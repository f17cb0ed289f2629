"""One start: a fresh process that loads the weights, makes a block of passes, and writes a run folder."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from ..files.interrupt import interrupts_held
from ..record.result import RESULT_NAME
from ..server.served import stop
from .cpus import affinity

HELP_SECONDS = 30.0
# What an environment of its own must not inherit: the sources of this installation.
NOT_INHERITED = ("PYTHONPATH", "PYTHONHOME", "__PYVENV_LAUNCHER__")


class Crash(Exception):
    """A start ended without a result; the message has its exit code and its last words."""


class OutOfTime(Exception):
    """The budget ended while a start was running."""


def run_start(
    command: Sequence[str],
    folder: Path,
    *,
    cpus: frozenset[int] | None,
    inherit_sources: bool,
    seconds: float,
) -> float:
    """Run one start to its end; returns its wall time in seconds.

    `folder` then holds its run, and `<folder>.log` what it printed, if that was more than its result.

    Raises:
        Crash: it wrote no run.
        OutOfTime: it was still running after `seconds`, and was stopped.
        KeyboardInterrupt: it was stopped.
    """
    log = folder.with_name(f"{folder.name}.log")
    began = time.perf_counter()
    with log.open("wb") as output, affinity(cpus):
        # A new session: Ctrl-C reaches only the runner, which then stops the start.
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=output,
            env=environment_of_start(inherit_sources),
            start_new_session=True,
        )
    try:
        code = process.wait(max(seconds, 0.0))
    except subprocess.TimeoutExpired:
        raise OutOfTime from None
    finally:
        if process.poll() is None:
            with interrupts_held():
                stop(process)
    # All requests of a run may have failed: that is a result, which the gate judges.
    if not (folder / RESULT_NAME).is_file():
        ending = f"signal {-code}" if code < 0 else f"exit code {code}"
        raise Crash(f"{ending}: {last_line(log) or 'it said nothing'}")
    log.unlink()
    return time.perf_counter() - began


def environment_of_start(inherit_sources: bool) -> dict[str, str]:
    """The environment, without what would put the sources of this installation into another one."""
    return {
        key: value
        for key, value in os.environ.items()
        if inherit_sources or key not in NOT_INHERITED
    }


def has_option(command: Sequence[str], option: str, *, inherit_sources: bool) -> bool:
    """Whether `command --help` names the option: an older version may not know it."""
    environment = {**environment_of_start(inherit_sources), "COLUMNS": "200"}
    try:
        done = subprocess.run(
            [*command, "--help"],
            capture_output=True,
            text=True,
            timeout=HELP_SECONDS,
            env=environment,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return option in done.stdout


def last_line(log: Path) -> str:
    """The last line of a log that says something."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return next((line.strip() for line in reversed(lines) if line.strip()), "")[:500]
