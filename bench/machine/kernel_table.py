"""Machine report with what torch says: CPU features, devices, the kernel table, verdicts, and the self-test.

The self-test holds each kernel that supports a device against its torch reference, on random inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ...base.build import parallel_start
from ...base.errors import BadInput
from ...base.processor import processor_flags, torch_capability
from ...engine.base.host import thread_limit
from ...engine.kernels.attention.dispatch import MASKS, PAGED_ATTENTION, AttentionKernelQuery
from ...engine.kernels.attention.paged_tensor import LARGEST_CODE
from ...engine.kernels.common.cpu_measurements import choose_threads
from ...engine.kernels.common.devices import refuses_fp8
from ...engine.kernels.common.dispatch import KernelChoice, Operation
from ...engine.kernels.common.verdicts import (
    TOLERANCE_QUANTIZED,
    VARIABLE,
    current_verdicts,
    relative_error,
    tolerance,
)
from ...engine.kernels.elementwise.dispatch import (
    CLAMPED_SWIGLU_GATE,
    DELTA_RULE,
    GATE,
    GELU_GATE,
    NORM,
    RECURRENT_STEP,
    ROPE_AND_CACHE,
    RowKernelQuery,
    rope_trial,
)
from ...engine.kernels.linear.linear import HALVES, LINEAR, LinearKernelQuery, keeps_halves
from ...engine.kernels.linear.native_linear import has_bf16, native_linear
from ...engine.kernels.linear.quantized_linear import (
    QUANTIZED_LINEAR,
    QuantizedLinearKernelQuery,
    linear_trial,
)
from ...engine.kernels.moe.dispatch import EXPERTS, ExpertsKernel, ExpertsKernelQuery
from ...engine.model.layers.mlp import GatedMlp
from ...engine.model.layers.projection import Projection
from ...engine.sampling.sampler import SAMPLING, SamplingKernelQuery
from ...quant.base.scheme import Activations, Scheme
from ...quant.kinds.base.kind import kind_of
from ...quant.kinds.codebook.scheme import CodebookScheme
from ...quant.kinds.e8p.scheme import E8pScheme
from ...quant.kinds.fp4.scheme import Fp4Scheme
from ...quant.kinds.fp8.scheme import FloatScheme
from ...quant.kinds.ggml.scheme import GgufScheme
from ...quant.kinds.integer.scheme import IntScheme
from ...quant.kinds.lookup.scheme import LookupScheme
from ...quant.kinds.trellis.scheme import TrellisScheme
from ...quant.kinds.vectorwise.scheme import VectorwiseScheme
from .overview import overview

SCHEMES: tuple[tuple[Scheme, int], ...] = (
    (IntScheme(4, 128, False), 16),
    (IntScheme(4, 128, True), 8),
    (IntScheme(8, -1, True), 16),
    (IntScheme(8, -1, True, Activations("int8")), 16),
    (VectorwiseScheme(), 16),
    (FloatScheme("channel"), 16),
    (FloatScheme("channel", Activations("fp8")), 16),
    (FloatScheme("block", Activations("fp8", "group128")), 16),
    (CodebookScheme("nf4"), 16),
    (Fp4Scheme("nvfp4"), 16),
    (Fp4Scheme("mxfp4"), 16),
    (GgufScheme("Q4_K"), 8),
    (LookupScheme(4), 16),
    (TrellisScheme(2), 16),
    (TrellisScheme(2), 8),
    (E8pScheme(2), 16),
)
"""A scheme of each kind of quantized weight, and the bits of its activations."""


ROWS = (
    *((operation, 4096) for operation in (NORM, GATE, GELU_GATE, CLAMPED_SWIGLU_GATE)),
    (ROPE_AND_CACHE, 128),
    (RECURRENT_STEP, 8192),
    (DELTA_RULE, 128),
)
"""Operations of rows, and the length of a typical decoder's rows."""


