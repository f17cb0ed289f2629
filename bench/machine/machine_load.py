"""Background load: CPU time used by other processes during a measurement."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

STAT = Path("/proc/stat")


@dataclass(frozen=True, slots=True)
class CpuTimes:
    """CPU seconds so far: of the whole machine (None where it cannot be read) and of this process."""

    wall: float
    machine_busy: float | None
    own: float

    @classmethod
    def now(cls) -> CpuTimes:
        return cls(time.perf_counter(), machine_busy_seconds(), time.process_time())


def machine_busy_seconds(stat: Path = STAT) -> float | None:
    """Busy CPU seconds of the whole machine since boot.

    Fields of the `cpu` line, proc(5): user nice system idle iowait irq softirq steal. Guest time is
    part of user. Steal time (taken by the hypervisor) counts as busy.
    """
    try:
        words = stat.read_text().split("\n", 1)[0].split()
    except OSError:
        return None
    if len(words) < 9 or words[0] != "cpu":
        return None
    user, nice, system, _, _, irq, softirq, steal = map(int, words[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def process_seconds(pid: int) -> float:
    """CPU seconds of a process; 0 where the system does not report it."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def other_load(before: CpuTimes, after: CpuTimes, helpers: float = 0.0) -> float | None:
    """Background load: fraction (0 to 1) of the machine's CPUs used by other processes; `helpers` are CPU
    seconds of our own child processes, which do not count.

    None where the system does not report it, or where the span is below the resolution of its clock.
    """
    if before.machine_busy is None or after.machine_busy is None:
        return None
    wall = after.wall - before.wall
    if wall < 5 / os.sysconf("SC_CLK_TCK"):
        return None
    busy = after.machine_busy - before.machine_busy
    others = busy - (after.own - before.own) - helpers
    return min(1.0, max(0.0, others / wall / (os.cpu_count() or 1)))
