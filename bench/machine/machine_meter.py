"""Energy, CPU usage, background load and machine state around the passes of a session."""

from __future__ import annotations

from typing import Any

from .energy import EnergyMeter, no_energy
from .environment import describe
from .instructions import why_not_counted
from .machine_load import CpuTimes, other_load
from .machine_state import machine_state
from .pass_usage import PassMeter, no_usage


class MachineMeter:
    """Reads this machine's counters before, during and after a measurement.

    Args:
        device: whose counters and clocks are read, `cpu` or a GPU.
        passes: meters the CPU usage of the target; None where its processes cannot be seen.
        no_energy_because: why this machine's energy is not the target's; None where it is.
    """

    def __init__(
        self, device: str, *, passes: PassMeter | None, no_energy_because: str | None = None
    ) -> None:
        self._device = device
        self._passes = passes
        self._no_energy_because = no_energy_because
        self._energy = EnergyMeter(device)
        self._state_before = machine_state(device)
        self._clock = CpuTimes.now()

    def start(self) -> None:
        """Begin a pass."""
        self._clock = CpuTimes.now()
        self._energy.start()
        if self._passes is not None:
            self._passes.start()

    def stop(self, helper_seconds: float = 0.0) -> dict[str, Any]:
        """End a pass; returns its fields in the record: `other_load`, `joules` (None where unknown, or
        another machine's) and those of `PassUsage`.

        `helper_seconds` is the CPU time of our own child processes since `start`.
        """
        usage = self._passes.stop() if self._passes is not None else no_usage()
        joules = self._energy.stop()
        others = other_load(self._clock, CpuTimes.now(), helper_seconds)
        if self._no_energy_because is not None:
            joules = None
        return {"other_load": others, "joules": joules, **usage.as_dict()}

    def energy(self, input_tokens: int, output_tokens: int) -> dict[str, Any]:
        """`llmopt.energy` of a result: over all passes, and per million tokens."""
        if self._no_energy_because is not None:
            return no_energy(self._no_energy_because)
        return self._energy.part(input_tokens, output_tokens)

    def environment(self) -> dict[str, Any]:
        """`llmopt.environment` of a result: the machine, and its state before and after."""
        return {
            **describe(self._device),
            "instructions_not_counted_because": why_not_counted(),
            "before": self._state_before,
            "after": machine_state(self._device),
        }
