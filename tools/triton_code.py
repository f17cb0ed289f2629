"""Compile Triton's kernels without a GPU, and read what the compiler made of them.

A launch compiles in place of running, for the shapes and types that it was given, with the assembler that
Triton brings. Registers, local memory and instructions are the assembler's; buffers and waits of the software
pipeline are read from Triton's own code (TTGIR).
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, is_dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

CONSTANTS = (
    "KEY_DIM",
    "ROWS",
    "TILE",
    "IN_PARTS",
    "HAS_SCALES",
    "OUTPUTS",
    "PIECE",
    "KIND",
    "BITS",
    "PRECISION",
)
"""Compile-time constants that tell the variants of a kernel apart."""


_MATRIX = re.compile(r"\b([HQI]G?MMA|UTC\w*MMA)\b")
_LOCAL = re.compile(r"\b(?:LDL|STL)\b")
INSTRUCTION = r"^\s+/\*([0-9a-f]{4,5})\*/"


@dataclass(frozen=True, slots=True)
class Pipeline:
    """The software pipeline of the loops of a kernel that multiply matrices.

    Attributes:
        buffers: stages of each ring of tiles in shared memory, with the bytes of one: (stages, bytes).
        waits: copies that may be unfinished at each wait in a loop; 0 waits for all of them.
        round_trips: stores of registers to shared memory within a loop, to load them in another layout.
        plain_loads: loads of tensors within a loop that are no asynchronous copies.
        exposed_loads: those of them that something in the same turn of the loop waits for.
        unmasked: the loops that choose no element of a matrix: whose turns need no mask.
    """

    buffers: tuple[tuple[int, int], ...]
    waits: tuple[int, ...]
    round_trips: int
    plain_loads: int
    exposed_loads: int
    unmasked: int = 0

    @property
    def depth(self) -> int:
        """Stages of the largest ring of tiles; 0: nothing is pipelined."""
        return max(self.buffers, key=lambda ring: ring[1], default=(0, 0))[0]


@dataclass(frozen=True, slots=True)
class Compiled:
    """One kernel as the compiler left it.

    Attributes:
        variant: the values of `CONSTANTS` that it has.
        grid: programs of the launch.
        stack: bytes of local memory a thread, which registers spill to.
        spills: loads and stores of local memory in the machine code; `loop_spills` those in its loops.
        shared: bytes of shared memory a program.
        tensor_memory: columns of tensor memory a program (compute capability 10.0).
        matrix: the matrix instructions in its machine code.
        instructions: machine instructions; `loop_instructions` those of its largest innermost loop, `loops`
            those of each that multiplies matrices.
        turns: of its largest loop, where the launch says how many.
        error: why it could not be compiled.
        dependent: whether it waits for its predecessor in its code (PTX `griddepcontrol`).
    """

    name: str
    variant: dict[str, Any]
    grid: tuple[int, ...] = ()
    warps: int = 0
    registers: int = 0
    stack: int = 0
    spills: int = 0
    loop_spills: int = 0
    shared: int = 0
    tensor_memory: int = 0
    matrix: tuple[str, ...] = ()
    instructions: int = 0
    loop_instructions: int = 0
    loops: tuple[int, ...] = ()
    turns: int = 1
    pipeline: Pipeline = Pipeline((), (), 0, 0, 0)
    error: str = ""
    dependent: bool = False

    def issue_seconds(self, turns: int, multiprocessors: int = 132, hertz: float = 1.83e9) -> float:
        """Time in which an H100's schedulers, four a multiprocessor, issue the launch's instructions, its
        largest loop run so many times: a lower bound, which memory and latency only add to."""
        each = self.instructions + (turns - 1) * self.loop_instructions
        programs = -(-prod(self.grid) // multiprocessors)
        return programs * each * self.warps / 4 / hertz


@contextmanager
def compiling(
    capability: int = 90, keep: Path | None = None, *, every: bool = False
) -> Iterator[list[Compiled]]:
    """Context in which launches compile for that capability; yields the list of compiled kernels.

    On the pretended card they are launched there too.

    Args:
        keep: a folder for the TTGIR of each.
        every: list every launch, not a kernel once.
    """
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile, make_backend
    from triton.runtime import jit

    target = GPUTarget("cuda", capability, 32)
    backend = make_backend(target)
    kernels: list[Compiled] = []
    seen: dict[tuple[str, ...], Compiled] = {}
    original: Any = jit.JITFunction.run
    is_pretended = original.__module__ != jit.__name__

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        if is_pretended:
            original(self, *args, grid=grid, warmup=warmup, **kwargs)
        kwargs |= {"debug": False, "instrumentation_mode": ""}
        binder = jit.create_function_from_signature(self.signature, self.params, backend)
        bound, specialization, options = binder(*args, **kwargs)
        key = (self.fn.__name__, str(specialization), str(options))
        turns = _turns(bound)
        if key in seen:
            if every:
                kernels.append(replace(seen[key], grid=tuple(grid), turns=turns))
            return
        packed = self._pack_args(backend, kwargs, bound, specialization, options)
        options, signature, constants, attributes = packed
        source = ASTSource(self, signature, constants, attributes)
        variant = _variant(bound)
        try:
            kernel = compile(source, target=target, options=options.__dict__)
        except Exception as error:  # whatever the compiler raises is this kernel's verdict
            said = str(error).strip().splitlines() or [""]
            reason = f"{type(error).__name__}: {said[-1]}"
            seen[key] = Compiled(self.fn.__name__, variant, error=reason)
            kernels.append(seen[key])
            return
        seen[key] = replace(_read(kernel, variant, tuple(grid)), turns=turns)
        kernels.append(seen[key])
        if keep is not None:
            keep.mkdir(parents=True, exist_ok=True)
            text = kernel.asm["ttgir"]
            (keep / f"{len(kernels):02}-{self.fn.__name__}.ttgir").write_text(text)

    jit.JITFunction.run = run
    try:
        yield kernels
    finally:
        jit.JITFunction.run = original


def _variant(bound: dict[str, Any]) -> dict[str, Any]:
    """The values of `CONSTANTS`: arguments, or fields of arguments that hold several."""
    found = {}
    several = [each for each in bound.values() if isinstance(each, tuple) or is_dataclass(each)]
    for name in CONSTANTS:
        holders = (each for each in several if hasattr(each, name.lower()))
        if name in bound:
            found[name] = bound[name]
        elif (holder := next(holders, None)) is not None:
            found[name] = getattr(holder, name.lower())
    return found


def _turns(bound: dict[str, Any]) -> int:
    """Turns of the loop of a launch: tiles of a part of split keys, runs of a split of a GEMM."""
    if bound.get("IN_PARTS"):
        return bound["SEES"].part_tiles if "SEES" in bound else bound["PART_TILES"]
    return bound.get("runs_per_split", 1)


def _read(kernel: Any, variant: dict[str, Any], grid: tuple[int, ...]) -> Compiled:
    import triton

    binaries = Path(triton.__file__).parent / "backends/nvidia/bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()

        def dump(option: str) -> str:
            command = [binaries / "cuobjdump", option, file.name]
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout

        usage, code = dump("--dump-resource-usage"), dump("--dump-sass")
    loops = _loops(code)
    registers, stack = (int(re.findall(rf"{name}:(\d+)", usage)[0]) for name in ("REG", "STACK"))
    return Compiled(
        name=kernel.metadata.name,
        variant=variant,
        grid=grid,
        warps=kernel.metadata.num_warps,
        registers=registers,
        stack=stack,
        spills=len(_LOCAL.findall(code)),
        loop_spills=sum(bool(_LOCAL.search(line)) for loop in loops for line in loop),
        shared=kernel.metadata.shared,
        tensor_memory=kernel.metadata.tmem_size or 0,
        matrix=tuple(sorted(set(_MATRIX.findall(code)))),
        instructions=len(re.findall(INSTRUCTION, code, re.MULTILINE)),
        loop_instructions=max(map(len, loops), default=0),
        loops=tuple(sorted(len(loop) for loop in loops if any(map(_MATRIX.search, loop)))),
        pipeline=read_pipeline(kernel.asm["ttgir"]),
        dependent="griddepcontrol.wait" in kernel.asm["ptx"],
    )


def _loops(code: str) -> list[list[str]]:
    """Instructions of each innermost loop of machine code: from a branch back to its target."""
    branches = re.findall(INSTRUCTION + r".*\bBRA\b.*?0x([0-9a-f]+)", code, re.MULTILINE)
    loops = [(int(to, 16), int(at, 16)) for at, to in branches if int(to, 16) < int(at, 16)]
    inner = [
        (begin, end)
        for begin, end in loops
        if not any(begin <= other and last < end for other, last in loops)
    ]
    lines = [
        (int(at, 16), line) for line in code.splitlines() for at in re.findall(INSTRUCTION, line)
    ]
    return [[line for at, line in lines if begin <= at <= end] for begin, end in inner]


def read_pipeline(ttgir: str) -> Pipeline:
    """The software pipeline of a kernel, from its TTGIR."""
    rings: list[tuple[int, int]] = []
    waits: list[int] = []
    loads: list[str] = []
    round_trips = 0
    loops = _multiplying(ttgir)
    inner = [line for loop in loops for line in loop]
    unmasked = sum(not any(re.search(_MASK, line) for line in loop) for loop in loops)
    for line in ttgir.splitlines():
        # A ring of tiles: an empty allocation with one more dimension than the tile.
        pattern = r"local_alloc : \(\) -> !ttg\.memdesc<(\d+)x([\dx]+)x([a-z]+)(\d+)"
        if ring := re.search(pattern, line):
            tile = prod(int(size) for size in ring[2].split("x"))
            rings.append((int(ring[1]), tile * int(ring[4]) // 8))
    for line in inner:
        if wait := re.search(r"async_wait %.*num = (\d+)", line):
            waits.append(int(wait[1]))
        elif "local_alloc %" in line:
            round_trips += 1
        elif load := re.search(r"(%\w+) = tt\.load .*tensor<", line):
            loads.append(load[1])
    exposed = sum(_is_used(name, inner) for name in loads)
    return Pipeline(tuple(sorted(rings)), tuple(waits), round_trips, len(loads), exposed, unmasked)


_MASK = r"arith\.select .*tensor<\d+x\d+xf32"

_CASTS = r"arith\.ext|arith\.sitofp|arith\.uitofp|convert_layout|expand_dims|tt\.broadcast"


def _is_used(name: str, lines: list[str]) -> bool:
    """Whether something in a loop needs a value, casts and the next turn aside."""
    for line in lines:
        given, _, operation = line.partition(" = ")
        if not operation:
            given, operation = "", line
        if not re.search(re.escape(name) + r"\b", operation) or "scf.yield" in operation:
            continue
        if not re.search(_CASTS, operation) or _is_used(given.strip(), lines):
            return True
    return False


def _multiplying(ttgir: str) -> list[list[str]]:
    """The lines of each innermost loop that multiplies matrices."""
    lines = ttgir.splitlines()
    starts: list[tuple[int, int]] = []
    spans: list[tuple[int, int]] = []
    for number, line in enumerate(lines):
        indent = len(line) - len(line.lstrip())
        if starts and starts[-1][1] == indent and line.lstrip().startswith("}"):
            spans.append((starts.pop()[0], number))
        if re.search(r"\b(scf\.for|scf\.while)\b", line):
            starts.append((number, indent))
    inner: list[list[str]] = []
    for begin, end in spans:
        body = lines[begin + 1 : end]
        is_innermost = not any(begin < other and last < end for other, last in spans)
        if is_innermost and any(re.search(r"dot |mma", line) for line in body):
            inner.append(body)
    return inner