def _weight_dtypes(device: torch.device, dtype: torch.dtype) -> tuple[torch.dtype, ...]:
    """The dtypes of unquantized weights that a decoder in `dtype` may hold."""
    return (dtype, *HALVES) if keeps_halves(device, dtype) else (dtype,)


def table(device: torch.device, dtype: torch.dtype) -> list[KernelChoice]:
    """The kernels chosen on `device` for a typical decoder in `dtype`."""
    kind, choices = device.type, []
    for mask in MASKS:
        query = AttentionKernelQuery(kind, dtype, 128, 128, mask)
        choices.append(PAGED_ATTENTION.explain(query))
    for operation, size in ROWS:
        choices.append(operation.explain(RowKernelQuery(kind, dtype, size)))
    choices.append(SAMPLING.explain(SamplingKernelQuery(kind)))
    for stored in _weight_dtypes(device, dtype):
        choices.append(LINEAR.explain(LinearKernelQuery(kind, stored, 4096, 4096, dtype)))
    for is_block_fp8 in (False, True):
        query = ExpertsKernelQuery(kind, dtype, is_block_fp8=is_block_fp8)
        choices.append(EXPERTS.explain(query))
    for scheme, input_bits in SCHEMES:
        query = QuantizedLinearKernelQuery(kind, dtype, 4096, 4096, scheme, input_bits)
        choices.append(QUANTIZED_LINEAR.explain(query))
    return choices


def measure(device: torch.device, dtype: torch.dtype) -> None:
    """Try the kernels of a typical decoder, where they have not been; weights are tried as they load."""
    kind = device.type
    has_fp8 = refuses_fp8(kind) is None
    for stored in (dtype, torch.int8, *([torch.float8_e4m3fn] if has_fp8 else [])):
        PAGED_ATTENTION.select(AttentionKernelQuery(kind, dtype, 128, 128, stored=stored))
    for operation, size in ROWS:
        operation.select(RowKernelQuery(kind, dtype, size))
    SAMPLING.select(SamplingKernelQuery(kind))


def renew_verdicts() -> None:
    """Forget every verdict on the current CUDA device, and try a typical decoder's kernels. Raises BadInput:
    there is no CUDA device, or trials are switched off."""
    verdicts = current_verdicts()
    if verdicts is None:
        raise BadInput(
            f"no kernels are tried here: that needs a CUDA device, and {VARIABLE} not off"
        )
    verdicts.clear()
    measure(torch.device("cuda"), torch.bfloat16)


def report() -> dict[str, Any] | None:
    """The verdicts as plain JSON values; None: nothing is tried here."""
    verdicts = current_verdicts()
    if verdicts is None:
        return None
    return {
        "file": str(verdicts.path),
        "crossovers": dict(verdicts.crossovers),
        "kernels": [
            {
                "case": case,
                "kernel": name,
                "error": verdict.error,
                "seconds": [rounds.median for rounds in verdict.seconds],
                "quartiles": [[rounds.low, rounds.high] for rounds in verdict.seconds],
                "dropped": verdict.dropped,
            }
            for case, candidates in verdicts.verdicts.items()
            for name, verdict in candidates.items()
        ],
    }


FEATURES = {
    "bfloat16 products": "avx512_bf16",
    "8-bit dot products": "avx512_vnni",
    "matrix tiles": "amx_tile",
}
"""Features of x86 processors that oneDNN uses, and the flags that name them."""


