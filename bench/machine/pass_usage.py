"""CPU usage of a measured pass, and the evidence that others disturbed it.

CPU time does not see a sleep, so the waiting time stands beside it. What the pass itself suffered (time in
the run queue, involuntary switches, steal) says whether it is to be rejected; the machine's load does not.
"""

from __future__ import annotations

import os
import threading
import time
from dataclasses import asdict, dataclass
from typing import Any

from .instructions import InstructionCounter
from .process_usage import ThreadUsage, TreeUsage, allowed_cpus, steal_seconds, tree_usage

# A shorter pass is not rejected: one time slice of another process would be a large share of it.
LEAST_JUDGED_SECONDS = 0.1
# Thresholds of a rejected pass, from tools/pass_evidence.py: docs/measuring.md has the table.
MAX_RUN_DELAY_SHARE = 0.05
MAX_STEAL_SHARE = 0.05
MAX_SWITCHES_PER_CPU_SECOND = 100.0


@dataclass(frozen=True, slots=True)
class PassUsage:
    """What a pass used and suffered. None is what the kernel does not report.

    Attributes:
        cpu_seconds: CPU time over all threads of the process, or of a server's process tree.
        waiting_seconds: the engine thread's wall time that was neither on a CPU nor in the run queue: sleeps,
            locks, I/O. The engine thread is the one that drives the engine; of a server, the busiest one.
            Without schedstat it is wall minus CPU time, which holds the time in the run queue.
        run_delay_seconds: the engine thread's time in the run queue while others held the CPU.
        instructions: retired in user space, over all threads.
        involuntary_switches: over all threads.
        steal_seconds: taken by the hypervisor from the CPUs that the process may use.
        disturbed: whether the pass is to be rejected, by its own evidence; `disturbed_because` says why.
    """

    cpu_seconds: float | None
    waiting_seconds: float | None
    run_delay_seconds: float | None
    instructions: int | None
    involuntary_switches: int | None
    steal_seconds: float | None
    disturbed: bool
    disturbed_because: str | None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def no_usage() -> PassUsage:
    """The usage of a target whose processes cannot be seen, such as a server elsewhere."""
    return PassUsage(None, None, None, None, None, None, False, None)


class PassMeter:
    """Meters passes of a process tree: `start`, the pass, `stop`.

    Args:
        pid: the root of the tree; None is this process, whose calling thread is the engine thread.
    """

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
        engine = self._engine_thread(threads)
        if engine is None and self._pid is None:
            engine = ThreadUsage(thread_cpu, 0.0, 0)
        delay = engine.run_delay_seconds if engine is not None and threads else None
        switches = sum(t.involuntary_switches for t in threads.values()) if threads else None
        waiting = None
        if engine is not None:
            waiting = max(0.0, wall - engine.cpu_seconds - (delay or 0.0))
        reason = disturbance(wall, cpu, delay, switches, stolen)
        return PassUsage(
            cpu, waiting, delay, instructions, switches, stolen, reason is not None, reason
        )

    def _engine_thread(self, threads: dict[int, ThreadUsage]) -> ThreadUsage | None:
        if self._pid is None:
            return threads.get(threading.get_native_id())
        return max(threads.values(), key=lambda usage: usage.cpu_seconds, default=None)


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
    """Why a pass of `wall` seconds is to be rejected; None if nothing speaks against it."""
    if wall < LEAST_JUDGED_SECONDS:
        return None
    if run_delay is not None and run_delay > MAX_RUN_DELAY_SHARE * wall:
        return f"{run_delay / wall:.0%} of its time in the run queue behind other processes"
    if stolen is not None and stolen > MAX_STEAL_SHARE * wall:
        return f"{stolen / wall:.0%} of its time stolen by the hypervisor"
    if switches is not None and cpu and switches > MAX_SWITCHES_PER_CPU_SECOND * cpu:
        return f"{switches / cpu:.0f} involuntary switches a CPU second"
    return None
