"""NVML readings (name, memory, energy, clocks, temperature, power limit) through ctypes. No torch.

Names, units and codes: NVIDIA NVML API reference. A reading is None where the library or the card does
not support it.
"""

from __future__ import annotations

import ctypes
from typing import Any

LIBRARY = "libnvidia-ml.so.1"
SUCCESS = 0
TEMPERATURE_GPU = 0
CLOCK_SM, CLOCK_MEMORY = 1, 2
VERSION_LENGTH, NAME_LENGTH = 80, 96


class _Memory(ctypes.Structure):
    """`nvmlMemory_t`."""

    _fields_ = [(name, ctypes.c_ulonglong) for name in ("total", "free", "used")]


class Nvml:
    """One GPU of this machine, by its index.

    Args:
        library: replaces libnvidia-ml in tests.

    Raises:
        OSError: there is no such library or no such card; the message says which.
    """

    def __init__(self, index: int = 0, library: Any = None) -> None:
        self._library = library or ctypes.CDLL(LIBRARY)
        self._device = ctypes.c_void_p()
        if self._library.nvmlInit_v2() != SUCCESS:
            raise OSError("NVML is installed but does not start (is the driver loaded?)")
        code = self._library.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(self._device))
        if code != SUCCESS:
            raise OSError(f"NVML knows no GPU {index} (code {code})")

    def count(self) -> int:
        """GPUs of this machine."""
        value = ctypes.c_uint()
        code = self._library.nvmlDeviceGetCount_v2(ctypes.byref(value))
        return value.value if code == SUCCESS else 1

    def name(self) -> str | None:
        text = ctypes.create_string_buffer(NAME_LENGTH)
        if self._library.nvmlDeviceGetName(self._device, text, NAME_LENGTH) != SUCCESS:
            return None
        return text.value.decode(errors="replace")

    def memory_bytes(self) -> int | None:
        """All memory of the card; None where it shares the machine's."""
        memory = _Memory()
        code = self._library.nvmlDeviceGetMemoryInfo(self._device, ctypes.byref(memory))
        return memory.total if code == SUCCESS else None

    def energy_joules(self) -> float | None:
        """Energy since the driver was loaded (Volta and later)."""
        millijoules = ctypes.c_ulonglong()
        read = self._library.nvmlDeviceGetTotalEnergyConsumption
        if read(self._device, ctypes.byref(millijoules)) != SUCCESS:
            return None
        return millijoules.value / 1000

    def driver(self) -> str | None:
        text = ctypes.create_string_buffer(VERSION_LENGTH)
        if self._library.nvmlSystemGetDriverVersion(text, VERSION_LENGTH) != SUCCESS:
            return None
        return text.value.decode(errors="replace")

    def temperature_celsius(self) -> int | None:
        value = ctypes.c_uint()
        read = self._library.nvmlDeviceGetTemperature
        code = read(self._device, TEMPERATURE_GPU, ctypes.byref(value))
        return value.value if code == SUCCESS else None

    def clock_mhz(self, which: int) -> int | None:
        """Current clock of the SMs or of the memory."""
        value = ctypes.c_uint()
        code = self._library.nvmlDeviceGetClockInfo(self._device, which, ctypes.byref(value))
        return value.value if code == SUCCESS else None

    def application_clock_mhz(self, which: int) -> int | None:
        """The clock that applications are set to run at (`nvidia-smi -ac`)."""
        value = ctypes.c_uint()
        try:
            read = self._library.nvmlDeviceGetApplicationsClock
        except AttributeError:
            return None  # deprecated in CUDA 13: a later driver may lack it
        code = read(self._device, which, ctypes.byref(value))
        return value.value if code == SUCCESS else None

    def power_limit_watts(self) -> float | None:
        value = ctypes.c_uint()
        read = self._library.nvmlDeviceGetEnforcedPowerLimit
        code = read(self._device, ctypes.byref(value))
        return value.value / 1000 if code == SUCCESS else None
