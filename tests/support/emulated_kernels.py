"""C kernels of aarch64 under qemu-user: a library whose calls run in an emulated process.

The kernels are built by the product's own build, with a cross-compiler. A call's memory (the tensors and
ctypes objects that its struct points at) travels to the process and back, so that the tests of the x86 paths
run on it as they are. Debian packages: gcc-aarch64-linux-gnu, libc6-dev-arm64-cross and qemu-user.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import shutil
import subprocess
import tempfile
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from llmopt.base import build, processor
from llmopt.engine.kernels.common import graphs
from llmopt.engine.kernels.common.graphs import Launch

COMPILER, EMULATOR = "aarch64-linux-gnu-gcc", "qemu-aarch64"
LIBRARIES = "/usr/aarch64-linux-gnu"
SOURCE = Path(__file__).with_suffix(".c")
HWCAP = {"asimd": (0, 1 << 1), "asimddp": (0, 1 << 20), "i8mm": (1, 1 << 13), "bf16": (1, 1 << 14)}
"""Word of the auxiliary vector, AT_HWCAP or AT_HWCAP2, and bit of each feature (`asm/hwcap.h`)."""
PACKAGES = "gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user"


def missing() -> str | None:
    """What the emulation needs and this machine lacks, or None."""
    lacking = [program for program in (COMPILER, EMULATOR) if shutil.which(program) is None]
    if not Path(LIBRARIES, "lib/libc.so.6").exists():
        lacking.append(f"{LIBRARIES}/lib/libc.so.6")
    return f"no {', '.join(lacking)} here: apt-get install {PACKAGES}" if lacking else None


@dataclass(slots=True)
class Emulator:
    """The emulated process, with a CPU of every feature.

    Attributes:
        features: those that the process finds in its auxiliary vector.
    """

    process: subprocess.Popen[bytes]
    features: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        words = self._number(), self._number()
        self.features = frozenset(name for name, (word, bit) in HWCAP.items() if words[word] & bit)

    def call(self, library: Path, name: str, struct: ctypes.Structure | None) -> int:
        """Run a function on a struct and everything that it points at; changes come back."""
        memory = _Memory() if struct is not None else None
        if struct is not None and memory is not None:
            memory.add(struct)
        regions = memory.regions if memory else []
        pointers = memory.pointers if memory else []
        self._text(str(library))
        self._text(name)
        self._send(len(regions))
        for address, size in regions:
            self._send(address, size)
            self._pipe.write(ctypes.string_at(address, size))
        self._send(len(pointers), *(number for pointer in pointers for number in pointer))
        self._pipe.flush()
        result = self._number()
        for index, (address, size) in enumerate(regions):
            if self._number():
                content = bytearray(self._receive(size))
                for offset in memory.fields[index] if memory else []:
                    # an address of this process again, or null: the call's own are of the other
                    content[offset : offset + 8] = ctypes.string_at(address + offset, 8)
                ctypes.memmove(address, bytes(content), size)
        return result

    @property
    def _pipe(self) -> Any:
        return self.process.stdin

    def _send(self, *numbers: int) -> None:
        self._pipe.write(b"".join(number.to_bytes(8, "little") for number in numbers))

    def _text(self, text: str) -> None:
        self._send(len(text.encode()))
        self._pipe.write(text.encode())

    def _receive(self, size: int) -> bytes:
        assert self.process.stdout is not None
        content = self.process.stdout.read(size)
        assert len(content) == size, "the emulated process has ended: its last lines are on stderr"
        return content

    def _number(self) -> int:
        return int.from_bytes(self._receive(8), "little", signed=True)


@lru_cache(maxsize=1)
def emulator() -> Emulator:
    """The emulated process of this test run."""
    folder = Path(tempfile.mkdtemp(prefix="emulated-kernels-"))
    program = folder / "calls"
    sources = [str(SOURCE), str(build.HEADERS / "pool.c"), f"-I{build.HEADERS}"]
    compiler = [COMPILER, "-O1", "-pthread", *sources, "-o", str(program), "-ldl"]
    subprocess.run(compiler, check=True)
    command = [EMULATOR, "-L", LIBRARIES, "-cpu", "max", str(program)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    atexit.register(process.kill)
    return Emulator(process)


@dataclass(frozen=True, slots=True)
class EmulatedLibrary:
    """A library of the emulated process, with the attributes of a `ctypes.CDLL` that the kernels use."""

    file: Path

    def __getattr__(self, name: str) -> EmulatedFunction:
        return EmulatedFunction(self.file, name)


@dataclass(slots=True)
class EmulatedFunction:
    """A function of it, which takes a struct by reference, or nothing."""

    file: Path
    name: str
    argtypes: list[Any] = field(default_factory=list)
    restype: Any = None

    def __call__(self, *arguments: Any) -> int:
        if self.name == "llmopt_set_parallel":
            return 0  # the emulated process has threads of its own
        struct = arguments[0]._obj if arguments else None
        return emulator().call(self.file, self.name, struct)


class _Memory:
    """The memory that a struct reaches: regions, the pointers between them, and where pointers lie."""

    def __init__(self) -> None:
        self.regions: list[tuple[int, int]] = []
        self.fields: list[list[int]] = []
        self.pointers: list[tuple[int, int, int, int]] = []
        self._indices: dict[int, int] = {}
        self._objects = _live_objects()

    def add(self, thing: Any) -> int:
        """The number of an object's region, added with everything that it points at."""
        address, size = _extent(thing)
        if address in self._indices:
            return self._indices[address]
        index = self._indices[address] = len(self.regions)
        self.regions.append((address, size))
        is_struct = isinstance(thing, ctypes.Structure | ctypes.Array)
        self.fields.append(_pointers(type(thing)) if is_struct else [])
        for offset in self.fields[index]:
            target = ctypes.c_uint64.from_address(address + offset).value
            if target:
                owner = self._owner(target)
                start = _extent(owner)[0]
                self.pointers.append((index, offset, self.add(owner), target - start))
        return index

    def _owner(self, address: int) -> Any:
        owner = self._objects.owner(address)
        if owner is None:  # older than the last freeze
            gc.unfreeze()
            self._objects = _live_objects()
            owner = self._objects.owner(address)
            assert owner is not None, "a struct points at memory that no tensor holds"
            _held.append(owner)
            gc.freeze()
        return owner


