"""CPU accounting of a process tree from /proc: CPU time, run-queue delay, involuntary switches.

Sources: proc(5) for `status` and `stat`, the kernel's sched-stats.rst for `schedstat`.
"""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
NANOSECONDS = 1e-9
# CPUCLOCK_SCHED of a process in a dynamic clock id, as clock_getcpuclockid(3) makes it.
_CPU_CLOCK_OF_PROCESS = 2


@dataclass(frozen=True, slots=True)
class ThreadUsage:
    """What the scheduler gave a thread so far.

    Attributes:
        cpu_seconds: on a CPU.
        run_delay_seconds: runnable, but in the run queue because others held the CPU.
        involuntary_switches: times that it lost the CPU while it could have gone on.
    """

    cpu_seconds: float
    run_delay_seconds: float
    involuntary_switches: int


@dataclass(frozen=True, slots=True)
class TreeUsage:
    """A process and its descendants so far: CPU seconds of each process, and the usage of each thread.

    `threads` is empty where the kernel has no schedstat.
    """

    processes: dict[int, float]
    threads: dict[int, ThreadUsage]


def tree_usage(root: int, proc: Path = PROC) -> TreeUsage:
    """The usage of `root` and its descendants; processes that end meanwhile are left out."""
    processes: dict[int, float] = {}
    threads: dict[int, ThreadUsage] = {}
    for pid in process_tree(root, proc):
        if (seconds := process_cpu_seconds(pid)) is not None:
            processes[pid] = seconds
        for thread in thread_ids(pid, proc):
            if (usage := thread_usage(pid, thread, proc)) is not None:
                threads[thread] = usage
    return TreeUsage(processes, threads)


def process_tree(root: int, proc: Path = PROC) -> list[int]:
    """`root` and its descendants."""
    children: dict[int, list[int]] = {}
    for entry in proc.iterdir() if proc.is_dir() else ():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                parent = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
                children.setdefault(parent, []).append(int(entry.name))
    tree = [root]
    for pid in tree:
        tree += children.get(pid, ())
    return tree


def thread_ids(pid: int, proc: Path = PROC) -> list[int]:
    """The threads of a process; none if it is gone."""
    try:
        return [int(entry.name) for entry in (proc / f"{pid}/task").iterdir()]
    except OSError:
        return []


def process_cpu_seconds(pid: int) -> float | None:
    """CPU time of a process over all threads, ended ones included; None if it is gone."""
    try:
        return time.clock_gettime((~pid << 3) | _CPU_CLOCK_OF_PROCESS)
    except OSError:
        return None


def thread_usage(pid: int, thread: int, proc: Path = PROC) -> ThreadUsage | None:
    """The usage of a thread; None if it is gone, or where the kernel has no schedstat."""
    folder = proc / f"{pid}/task/{thread}"
    try:
        on_cpu, delay, _ = map(int, (folder / "schedstat").read_text().split())
        status = (folder / "status").read_text()
    except (OSError, ValueError):
        return None
    switches = status.partition("nonvoluntary_ctxt_switches:")[2].split()
    return ThreadUsage(
        on_cpu * NANOSECONDS, delay * NANOSECONDS, int(switches[0]) if switches else 0
    )


def allowed_cpus(pid: int | None) -> set[int]:
    """The CPUs that a process may use, by default this one; none where the system does not tell."""
    try:
        return os.sched_getaffinity(pid or 0)
    except (AttributeError, OSError):
        return set()


def steal_seconds(cpus: set[int], proc: Path = PROC) -> float | None:
    """Seconds since boot that the hypervisor ran something else while one of `cpus` had work; None where the
    system does not report it."""
    try:
        lines = (proc / "stat").read_text().splitlines()
    except OSError:
        return None
    rows = {words[0]: words for line in lines if (words := line.split())}
    stolen = [int(row[8]) for cpu in cpus if len(row := rows.get(f"cpu{cpu}", ())) > 8]
    return sum(stolen) / os.sysconf("SC_CLK_TCK") if stolen else None