def examine() -> dict[str, Any]:
    """The report of `llmopt doctor --all`, as plain JSON values: the overview, and torch's report."""
    facts = overview()
    gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    devices = [torch.device("cpu"), *([torch.device("cuda")] if gpus else [])]
    has_mps = torch.backends.mps.is_available()
    devices += [torch.device("mps")] if has_mps else []
    threads, build = facts["cpu"]["threads"], native_linear()
    if thread_limit() is None:
        # The engine's default number of threads, of the most that it may take.
        choice = choose_threads(threads["chosen"])
        threads |= {"chosen": choice.num_threads, "step_seconds": dict(choice.seconds)}
        threads["reason"] = choice.reason
    facts["cpu"] |= {
        "capability": torch_capability(),
        "features": [name for name, flag in FEATURES.items() if flag in processor_flags()],
    }
    facts["native"] |= {
        "path": build.path,
        "reason": build.reason,
        "bfloat16_products": has_bf16(),
        "threads": parallel_start().name,
    }
    return facts | {
        "cuda": [
            {
                "name": gpu.name,
                "memory_bytes": gpu.total_memory,
                "capability": f"{gpu.major}.{gpu.minor}",
            }
            for gpu in gpus
        ],
        "mps": {"memory_bytes": torch.mps.recommended_max_memory()} if has_mps else None,
        "kernels": [
            _kernels(device, dtype)
            for device in devices
            for dtype in (torch.bfloat16, torch.float32)
        ],
    }


