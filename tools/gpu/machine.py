"""Needs of a first contact: torch with kernels for the card, Triton, memory, and the model that fits it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence

import torch
from llmopt.engine.kernels.common.devices import refuses_triton
from llmopt.engine.kernels.common.verdicts import driver_version
from llmopt.engine.kernels.elementwise.dispatch import NORM, RowKernelQuery
from llmopt.quant.families.config import model_shape
from llmopt.quant.families.shapes import ModelShape

from .expectation import Expectation, Facts, Finding
from .parts import room
from .sections import KV_BYTES, World
from .shapes import Scale, config_of

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


MODELS = ("llama-3.1-8b", "llama-3.2-3b", "llama-3.2-1b")
"""From the largest."""
WEIGHT_BYTES = 2
USED = 0.9
"""Share of the free memory, as the engine takes it (`--gpu-memory-utilization`)."""
BESIDE = 0.04
"""Share of the free memory for activations, logits and graphs."""

Case = tuple[int, int, int]
"""Batch, context and steps of decode."""


def largest(scale: Scale, cases: Sequence[Case], free_bytes: int) -> tuple[str, list[Case]] | None:
    """The largest model of which one sequence of each case fits, and the cases with batches that do.

    None: not even the smallest does.
    """
    for name in MODELS:
        shape = model_shape(config_of(name, scale))
        fitted = [_fitted(shape, case, free_bytes) for case in cases]
        if all(batch for batch, _, _ in fitted):
            return name, fitted
    return None


def _fitted(shape: ModelShape, case: Case, free_bytes: int) -> Case:
    """The case with its batch halved until it fits; a batch of 0: none does."""
    batch, context, steps = case
    room = (USED - BESIDE) * free_bytes - shape.num_parameters * WEIGHT_BYTES
    each = shape.kv_bytes(context + steps, KV_BYTES)
    while batch and batch * each > room:
        batch //= 2
    return batch, context, steps
