"""Hardware of this machine: CPU topology and cgroup limits, memory, and NVIDIA cards through NVML. No torch.

Functions over sysfs take its root, so that any machine can be made up as a folder. An NVML reading is None
where the library or the card does not support it.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Any

SYSFS = Path("/sys")


@dataclass(frozen=True, slots=True)
class Cpu:
    """A hardware thread: its number, physical core, NUMA node, and capacity (1024: the fastest cores)."""

    number: int
    core: tuple[int, ...]
    node: int
    capacity: int = 1024


@dataclass(frozen=True, slots=True)
class Topology:
    """Hardware threads of this process, by number; `quota`: whole CPUs of the cgroup, None: no limit."""

    cpus: tuple[Cpu, ...]
    quota: int | None = None

    @property
    def nodes(self) -> tuple[int, ...]:
        """NUMA nodes, the one with the most physical cores first."""
        numbers = {cpu.node for cpu in self.cpus}
        return tuple(sorted(numbers, key=lambda node: (-len(self.on_node(node).cores), node)))

    @property
    def cores(self) -> tuple[Cpu, ...]:
        """One hardware thread of every physical core. Of unequal cores those at least half as fast as the
        fastest: a slower one would be waited for."""
        firsts = {cpu.core: cpu for cpu in reversed(self.cpus)}
        most = max((cpu.capacity for cpu in firsts.values()), default=0)
        fast = [cpu for cpu in firsts.values() if 2 * cpu.capacity >= most]
        return tuple(sorted(fast, key=lambda cpu: cpu.number))

    @property
    def num_usable(self) -> int:
        """Threads that can compute at once: physical cores, within the quota; at least 1."""
        return max(1, min(len(self.cores), self.quota or len(self.cores)))

    def on_node(self, node: int) -> Topology:
        return Topology(tuple(cpu for cpu in self.cpus if cpu.node == node), self.quota)


@dataclass(frozen=True, slots=True)
class Placement:
    """Threads of a step, hardware threads to bind to (none: where it may now), and their node (None: all)."""

    num_threads: int
    cpus: tuple[int, ...] = ()
    node: int | None = None


def read_topology(root: Path = SYSFS, allowed: Collection[int] | None = None) -> Topology:
    """Topology of the CPUs online and `allowed` (default: the affinity); `root`: where sysfs is mounted."""
    listed = parse_cpus(_text(root / "devices/system/cpu/online"))
    numbers = frozenset(listed) or affinity() or frozenset(range(os.cpu_count() or 1))
    may = affinity() if allowed is None else frozenset(allowed)
    effective = _text(root / "fs/cgroup/cpuset.cpus.effective")
    for limit in (may, frozenset(parse_cpus(effective)) if effective else None):
        if limit and limit & numbers:
            numbers &= limit
    folders = (root / "devices/system/node").glob("node[0-9]*")
    nodes = {
        cpu: int(folder.name.removeprefix("node"))
        for folder in folders
        for cpu in parse_cpus(_text(folder / "cpulist"))
    }
    cpus = (_cpu(root, number, nodes.get(number, 0)) for number in sorted(numbers))
    return Topology(tuple(cpus), cgroup_quota(root))


def place(topology: Topology, rank: int = 0, world_size: int = 1) -> Placement:
    """Where a shard computes: on one NUMA node, so that it reads its weights from the memory beside it.
    Shards take the nodes in turn, and those of a node share its cores. A process alone takes the largest
    node: half of its reads from another node's memory would be slower than its cores are more."""
    nodes = topology.nodes
    if len(nodes) < 2:
        return Placement(max(1, topology.num_usable // world_size))
    node = nodes[rank % len(nodes)]
    part = topology.on_node(node)
    sharing = len(range(rank % len(nodes), world_size, len(nodes)))
    quota = topology.quota or len(topology.cpus)
    most = max(1, min(len(part.cores) // sharing, quota // world_size))
    return Placement(most, tuple(cpu.number for cpu in part.cpus), node)


def affinity() -> frozenset[int]:
    """CPUs that the scheduler may run this process on; empty where the system does not say."""
    return frozenset(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else frozenset()


def cgroup_quota(root: Path = SYSFS) -> int | None:
    """Whole CPUs of the cgroup's quota (version 2 or 1), at least 1; None without one."""
    fields = _text(root / "fs/cgroup/cpu.max").split()
    if not fields:
        fields = [_text(root / f"fs/cgroup/cpu/cpu.cfs_{name}_us") for name in ("quota", "period")]
    if len(fields) != 2 or not all(word.isdigit() for word in fields) or int(fields[1]) == 0:
        return None  # "max", -1, or no cgroup
    return max(1, int(fields[0]) // int(fields[1]))


def cgroup_memory_bytes(root: Path = SYSFS) -> int | None:
    """Memory left in the cgroup's limit (version 2 or 1), droppable pages included; None without one."""
    folder = root / "fs/cgroup"
    limit, used = (_text(folder / f"memory.{name}") for name in ("max", "current"))
    if not limit:
        folder /= "memory"
        names = ("limit_in_bytes", "usage_in_bytes")
        limit, used = (_text(folder / f"memory.{name}") for name in names)
    if not limit.isdigit() or not used.isdigit():
        return None  # "max", or no cgroup
    counts = dict(line.split() for line in _text(folder / "memory.stat").splitlines())
    dropped = counts.get("total_inactive_file", counts.get("inactive_file", "0"))
    return max(0, int(limit) - int(used) + int(dropped))


def cache_bytes(root: Path = SYSFS) -> dict[str, int]:
    """Data caches that one of the CPUs reads through, by level, `L1` to `L3`, as the system says."""
    sizes: dict[str, int] = {}
    for folder in sorted(root.glob("devices/system/cpu/cpu0/cache/index[0-9]")):
        size = _text(folder / "size")
        if _text(folder / "type") in ("Data", "Unified") and size.removesuffix("K").isdigit():
            sizes[f"L{_text(folder / 'level')}"] = int(size.removesuffix("K")) * 1024
    return sizes


def parse_cpus(text: str) -> list[int]:
    numbers: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        if first.strip().isdigit():
            numbers += range(int(first), int(last or first) + 1)
    return numbers


def _cpu(root: Path, number: int, node: int) -> Cpu:
    folder = root / f"devices/system/cpu/cpu{number}"
    siblings = _text(folder / "topology/thread_siblings_list") or str(number)
    capacity = _text(folder / "cpu_capacity")
    return Cpu(
        number, tuple(parse_cpus(siblings)), node, int(capacity) if capacity.isdigit() else 1024
    )


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return ""


def usable_cores(root: Path = SYSFS) -> int:
    """Physical cores for this process, by affinity, cpuset, CPU quota and OMP_NUM_THREADS. `root`: sysfs."""
    cores = read_topology(root).num_usable
    return min(cores, thread_limit() or cores)


def thread_limit() -> int | None:
    limit = os.environ.get("OMP_NUM_THREADS", "").split(",")[0]
    return int(limit) if limit.isdigit() and int(limit) else None


def available_memory_bytes(root: Path = SYSFS) -> int:
    """Memory that can be allocated without swapping, within the cgroup's limit. `root`: where sysfs is."""
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    with suppress(OSError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                free = int(line.split()[1]) * 1024
    left = cgroup_memory_bytes(root)
    return free if left is None else min(free, left)


_M_ARENA_MAX = -8  # mallopt(3)


def use_one_arena() -> None:
    """Let threads allocate from one heap of glibc, unless `MALLOC_ARENA_MAX` is set; before they start.
    `malloc_trim` does not return what is free at the end of another arena's heap, up to 64 MiB."""
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is not None and "MALLOC_ARENA_MAX" not in os.environ:
        set_option(_M_ARENA_MAX, 1)


def give_back_freed_memory() -> None:
    """Return freed memory from the C allocator to the system (`malloc_trim`), if it can."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


LIBRARY = "libnvidia-ml.so.1"
SUCCESS = 0
TEMPERATURE_GPU = 0
CLOCK_SM, CLOCK_MEMORY = 1, 2  # these and the others: of `nvml.h`
VERSION_LENGTH, NAME_LENGTH = 80, 96


class _Memory(ctypes.Structure):
    """`nvmlMemory_t`."""

    _fields_ = [(name, ctypes.c_ulonglong) for name in ("total", "free", "used")]


def is_loopback(host: str) -> bool:
    """True if `host` is a loopback address, reachable from this machine only."""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


class Nvml:
    """One GPU of this machine, by its index; OSError names the missing `library`, or card."""

    def __init__(self, index: int = 0, library: Any = None) -> None:
        self._library = library or ctypes.CDLL(LIBRARY)
        self._device = ctypes.c_void_p()
        if self._library.nvmlInit_v2() != SUCCESS:
            raise OSError("NVML is installed but does not start (is the driver loaded?)")
        code = self._library.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(self._device))
        if code != SUCCESS:
            raise OSError(f"NVML knows no GPU {index} (code {code})")

    def count(self) -> int:
        value = ctypes.c_uint()
        code = self._library.nvmlDeviceGetCount_v2(ctypes.byref(value))
        return value.value if code == SUCCESS else 1

    def name(self) -> str | None:
        return self._text("nvmlDeviceGetName", NAME_LENGTH, self._device)

    def memory_bytes(self) -> int | None:
        """All memory of the card; None where it shares the machine's."""
        memory = _Memory()
        code = self._library.nvmlDeviceGetMemoryInfo(self._device, ctypes.byref(memory))
        return memory.total if code == SUCCESS else None

    def energy_joules(self) -> float | None:
        """Energy since the driver was loaded (Volta and later)."""
        millijoules = self._number("nvmlDeviceGetTotalEnergyConsumption", kind=ctypes.c_ulonglong)
        return None if millijoules is None else millijoules / 1000

    def driver(self) -> str | None:
        return self._text("nvmlSystemGetDriverVersion", VERSION_LENGTH)

    def temperature_celsius(self) -> int | None:
        return self._number("nvmlDeviceGetTemperature", TEMPERATURE_GPU)

    def clock_mhz(self, which: int) -> int | None:
        return self._number("nvmlDeviceGetClockInfo", which)

    def application_clock_mhz(self, which: int) -> int | None:
        """The clock that applications are set to run at (`nvidia-smi -ac`)."""
        try:
            return self._number("nvmlDeviceGetApplicationsClock", which)
        except AttributeError:
            return None  # deprecated in CUDA 13: a later driver may lack it

    def power_limit_watts(self) -> float | None:
        milliwatts = self._number("nvmlDeviceGetEnforcedPowerLimit")
        return None if milliwatts is None else milliwatts / 1000

    def _number(self, function: str, *which: int, kind: Any = ctypes.c_uint) -> int | None:
        value = kind()
        code = getattr(self._library, function)(self._device, *which, ctypes.byref(value))
        return value.value if code == SUCCESS else None

    def _text(self, function: str, length: int, *device: ctypes.c_void_p) -> str | None:
        text = ctypes.create_string_buffer(length)
        if getattr(self._library, function)(*device, text, length) != SUCCESS:
            return None
        return text.value.decode(errors="replace")
