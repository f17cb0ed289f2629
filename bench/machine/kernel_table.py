"""Machine report with what torch says: CPU features, devices, the kernel table, and verdicts on the GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ...engine.base.host import thread_limit
from ...engine.kernels.attention.dispatch import MASKS, PAGED_ATTENTION, AttentionKernelQuery
from ...engine.kernels.common.cpu_measurements import choose_threads
from ...engine.kernels.common.devices import refuses_fp8
from ...engine.kernels.common.dispatch import KernelChoice
from ...engine.kernels.common.verdicts import VARIABLE, Verdict, current_verdicts
from ...engine.kernels.elementwise.dispatch import (
    CLAMPED_SWIGLU_GATE,
    DELTA_RULE,
    GATE,
    GELU_GATE,
    NORM,
    RECURRENT_STEP,
    ROPE_AND_CACHE,
    RowKernelQuery,
)
from ...engine.kernels.linear.linear import LINEAR, LinearKernelQuery
from ...engine.kernels.linear.native_linear import has_bf16, native_linear
from ...engine.kernels.linear.quantized_linear import QUANTIZED_LINEAR, QuantizedLinearKernelQuery
from ...engine.kernels.moe.dispatch import EXPERTS, ExpertsKernelQuery
from ...engine.sampling.sampler import SAMPLING, SamplingKernelQuery
from ...quant.base.build import parallel_start
from ...quant.base.errors import BadInput
from ...quant.base.scheme import Activations, Scheme
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
    (E8pScheme(2), 8),
)
"""A scheme of each kind of quantized weight, and the bits of its activations."""


ROWS = (
    *((operation, 4096) for operation in (NORM, GATE, GELU_GATE, CLAMPED_SWIGLU_GATE)),
    (ROPE_AND_CACHE, 128),
    (RECURRENT_STEP, 8192),
    (DELTA_RULE, 128),
)
"""Operations of rows, and the length of a typical decoder's rows."""


def table(device: torch.device, dtype: torch.dtype) -> list[KernelChoice]:
    """The kernels chosen on `device` for a typical decoder in `dtype`."""
    choices = [
        *(
            PAGED_ATTENTION.explain(AttentionKernelQuery(device.type, dtype, 128, 128, mask))
            for mask in MASKS
        ),
        *(operation.explain(RowKernelQuery(device.type, dtype, size)) for operation, size in ROWS),
        SAMPLING.explain(SamplingKernelQuery(device.type)),
        LINEAR.explain(LinearKernelQuery(device.type, dtype, 4096, 4096)),
        *(
            EXPERTS.explain(ExpertsKernelQuery(device.type, dtype, is_block_fp8=is_block_fp8))
            for is_block_fp8 in (False, True)
        ),
    ]
    for scheme, input_bits in SCHEMES:
        kernel_query = QuantizedLinearKernelQuery(
            device.type, dtype, 4096, 4096, scheme, input_bits
        )
        choices.append(QUANTIZED_LINEAR.explain(kernel_query))
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
    """Forget every verdict on the current CUDA device, and try a typical decoder's kernels.

    Raises:
        BadInput: there is no CUDA device, or trials are switched off.
    """
    verdicts = current_verdicts()
    if verdicts is None:
        raise BadInput(
            f"no kernels are tried here: that needs a CUDA device, and {VARIABLE} not off"
        )
    verdicts.clear()
    measure(torch.device("cuda"), torch.bfloat16)


def stored() -> Iterator[tuple[str, str, Verdict]]:
    """The verdicts that are known: case, candidate, verdict."""
    verdicts = current_verdicts()
    for case, candidates in ({} if verdicts is None else verdicts.verdicts).items():
        for name, verdict in candidates.items():
            yield case, name, verdict


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
                "seconds": list(verdict.seconds),
                "dropped": verdict.dropped,
            }
            for case, name, verdict in stored()
        ],
    }


# CPU features that the kernels use, and the probes of torch for them.
FEATURES = {
    "bfloat16 products": "_is_avx512_bf16_supported",
    "8-bit dot products": "_is_vnni_supported",
    "matrix tiles": "_is_amx_tile_supported",
}


def examine() -> dict[str, Any]:
    """The report of `llmopt doctor --all`, as plain JSON values: the overview, and what torch says."""
    found = overview()
    gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    devices = [torch.device("cpu"), *([torch.device("cuda")] if gpus else [])]
    has_mps = torch.backends.mps.is_available()
    devices += [torch.device("mps")] if has_mps else []
    found["cpu"] |= {
        "threads": _threads(found["cpu"]["threads"]),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "features": [name for name, probe in FEATURES.items() if _has(probe)],
    }
    found["native"] |= _native()
    return found | {
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


def _threads(most: dict[str, Any]) -> dict[str, Any]:
    """The threads that the engine would take by default of the most that it may, with what they rest on."""
    if thread_limit() is not None:
        return most
    choice = choose_threads(most["chosen"])
    return most | {
        "chosen": choice.num_threads,
        "step_seconds": dict(choice.seconds),
        "reason": choice.reason,
    }


def _native() -> dict[str, Any]:
    """The C kernels that are compiled: what only their library, and torch, say."""
    build = native_linear()
    return {
        "path": build.path,
        "reason": build.reason,
        "bfloat16_products": has_bf16(),
        "threads": parallel_start().name,
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


def _has(probe: str) -> bool:
    """Calls a probe of torch; they are private and differ between its releases."""
    has = getattr(torch.cpu, probe, None)
    return bool(has and has())
