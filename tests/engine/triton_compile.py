"""Triton's kernels compiled for a GPU that is not there: what its assembler says of each.

A launch compiles in place of running, for the shapes and types that it was given, with the assembler that
Triton brings.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

SHARED_BYTES = 227 * 1024
"""What a block may ask for on Hopper."""


@dataclass(frozen=True, slots=True)
class Compiled:
    """One kernel as the assembler left it.

    Attributes:
        stack: bytes of local memory a thread, which registers spill to.
        shared: bytes of shared memory a block.
        matrix: the matrix instructions in its machine code.
    """

    name: str
    registers: int
    stack: int
    shared: int
    matrix: frozenset[str]


@contextmanager
def compiling(capability: int = 90) -> Iterator[list[Compiled]]:
    """Within it, launches compile for that capability; the list says what came of each."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile, make_backend
    from triton.runtime import jit

    target = GPUTarget("cuda", capability, 32)
    backend = make_backend(target)
    found: list[Compiled] = []

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        kwargs |= {"debug": False, "instrumentation_mode": ""}
        binder = jit.create_function_from_signature(self.signature, self.params, backend)
        bound, specialization, options = binder(*args, **kwargs)
        packed = self._pack_args(backend, kwargs, bound, specialization, options)
        options, signature, constants, attributes = packed
        source = ASTSource(self, signature, constants, attributes)
        kernel = compile(source, target=target, options=options.__dict__)
        found.append(_read(kernel, Path(triton.__file__).parent / "backends/nvidia/bin"))

    original: Any = jit.JITFunction.run
    jit.JITFunction.run = run
    try:
        yield found
    finally:
        jit.JITFunction.run = original


def _read(kernel: Any, binaries: Path) -> Compiled:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()

        def dump(option: str) -> str:
            command = [binaries / "cuobjdump", option, file.name]
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout

        usage, code = dump("--dump-resource-usage"), dump("--dump-sass")
    registers, stack = (
        int(re.search(rf"{name}:(\d+)", usage).group(1)) for name in ("REG", "STACK")
    )
    matrix = frozenset(re.findall(r"\b([HQI]G?MMA)\b", code))
    return Compiled(kernel.metadata.name, registers, stack, kernel.metadata.shared, matrix)


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """A tensor that is never read."""
    return torch.empty(shape, dtype=dtype)
