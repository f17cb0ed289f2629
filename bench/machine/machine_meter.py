"""Energy, CPU usage, background load and machine state around the passes of a session.

Energy comes from cumulative counters: RAPL for CPUs (Documentation/power/powercap in the Linux kernel),
NVML for a GPU. A counter covers the whole socket or card, all processes included. A missing counter is null,
with a reason.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ...engine.base.host import Nvml
from .environment import describe, machine_state
from .pass_usage import PassMeter, PassUsage, why_not_counted

STAT = Path("/proc/stat")
POWERCAP = Path("/sys/class/powercap")


@dataclass(frozen=True, slots=True)
class CpuTimes:
    """CPU seconds so far: of the whole machine (None if it cannot be read) and of this process."""

    wall: float
    machine_busy: float | None
    own: float

    @classmethod
    def now(cls) -> CpuTimes:
        return cls(time.perf_counter(), machine_busy_seconds(), time.process_time())


def machine_busy_seconds(stat: Path = STAT) -> float | None:
    """Busy CPU seconds of the whole machine since boot, with steal time, which the hypervisor takes. Fields
    of the `cpu` line, proc(5): user nice system idle iowait irq softirq steal; guest is part of user."""
    try:
        fields = stat.read_text().split("\n", 1)[0].split()
    except OSError:
        return None
    if len(fields) < 9 or fields[0] != "cpu":
        return None
    user, nice, system, _, _, irq, softirq, steal = map(int, fields[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def other_load(before: CpuTimes, after: CpuTimes, helpers: float = 0.0) -> float | None:
    """Background load: fraction (0 to 1) of the machine's CPUs used by other processes; `helpers` are CPU
    seconds of our own child processes, which do not count. None if the system does not report it, or the span
    is below the resolution of its clock."""
    if before.machine_busy is None or after.machine_busy is None:
        return None
    wall = after.wall - before.wall
    if wall < 5 / os.sysconf("SC_CLK_TCK"):
        return None
    busy = after.machine_busy - before.machine_busy
    others = busy - (after.own - before.own) - helpers
    return min(1.0, max(0.0, others / wall / (os.cpu_count() or 1)))


@dataclass(frozen=True, slots=True)
class Reading:
    """Counter values by name, in joules, and the value at which each wraps around (None: never)."""

    joules: Mapping[str, float]
    ranges: Mapping[str, float | None]

    def until(self, later: Reading) -> float | None:
        """Joules from this reading to a later one, summed over counters; each may have wrapped around once.
        None without counters."""
        if not self.joules or set(self.joules) != set(later.joules):
            return None
        total = 0.0
        for name, value in self.joules.items():
            used = later.joules[name] - value
            if used < 0:
                wrap = self.ranges[name]
                if wrap is None:
                    return None
                used += wrap
            total += used
        return total


def read_rapl(root: Path = POWERCAP) -> tuple[Reading, str | None]:
    """(package counters, reason if there are none)."""
    joules: dict[str, float] = {}
    ranges: dict[str, float | None] = {}
    if not root.is_dir():
        return Reading({}, {}), "this system has no RAPL counters (/sys/class/powercap is missing)"
    for folder in sorted(root.glob("*-rapl:*")):
        # `intel-rapl:0` is a socket; `intel-rapl:0:1` is a subdomain of it and would be counted twice.
        if folder.name.count(":") != 1:
            continue
        try:
            joules[folder.name] = int((folder / "energy_uj").read_text()) / 1e6
            ranges[folder.name] = int((folder / "max_energy_range_uj").read_text()) / 1e6
        except PermissionError:
            return Reading({}, {}), f"{folder / 'energy_uj'} may not be read (only root may)"
        except (OSError, ValueError):
            return Reading({}, {}), f"{folder / 'energy_uj'} cannot be read"
    if not joules:
        return Reading({}, {}), "this system has no RAPL package counter"
    return Reading(joules, ranges), None


class EnergyMeter:
    """Accumulates energy over the spans between `start` and `stop`. NVML is read only for a GPU (`nvml`
    replaces it in tests); `not_because` is the reason that this machine's energy is not the target's."""

    def __init__(
        self,
        device: str,
        *,
        powercap: Path = POWERCAP,
        nvml: Nvml | None = None,
        not_because: str | None = None,
    ) -> None:
        self._powercap = powercap
        self._nvml, self._gpu_reason = nvml, None if nvml else "the engine runs on the CPU"
        if device.startswith("cuda") and nvml is None:
            try:
                self._nvml, self._gpu_reason = Nvml(int(device.partition(":")[2] or 0)), None
            except OSError as error:
                self._gpu_reason = str(error)
        _, self._cpu_reason = read_rapl(powercap)
        self._elsewhere = not_because
        self._before: dict[str, Reading] = {}
        self._joules: dict[str, float | None] = {"cpu": 0.0, "gpu": 0.0}

    def start(self) -> None:
        self._before = self._read()

    def stop(self) -> float | None:
        """End a span; its joules over the readable counters, None without one."""
        spans = {name: self._before[name].until(after) for name, after in self._read().items()}
        for name, used in spans.items():
            total = self._joules[name]
            self._joules[name] = None if used is None or total is None else total + used
        known = [used for used in spans.values() if used is not None]
        return sum(known) if known and self._elsewhere is None else None

    def _read(self) -> dict[str, Reading]:
        joules = self._nvml.energy_joules() if self._nvml else None
        gpu = Reading({} if joules is None else {"gpu": joules}, {"gpu": None})
        return {"cpu": read_rapl(self._powercap)[0], "gpu": gpu}

    def part(self, input_tokens: int, output_tokens: int) -> dict[str, Any]:
        """`llmopt.energy` of a result: joules of each counter and per million tokens."""
        reasons = {"cpu": self._cpu_reason, "gpu": self._gpu_reason}
        part: dict[str, Any] = {}
        for name, joules in self._joules.items():
            reason = self._elsewhere or reasons[name]
            if joules is None and reason is None:
                reason = "the counter cannot be read on this machine"
            part[f"{name}_joules"] = joules if reason is None else None
            part[f"{name}_reason"] = reason
        known = [part[key] for key in ("cpu_joules", "gpu_joules") if part[key] is not None]
        total = part["joules"] = sum(known) if known else None
        for side, tokens in (("input", input_tokens), ("output", output_tokens)):
            per = total / tokens * 1e6 if total is not None and tokens else None
            part[f"joules_per_million_{side}_tokens"] = per
        return part


class MachineMeter:
    """Reads the counters and clocks of this machine's `device` (`cpu` or a GPU) before, during and after a
    measurement; `passes` meters the CPU usage of the target, if its processes can be seen, and
    `no_energy_because` is the reason that this machine's energy is not the target's."""

    def __init__(
        self, device: str, *, passes: PassMeter | None, no_energy_because: str | None = None
    ) -> None:
        self._device = device
        self._passes = passes
        self.energy = EnergyMeter(device, not_because=no_energy_because)
        self._state_before = machine_state(device)
        self._clock = CpuTimes.now()

    def start(self) -> None:
        self._clock = CpuTimes.now()
        self.energy.start()
        if self._passes is not None:
            self._passes.start()

    def stop(self, helper_seconds: float = 0.0) -> dict[str, Any]:
        """End a pass; returns its fields in the record: `other_load`, `joules` (None if unknown or another
        machine's) and the fields of `PassUsage`. `helper_seconds` is the CPU time of our own child processes
        since `start`."""
        usage = self._passes.stop() if self._passes is not None else PassUsage()
        joules = self.energy.stop()
        others = other_load(self._clock, CpuTimes.now(), helper_seconds)
        return {"other_load": others, "joules": joules, **asdict(usage)}

    def environment(self) -> dict[str, Any]:
        """`llmopt.environment` of a result: the machine, and its state before and after."""
        return {
            **describe(self._device),
            "instructions_not_counted_because": why_not_counted(),
            "before": self._state_before,
            "after": machine_state(self._device),
        }