_held: list[Any] = []
"""Objects that are older than the last freeze: tables that live as long as the process."""


@dataclass(slots=True)
class _LiveObjects:
    """Tensors and ctypes objects by address."""

    starts: list[int]
    things: list[Any]

    def owner(self, address: int) -> Any:
        """The object whose memory holds an address."""
        # Objects may lie within others: the nearest that begins before need not reach it.
        for index in range(bisect_right(self.starts, address) - 1, -1, -1):
            start, size = _extent(self.things[index])
            if address < start + size:
                return self.things[index]
        return None


def _live_objects() -> _LiveObjects:
    things: dict[int, Any] = {}
    for thing in [*gc.get_objects(), *_held]:
        if _is_memory(type(thing)) and (extent := _extent(thing))[1]:
            kept = things.get(extent[0])
            if kept is None or _extent(kept)[1] < extent[1]:
                things[extent[0]] = thing
    starts = sorted(things)
    return _LiveObjects(starts, [things[start] for start in starts])


@cache
def _is_memory(kind: type) -> bool:
    return issubclass(kind, torch.Tensor | ctypes.Structure | ctypes.Array)


def _extent(thing: Any) -> tuple[int, int]:
    """Address and bytes of a tensor's whole storage, or of a ctypes object."""
    if not isinstance(thing, torch.Tensor):
        return ctypes.addressof(thing), ctypes.sizeof(thing)
    if thing.device.type != "cpu" or thing.layout is not torch.strided:
        return 0, 0
    storage = thing.untyped_storage()
    return storage.data_ptr(), storage.nbytes()


@cache
def _pointers(kind: Any) -> list[int]:
    """Offsets of the pointers in a ctypes type."""
    if kind is ctypes.c_void_p:
        return [0]
    if ctypes.Array in kind.__mro__:
        size = ctypes.sizeof(kind._type_)
        return [i * size + at for i in range(kind._length_) for at in _pointers(kind._type_)]
    if ctypes.Structure in kind.__mro__:
        fields: list[tuple[str, Any]] = list(kind._fields_)
        return [getattr(kind, name).offset + at for name, part in fields for at in _pointers(part)]
    return []


def pretend_aarch64(patch: pytest.MonkeyPatch) -> None:
    """Build for the emulated processor, and run there, from now on."""
    features = emulator().features
    for module in (processor, build):
        patch.setattr(module, "processor_flags", lambda: features)
    patch.setattr(build, "open_library", EmulatedLibrary)
    patch.setattr(build, "parallel_start", lambda: build.ParallelStart(None, "the emulator's"))
    patch.setattr(graphs, "replay_launches", _replay_one_by_one)
    patch.setenv("CC", COMPILER)
    gc.collect()
    gc.freeze()


def _replay_one_by_one(launches: Sequence[Launch]) -> Callable[[], None]:
    """As `replay_launches`, whose table of function addresses would be of the other process."""
    held = list(launches)

    def run() -> None:
        assert not any(function(ctypes.byref(call)) for function, call in held)

    return run


def emulated_paths() -> Iterator[str]:
    """The instruction paths that the emulated processor supports."""
    return (path.name for path in processor.PATHS if path.needs <= emulator().features)
