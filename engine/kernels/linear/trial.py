"""Trial of the kernels for a quantized weight: on the weight itself, with few tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ....quant.kinds.base.tensor import QuantizedTensor
from ..common.verdicts import Trial, tolerance
from .linear import LinearKernel

COMPARED_TOKENS = (1, 20, 100)
"""A GEMV, a small GEMM, and the prefill path."""
TIMED_TOKENS = (1, 16, 64)

Prepare = Callable[[QuantizedTensor, torch.dtype], LinearKernel]


def linear_trial(weight: QuantizedTensor, dtype: torch.dtype, input_bits: int) -> Trial[Prepare]:
    """The GEMM of one weight."""
    device = next(iter(weight.parts().values())).device
    generator = torch.Generator().manual_seed(0)

    def random(count: int) -> torch.Tensor:
        return torch.randn(count, weight.in_features, generator=generator).to(device, dtype)

    compared, timed = ([random(n) for n in counts] for counts in (COMPARED_TOKENS, TIMED_TOKENS))

    def compute(prepare: Prepare) -> list[torch.Tensor]:
        kernel = prepare(weight, dtype)
        return [kernel(x) for x in compared]

    def calls(prepare: Prepare) -> Sequence[Callable[[], object]]:
        kernel = prepare(weight, dtype)
        return [lambda x=x: kernel(x) for x in timed]

    quantizes = input_bits == 8 or weight.scheme.activations is not None
    return Trial(compute, tolerance(dtype, quantizes_inputs=quantizes), calls)
