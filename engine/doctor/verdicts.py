"""The kernels' verdicts on this machine's GPU, for `llmopt doctor`: shown, and measured anew."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ...quant.base.errors import BadInput
from ..kernels.attention.dispatch import PAGED_ATTENTION, AttentionKernelQuery
from ..kernels.common.device_verdicts import current_verdicts
from ..kernels.common.runtime import refuses_fp8
from ..kernels.common.verdicts import VARIABLE, Verdict
from ..kernels.elementwise.dispatch import (
    CLAMPED_SWIGLU_GATE,
    GATE,
    GELU_GATE,
    NORM,
    ROPE_AND_CACHE,
    RowKernelQuery,
)
from ..sampling.kernels import SAMPLING, SamplingKernelQuery


def measure(device: torch.device, dtype: torch.dtype) -> None:
    """Try the kernels of a typical decoder, where they have not been; weights are tried as they load."""
    kind = device.type
    has_fp8 = refuses_fp8(kind) is None
    for stored in (dtype, torch.int8, *([torch.float8_e4m3fn] if has_fp8 else [])):
        PAGED_ATTENTION.select(AttentionKernelQuery(kind, dtype, 128, 128, stored=stored))
    for operation in (NORM, GATE, GELU_GATE, CLAMPED_SWIGLU_GATE):
        operation.select(RowKernelQuery(kind, dtype, 4096))
    ROPE_AND_CACHE.select(RowKernelQuery(kind, dtype, 128))
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
