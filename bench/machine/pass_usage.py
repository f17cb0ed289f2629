"""CPU usage of a measured pass, and the evidence that others disturbed it.

CPU time does not see a sleep, so waiting time is measured too. The pass's own delays (time in the run queue,
involuntary switches, steal) decide whether it is rejected; the machine's load does not.

Sources: proc(5) for `status` and `stat`, the kernel's sched-stats.rst for `schedstat`, perf_event_open(2) for
instructions, of which only user space is counted: `perf_event_paranoid` up to 2 allows that.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import struct
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

# A shorter pass is not rejected: one time slice of another process would be a large share of it.
LEAST_JUDGED_SECONDS = 0.1
# Thresholds of a rejected pass, by tools/pass_evidence.py: docs/measured/cpu/pass-evidence.md has the table.
MAX_RUN_DELAY_SHARE = 0.05
MAX_STEAL_SHARE = 0.05
MAX_SWITCHES_PER_CPU_SECOND = 100.0
PROC = Path("/proc")
NANOSECONDS = 1e-9
# CPUCLOCK_SCHED of a process in a dynamic clock id, as clock_getcpuclockid(3) makes it.
_CPU_CLOCK_OF_PROCESS = 2
SYSCALLS = {"x86_64": 298, "aarch64": 241}
_HARDWARE, _INSTRUCTIONS = 0, 1
_ATTR_BYTES = 120
# Bits of perf_event_attr: threads that start later are counted too; kernel and hypervisor are not.
_INHERIT, _EXCLUDE_KERNEL, _EXCLUDE_HV = 1 << 1, 1 << 5, 1 << 6
_CLOSE_ON_EXEC = 8


class InstructionCounter:
    """Counts instructions of kernel threads, and of threads that they start, until `stop`, which closes the
    counters; raises OSError if the kernel refuses, or the machine has no counter."""

    def __init__(self, threads: Iterable[int]) -> None:
        self._files: list[int] = []
        try:
            for thread in threads:
                self._files.append(_open_counter(thread))
        except OSError:
            self._close()
            raise

    def stop(self) -> int:
        try:
            return sum(struct.unpack("Q", os.read(file, 8))[0] for file in self._files)
        finally:
            self._close()

    def _close(self) -> None:
        while self._files:
            os.close(self._files.pop())


def why_not_counted() -> str | None:
    """The reason that this machine cannot count the instructions of this process; None if it can."""
    try:
        InstructionCounter([0]).stop()
    except OSError as error:
        return error.strerror or str(error)
    return None


def _open_counter(thread: int) -> int:
    number = SYSCALLS.get(platform.machine()) if platform.system() == "Linux" else None
    if number is None:
        raise OSError(f"perf_event_open is not known on {platform.system()} {platform.machine()}")
    flags = _INHERIT | _EXCLUDE_KERNEL | _EXCLUDE_HV
    head = struct.pack("IIQQQQQ", _HARDWARE, _ATTR_BYTES, _INSTRUCTIONS, 0, 0, 0, flags)
    attributes = ctypes.create_string_buffer(head, _ATTR_BYTES)
    libc = ctypes.CDLL(None, use_errno=True)
    file = libc.syscall(number, attributes, thread, -1, -1, ctypes.c_ulong(_CLOSE_ON_EXEC))
    if file < 0:
        code = ctypes.get_errno()
        reason = "this machine has no counter" if code in (2, 19, 95) else os.strerror(code)
        raise OSError(code, f"perf_event_open: {reason}")
    return file


@dataclass(frozen=True, slots=True)
class ThreadUsage:
    """Time that the scheduler gave a thread so far: on a CPU, and in the run queue because others held the
    CPU; and the times that it lost the CPU although it could go on."""

    cpu_seconds: float
    run_delay_seconds: float
    involuntary_switches: int


@dataclass(frozen=True, slots=True)
class TreeUsage:
    """A process and its descendants so far: CPU seconds of each process, and the usage of each thread, empty
    without the kernel's schedstat."""

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
    """The usage of a thread; None if it is gone, or the kernel has no schedstat."""
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
    """The CPUs that a process may use, by default this one; empty if the system does not report them."""
    try:
        return os.sched_getaffinity(pid or 0)
    except (AttributeError, OSError):
        return set()


def steal_seconds(cpus: set[int], proc: Path = PROC) -> float | None:
    """Seconds since boot that the hypervisor ran something else while one of `cpus` had work; None if the
    system does not report it."""
    try:
        lines = (proc / "stat").read_text().splitlines()
    except OSError:
        return None
    rows = {fields[0]: fields for line in lines if (fields := line.split())}
    stolen = [int(row[8]) for cpu in cpus if len(row := rows.get(f"cpu{cpu}", ())) > 8]
    return sum(stolen) / os.sysconf("SC_CLK_TCK") if stolen else None