def _kernels(device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    return {
        "device": device.type,
        "dtype": str(dtype).removeprefix("torch."),
        "operations": [
            {
                "operation": choice.operation,
                "situation": choice.kernel_query,
                "chosen": choice.chosen,
                "candidates": [
                    {"name": name, "refused": reason} for name, reason in choice.reasons
                ],
            }
            for choice in table(device, dtype)
        ],
    }


HEAD_DIM = 128


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of the checks: inputs (`row`, also the length of normed rows) and outputs of linears, and their
    batch sizes, for GEMV, a small GEMM, and the prefill path."""

    row: int = 512
    out: int = 384
    tokens: tuple[int, ...] = (1, 20, 100)


WHOLE = Sizes()
ONE_LAUNCH = Sizes(256, 128, (20,))
"""Sizes for launches that take seconds, as in Triton's interpreter."""


@dataclass(frozen=True, slots=True)
class KernelFinding:
    """The result of one kernel for a kernel query (device, dtype, shape, scheme). `error` is |result -
    reference| / |reference|, the maximum over its outputs, and `most` its tolerance; None for the `reason` of
    a failure."""

    operation: str
    situation: str
    kernel: str
    error: float | None
    most: float
    reason: str | None = None

    @property
    def passed(self) -> bool:
        return self.error is not None and self.error <= self.most  # NaN does not


@dataclass(frozen=True, slots=True)
class Check:
    """An operation, its kernel query, and a function that runs an implementation on fixed inputs."""

    operation: Operation[Any, Any]
    query: Any
    compute: Callable[[Any], Sequence[torch.Tensor]]
    most: float
    note: str = ""


def self_test(device: torch.device, dtype: torch.dtype) -> list[KernelFinding]:
    """Every kernel that supports `device` and `dtype`, against the last of its table, the torch reference."""
    return [test() for _, test in self_tests(device, dtype)]


def self_tests(
    device: torch.device, dtype: torch.dtype, sizes: Sizes = WHOLE
) -> Iterator[tuple[str, Callable[[], KernelFinding]]]:
    """Each test of `self_test`, named, and not run yet."""
    for check in checks(device, dtype, sizes):
        for kernel in check.operation.candidates[:-1]:
            if kernel.refuses(check.query) is None:
                name = f"{check.operation.name}, {check.query}{check.note}: {kernel.name}"
                yield name, partial(_tested, check, kernel)


@torch.inference_mode()
def _tested(check: Check, kernel: Any) -> KernelFinding:
    error = reason = None
    try:
        expected = check.compute(check.operation.candidates[-1].run)
        error = relative_error(check.compute(kernel.run), expected)
    except Exception as problem:
        # Any exception of a broken compiler or driver is a finding.
        reason = f"{type(problem).__name__}: {(str(problem).splitlines() or [''])[0]}"
    situation = f"{check.query}{check.note}"
    return KernelFinding(check.operation.name, situation, kernel.name, error, check.most, reason)


def checks(device: torch.device, dtype: torch.dtype, sizes: Sizes = WHOLE) -> Iterator[Check]:
    """A check per operation of the table, and per KV-cache dtype and weight scheme."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    kind, most = device.type, tolerance(dtype)
    for stored in (dtype, *LARGEST_CODE):
        if stored is torch.float8_e4m3fn and refuses_fp8(kind) is not None:
            continue  # the engine refuses such a cache as well
        note = "" if stored is dtype else f", {str(stored).removeprefix('torch.')} cache"
        allowed = most if stored is dtype else TOLERANCE_QUANTIZED
        attention = AttentionKernelQuery(kind, dtype, HEAD_DIM, HEAD_DIM, stored=stored)
        trial = PAGED_ATTENTION.trial(attention)
        assert trial is not None
        query = AttentionKernelQuery(kind, dtype, HEAD_DIM, HEAD_DIM)
        yield Check(PAGED_ATTENTION, query, trial.compute, allowed, note)
        heads = RowKernelQuery(kind, dtype, HEAD_DIM)
        yield Check(ROPE_AND_CACHE, heads, rope_trial(heads, stored).compute, allowed, note)
    rows = RowKernelQuery(kind, dtype, sizes.row)
    yield from (_of_trial(operation, rows) for operation in (NORM, GATE, GELU_GATE))
    # Far enough apart for the clamps to cut.
    x, added = 8 * random(33, sizes.row), 8 * random(33, sizes.row)
    yield Check(CLAMPED_SWIGLU_GATE, rows, lambda make: [make()(x, added)], most)
    heads = RowKernelQuery(kind, dtype, HEAD_DIM)
    yield from (_of_trial(operation, heads) for operation in (RECURRENT_STEP, DELTA_RULE))
    inputs = [random(count, sizes.row) for count in sizes.tokens]
    for stored in _weight_dtypes(device, dtype):
        matrix = random(sizes.out, sizes.row).to(stored)
        query = LinearKernelQuery(kind, stored, sizes.out, sizes.row, dtype)
        yield Check(LINEAR, query, partial(_each_product, matrix, inputs), most)
    yield _experts(random, kind, dtype, sizes, most)
    yield _of_trial(SAMPLING, SamplingKernelQuery(kind))
    for scheme, input_bits in SCHEMES:
        floats = random(sizes.out, sizes.row).float().cpu()
        weight: Any = kind_of(scheme).round(floats, torch.float32).to(device)
        trial = linear_trial(weight, dtype, input_bits, sizes.tokens)
        shape = sizes.out, sizes.row, scheme, input_bits
        query = QuantizedLinearKernelQuery(kind, dtype, *shape)
        yield Check(QUANTIZED_LINEAR, query, trial.compute, trial.tolerance)


def _each_product(matrix: torch.Tensor, inputs: Any, make: Any) -> list[torch.Tensor]:
    kernel = make(matrix)
    return [kernel(x) for x in inputs]


def _of_trial(operation: Operation[Any, Any], query: Any) -> Check:
    trial = operation.trial(query)
    assert trial is not None
    return Check(operation, query, trial.compute, trial.tolerance)


Random = Callable[..., torch.Tensor]


def _experts(random: Random, kind: str, dtype: torch.dtype, sizes: Sizes, most: float) -> Check:
    """Top-2 routing over four experts."""
    row, wide = sizes.row, sizes.out
    combine = GATE.select(RowKernelQuery(kind, dtype, wide)).run()

    def linear(out: int, inputs: int) -> Projection:
        return Projection([random(out, inputs) * inputs**-0.5], None, dtype)

    experts = [GatedMlp(linear(2 * wide, row), linear(row, wide), combine) for _ in range(4)]
    routings = []
    for count in sizes.tokens:
        chosen = random(count, 4).float().softmax(dim=1).topk(2, dim=1)
        routings.append((random(count, row), chosen.values, chosen.indices))

    def compute(make: Callable[..., ExpertsKernel]) -> list[torch.Tensor]:
        kernel = make(experts, range(4), 4, False)
        return [kernel(*routing) for routing in routings]

    return Check(EXPERTS, ExpertsKernelQuery(kind, dtype), compute, most)
