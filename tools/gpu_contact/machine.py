"""What a first contact needs of the machine: a torch with kernels for the card, Triton, memory, room."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import torch
from llmopt.engine.kernels.common.devices import refuses_triton
from llmopt.engine.kernels.common.verdicts import driver_version
from llmopt.engine.kernels.elementwise.dispatch import NORM, RowKernelQuery

from ..gpu_figures.sections import World
from ..gpu_parts import room
from .expectation import Expectation, Facts, Finding

OLDEST = (8, 0)
"""The oldest compute capability that the kernels are compiled for in `make gpu-matrix`."""
FREE = 0.8
"""Of the card's memory: with less, others use it."""


def machine(world: World) -> Iterator[Finding]:
    """Whether torch and Triton reach the card, and what of its memory is free."""
    device = torch.device(world.device)
    rows = [("torch", torch.__version__), ("CUDA of torch", str(torch.version.cuda))]
    rows += [("driver", driver_version()), ("C compiler", shutil.which("cc") or "none")]
    rows += [("room for checkpoints", f"{room(world.home) / 2**30:.0f} GiB in {world.home.parent}")]
    if device.type == "cuda":
        yield from _card(device)
    yield _torch(device)
    yield from _triton(device)
    yield Facts("machine", ("what", "value"), rows)


def _card(device: torch.device) -> Iterator[Finding]:
    major, minor = torch.cuda.get_device_capability(device)
    yield Expectation(
        "compute capability",
        f"{OLDEST[0]}.{OLDEST[1]} or more",
        f"{major}.{minor}",
        (major, minor) >= OLDEST,
    )
    free, whole = torch.cuda.mem_get_info(device)
    yield Expectation(
        "free memory",
        f"at least {FREE:.0%}",
        f"{free / 2**30:.1f} of {whole / 2**30:.1f} GiB",
        free >= FREE * whole,
    )


def _torch(device: torch.device) -> Expectation:
    """An operation of torch's own: it has no kernels for cards that it was not built for."""
    try:
        seen = str(float(torch.ones(8, device=device).sum()))
    except Exception as error:
        seen = _told(error)
    return Expectation("torch adds eight ones", "8.0", seen, seen == "8.0")


def _triton(device: torch.device) -> Iterator[Finding]:
    """A Triton kernel: it needs Triton, a C compiler, Python's headers, and a driver that takes its code."""
    what, wanted = "a Triton kernel", "compiles and runs"
    reason = refuses_triton(device.type)
    if reason is not None:
        yield Expectation(what, wanted, reason, False)
        return
    query = RowKernelQuery(device.type, torch.bfloat16, 64)
    kernel = next(each for each in NORM.candidates if each.name == "triton")
    x = torch.ones(2, 64, dtype=torch.bfloat16, device=device)
    try:
        if (refused := kernel.refuses(query)) is not None:
            yield Expectation(what, wanted, refused, False)
            return
        kernel.run(x[0], 1e-5)(x, x)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    except Exception as error:
        yield Expectation(what, wanted, _told(error), False)
        return
    yield Expectation(what, wanted, "it does", True)


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
