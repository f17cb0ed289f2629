"""Launches of the linears with trellis and E8P codes: transforms, fused GEMM, dequantization."""

from __future__ import annotations

from collections.abc import Callable

import torch
from llmopt.quant.kinds.base.incoherence import cosine_factor
from llmopt.quant.kinds.e8p.kind import E8pTensor
from llmopt.quant.kinds.e8p.scheme import E8pScheme
from llmopt.quant.kinds.trellis.kind import TrellisTensor
from llmopt.quant.kinds.trellis.scheme import TrellisScheme

from tools.triton_launches import BF16

OUT, BLOCKED, WHOLE = 512, 4096, 3584
"""Outputs, and inputs in blocks of 128, and in one transform of 128 × 28 channels."""
RESIDUALS = {3: torch.uint8, 4: torch.int16}


def products(weight: TrellisTensor | E8pTensor) -> None:
    """Launch the linear for a token, for as many as are decoded in registers, and for more."""
    from llmopt.engine.kernels.linear.triton_hadamard import TritonTransformedLinear

    linear = TritonTransformedLinear(weight, BF16)
    for tokens in (1, 64, 65):
        linear(torch.zeros(tokens, weight.in_features, dtype=BF16))


def trellis(bits: int, codebook: str) -> TrellisTensor:
    """A weight of zeros, which are a path as any other words are."""
    words = torch.zeros(BLOCKED // 16, OUT // 16, 16 * bits, dtype=torch.int16)
    sides = torch.zeros(BLOCKED, dtype=torch.float16), torch.zeros(OUT, dtype=torch.float16)
    return TrellisTensor(words, *sides, TrellisScheme(bits, codebook))


def e8p(bits: int) -> E8pTensor:
    """A weight of the first code."""
    codes = torch.zeros(OUT, WHOLE // 8, dtype=torch.int16)
    residual = codes.to(RESIDUALS[bits]) if bits in RESIDUALS else None
    sides = torch.zeros(WHOLE, dtype=torch.float16), torch.zeros(OUT, dtype=torch.float16)
    one = torch.ones(())
    return E8pTensor(codes, *sides, one, E8pScheme(bits), residual, cosine_factor(7))


TRELLISES = (("mul1", (2, 8)), ("mcg", (3,)))

CODE_LAUNCHES: dict[str, Callable[[], None]] = {
    **{
        f"{codebook} trellis of {bits} bits": lambda bits=bits, name=codebook: products(
            trellis(bits, name)
        )
        for codebook, widths in TRELLISES
        for bits in widths
    },
    **{f"E8P of {bits} bits": lambda bits=bits: products(e8p(bits)) for bits in (2, 3, 4)},
}