@dataclass(frozen=True, slots=True)
class PassUsage:
    """CPU time and disturbances of a pass over all threads of the process, or of a server's process tree;
    None if the kernel does not report one. Instructions are counted in user space.

    Attributes:
        waiting_seconds: the engine thread's wall time that was neither on a CPU nor in the run queue: sleeps,
            locks, I/O. The engine thread drives the engine; for a server, it is the busiest thread. Without
            schedstat it is wall minus CPU time, with the time in the run queue.
        run_delay_seconds: the engine thread's time in the run queue while others held the CPU.
        steal_seconds: time taken by the hypervisor from the CPUs that the process may use.
        disturbed: True if the pass is rejected by its own evidence, for the reason in `disturbed_because`.
    """

    cpu_seconds: float | None = None
    waiting_seconds: float | None = None
    run_delay_seconds: float | None = None
    instructions: int | None = None
    involuntary_switches: int | None = None
    steal_seconds: float | None = None
    disturbed: bool = False
    disturbed_because: str | None = None


class PassMeter:
    """Meters passes of a process tree: `start`, the pass, `stop`. `pid` is the root of the tree; None is this
    process, whose calling thread is the engine thread."""

    def __init__(self, pid: int | None = None) -> None:
        self._pid = pid
        self._counts_instructions = True
        self._counter: InstructionCounter | None = None

    def start(self) -> None:
        self._before = tree_usage(self._pid or os.getpid())
        self._steal = steal_seconds(allowed_cpus(self._pid))
        if self._counts_instructions:
            try:
                self._counter = InstructionCounter(self._before.threads)
            except OSError:
                self._counts_instructions = False
        self._thread_cpu = time.thread_time()
        self._began = time.perf_counter()

    def stop(self) -> PassUsage:
        wall = time.perf_counter() - self._began
        thread_cpu = time.thread_time() - self._thread_cpu
        instructions = self._counter.stop() if self._counter is not None else None
        self._counter = None
        after = tree_usage(self._pid or os.getpid())
        steal = steal_seconds(allowed_cpus(self._pid))
        stolen = None if steal is None or self._steal is None else steal - self._steal
        cpu = cpu_between(self._before, after)
        threads = threads_between(self._before, after)
        if self._pid is None:
            own = ThreadUsage(thread_cpu, 0.0, 0)
            engine = threads.get(threading.get_native_id(), own)
        else:
            engine = max(threads.values(), key=lambda usage: usage.cpu_seconds, default=None)
        delay = engine.run_delay_seconds if engine is not None and threads else None
        switches = sum(t.involuntary_switches for t in threads.values()) if threads else None
        waiting = None
        if engine is not None:
            waiting = max(0.0, wall - engine.cpu_seconds - (delay or 0.0))
        reason = disturbance(wall, cpu, delay, switches, stolen)
        return PassUsage(
            cpu, waiting, delay, instructions, switches, stolen, reason is not None, reason
        )


def cpu_between(before: TreeUsage, after: TreeUsage) -> float | None:
    """CPU seconds of a tree between two readings; None if its root is gone."""
    if not after.processes:
        return None
    return sum(after.processes.values()) - sum(
        seconds for pid, seconds in before.processes.items() if pid in after.processes
    )


def threads_between(before: TreeUsage, after: TreeUsage) -> dict[int, ThreadUsage]:
    """The usage of each surviving thread between two readings."""
    none = ThreadUsage(0.0, 0.0, 0)
    used = {}
    for thread, now in after.threads.items():
        then = before.threads.get(thread, none)
        used[thread] = ThreadUsage(
            now.cpu_seconds - then.cpu_seconds,
            now.run_delay_seconds - then.run_delay_seconds,
            now.involuntary_switches - then.involuntary_switches,
        )
    return used


def disturbance(
    wall: float,
    cpu: float | None,
    run_delay: float | None,
    switches: int | None,
    stolen: float | None,
) -> str | None:
    """The reason to reject a pass of `wall` seconds; None without one."""
    if wall < LEAST_JUDGED_SECONDS:
        return None
    if run_delay is not None and run_delay > MAX_RUN_DELAY_SHARE * wall:
        return f"{run_delay / wall:.0%} of its time in the run queue behind other processes"
    if stolen is not None and stolen > MAX_STEAL_SHARE * wall:
        return f"{stolen / wall:.0%} of its time stolen by the hypervisor"
    if switches is not None and cpu and switches > MAX_SWITCHES_PER_CPU_SECOND * cpu:
        return f"{switches / cpu:.0f} involuntary switches a CPU second"
    return None
