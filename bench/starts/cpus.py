"""CPU affinity of a pair of starts: both run on the same CPUs, those that were idle longest."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from ...quant.base.errors import BadInput
from ..machine.pass_usage import PROC, allowed_cpus, thread_ids
from .builds import value_of

AUTO, NONE = "auto", "none"
LOOK_SECONDS = 0.2
RANGE = re.compile(r"(\d+)(?:-(\d+))?")


def parse_cpus(text: str) -> frozenset[int]:
    """`0,2-3` as a set of CPUs.

    Raises:
        BadInput: malformed, or a CPU that this process may not use.
    """
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
    """The CPUs of the next two starts; None leaves them to the scheduler.

    `auto` takes as many CPUs as the engine has threads. Client and server of one start compete for CPUs, and
    so do the threads of an engine that may use all of them: they are not pinned.
    """
    if pin == NONE:
        return None
    if pin != AUTO:
        return parse_cpus(pin)
    threads = value_of(options, "--num-threads")
    allowed = allowed_cpus(None)
    if (
        has_server
        or threads is None
        or not threads.isdigit()
        or not 0 < int(threads) < len(allowed)
    ):
        return None
    return idlest(allowed, int(threads))


def idlest(allowed: set[int], count: int, proc: Path = PROC) -> frozenset[int] | None:
    """The `count` CPUs that were idle longest while it looked; None where the system does not tell."""
    before = idle_ticks(proc)
    time.sleep(LOOK_SECONDS)
    after = idle_ticks(proc)
    if not allowed <= before.keys() & after.keys():
        return None
    # Of equally idle ones the last: interrupts are usually handled by the first.
    order = sorted(allowed, key=lambda cpu: (after[cpu] - before[cpu], cpu), reverse=True)
    return frozenset(order[:count])


def idle_ticks(proc: Path = PROC) -> dict[int, int]:
    """{CPU: clock ticks that it was idle since boot}; empty where the system does not tell."""
    try:
        lines = (proc / "stat").read_text().splitlines()
    except OSError:
        return {}
    rows = [line.split() for line in lines if re.match(r"cpu\d", line)]
    return {int(row[0][3:]): int(row[4]) for row in rows}


def pin(pid: int, cpus: frozenset[int] | None) -> None:
    """Let every thread of a running process run on `cpus`; None changes nothing."""
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
