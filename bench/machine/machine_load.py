"""What else the machine was doing while something was measured."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

STAT = Path("/proc/stat")


@dataclass(frozen=True, slots=True)
class CpuTimes:
    """Processor seconds at a moment: of the whole machine (None where it cannot be read) and ours."""

    wall: float
    machine_busy: float | None
    own: float

    @classmethod
    def now(cls) -> CpuTimes:
        return cls(time.perf_counter(), machine_busy_seconds(), time.process_time())


def machine_busy_seconds(stat: Path = STAT) -> float | None:
    """Seconds that all processors of the machine spent on anything but waiting, since it started.

    Fields of the `cpu` line, proc(5): user nice system idle iowait irq softirq steal. Guests' time is
    within user. Time that a hypervisor took away (steal) was not ours either, and counts as busy.
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
    """Processor time that a process has had; 0 where the system does not say."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def other_load(before: CpuTimes, after: CpuTimes, helpers: float = 0.0) -> float | None:
    """Share of the machine's processors that everything but this process kept busy, from 0 to 1; nor do
    the `helpers` count, seconds that processes of ours took meanwhile.

    None where the system does not say, or where the span is below the resolution of its clock.
    """
    if before.machine_busy is None or after.machine_busy is None:
        return None
    wall = after.wall - before.wall
    if wall < 5 / os.sysconf("SC_CLK_TCK"):
        return None
    busy = after.machine_busy - before.machine_busy
    others = busy - (after.own - before.own) - helpers
    return min(1.0, max(0.0, others / wall / (os.cpu_count() or 1)))
