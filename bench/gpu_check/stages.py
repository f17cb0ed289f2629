"""Stages of `llmopt doctor --gpu`: lists of cases, and the process that runs the cases of one stage."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ...base.errors import BadInput
from ...engine.kernels.common.devices import refuses_triton
from ...engine.kernels.common.verdicts import current_verdicts, driver_version
from ...quant.base.device import cuda_problem
from ...quant.base.scheme import Activations
from ...quant.kinds.fp8.scheme import FloatScheme
from ...quant.kinds.integer.scheme import IntScheme
from ...quant.methods.options import MethodOptions
from ...quant.methods.registry import METHODS
from ...quant.pipeline.pipeline import quantize
from ...quant.plan.request import QuantizeRequest
from ...recipes import MODELS
from ..machine.environment import describe
from ..machine.kernel_table import KernelFinding, self_tests
from .models import DECODE, PREFILL, TimedModel, planned_device, roofs
from .run import LOST, Case, Finding, run_cases

FREE = 0.8
"""The least free share of the card's memory: with less, others use it."""
LEAST = {"bandwidth": 0.85, "flops": 0.65}
"""Shares of the data sheet's peaks that a large copy and a large GEMM reach at least."""
COMPILE_BYTES = 60 << 30
"""Free memory of a card on which all models compile their kernels at once."""
PATIENCE = 600.0
"""A compiler is not hung: the stage's limit ends it."""
DENSE, MIXTURE, HYBRID = "llama-3.1-8b", "qwen3-30b-a3b", "qwen3.5-27b"
TIMED = {
    "llama-bf16": TimedModel(DENSE),
    "llama-int4": TimedModel(DENSE, IntScheme(4, 128, True)),
    "llama-fp8": TimedModel(DENSE, FloatScheme("channel", Activations("fp8"))),
    "mixture": TimedModel(MIXTURE, layers=4),
    "hybrid": TimedModel(HYBRID, layers=4),
}
"""Models of the stages that time one."""

SELF_TESTS = partial(self_tests, torch.device("cuda"), torch.bfloat16)
"""The self-test of every kernel that serves the card, by name."""


def environment(home: Path) -> Iterator[Case]:
    """Facts of the machine, and the card's roofs. BadInput: no CUDA device can serve, or it is in use."""
    other = "CUDA_VISIBLE_DEVICES names another card where there are several"
    if (problem := cuda_problem()) is not None:
        raise BadInput(f"{problem}: {other}")
    name, (free, whole) = torch.cuda.get_device_name(), torch.cuda.mem_get_info()
    if free < FREE * whole:
        raise BadInput(
            f"{name} is in use: {free / 2**30:.1f} of {whole / 2**30:.1f} GiB are free, and at least "
            f"{FREE:.0%} are needed: end what nvidia-smi shows; {other}"
        )
    cuda, reason = f"torch {torch.__version__} of CUDA {torch.version.cuda}", refuses_triton("cuda")
    facts = (
        Finding("GPU", seen=name, numbers={"environment": describe("cuda")}),
        Finding("software", seen=f"{driver_version()}, {cuda}"),
        Finding("room for checkpoints", seen=f"{shutil.disk_usage(home).free / 2**30:.0f} GiB"),
        Finding("Triton", "serves", reason or "serves", reason is None),
    )
    yield Case("facts", lambda: facts)
    yield Case("roofs", _roofs, 30)


def _roofs() -> Iterator[Finding]:
    """A large copy and a large GEMM, next to the data sheet."""
    device = planned_device()
    sheets = {"bandwidth": device.bandwidth, "flops": (device.peaks or {}).get("bf16")}
    for phase, rate in roofs().items():
        expected, met, sheet = "", None, sheets[phase]
        if device.source and sheet:
            expected = f"at least {LEAST[phase]:.0%} of the data sheet's {sheet / 1e12:.4g} T"
            met = rate >= LEAST[phase] * sheet
        numbers = {"phase": phase, "rate": rate}
        yield Finding(f"{phase} per second", expected, f"{rate / 1e12:.4g} T", met, numbers)


def kernels(home: Path) -> Iterator[Case]:
    """Compile the kernels of the models, which takes longest; then run each kernel next to its reference."""
    if (verdicts := current_verdicts()) is not None:  # those of a busy card are not the user's
        verdicts.path = home / f"verdicts-{os.getpid()}.json"
    if torch.cuda.mem_get_info()[0] > COMPILE_BYTES:
        for stage, model in TIMED.items():
            few = replace(model, layers=model.layers or 1)  # equal layers have equal kernels
            yield Case(f"kernels of {stage}", partial(few.compile, home / stage), PATIENCE)
    for name, test in SELF_TESTS():
        yield Case(name, partial(_tested, name, test), PATIENCE)


def _tested(name: str, test: Callable[[], KernelFinding]) -> Iterator[Finding]:
    result = test()
    seen = result.reason or f"an error of {result.error:.1e}"
    yield Finding(name, f"an error of at most {result.most:.0e}", seen, result.passed)


def timed(home: Path, model: TimedModel) -> Iterator[Case]:
    """Decode steps of a model with one and with many sequences, and prefill."""
    folder = home / "model"
    with closing(model.open(folder)) as engine:
        for phase, batch, context in (
            *(("decode", *case) for case in DECODE),
            ("prefill", 1, PREFILL),
        ):
            measure = partial(model.time, folder, engine, phase, batch, context)
            yield Case(f"{phase}, batch {batch}", measure)


def quantizers(home: Path, device: str = "cuda") -> Iterator[Case]:
    for method in METHODS:
        yield Case(method, partial(_quantized, home / method, method, device), 20)


def _quantized(output: Path, method: str, device: str) -> Iterator[Finding]:
    # A tenth of the method's 200 iterations shows what an iteration costs.
    options = MethodOptions(iters=20) if method == "autoround" else MethodOptions()
    sizes: dict[str, Any] = {"num_samples": 16, "seq_len": 128, "device": device}
    model, begin = MODELS / "stories3M", time.perf_counter()
    request = QuantizeRequest(model, output, method, options=options, **sizes)
    summary = quantize(request).manifest["summary"]
    error, seconds = summary["error"], time.perf_counter() - begin
    seen = f"an error of {error:.2e}, of RTN's {summary['rtn_error']:.2e}, in {seconds:.1f} s"
    yield Finding(f"{model.name} by {method}", "an error below 1", seen, 0 <= error < 1)


CASES: Mapping[str, Callable[[Path], Iterator[Case]]] = {
    "environment": environment,
    "kernels": kernels,
    **{stage: partial(timed, model=model) for stage, model in TIMED.items()},
    "quantizers": quantizers,
}


def main() -> None:
    stage, lines = sys.argv[1], Path(sys.argv[2])
    code = run_cases(
        CASES[stage](lines.parent), lines.with_name(stage), lines, torch.cuda.synchronize
    )
    if code == LOST:
        os._exit(code)  # closing an engine on a card that is lost may hang
    sys.exit(code)


if __name__ == "__main__":
    main()
