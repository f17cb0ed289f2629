"""Linears with trellis-coded weights: transforms go to the activations, tiles are decoded as they are read.

`y = H (Qᵀ H (x ⊙ suh)) ⊙ svh`: the weight stays packed. In C tiles of 16 × 16 weights are decoded in
registers or in the first-level cache, to floats or to integers; elsewhere torch decodes some tiles of outputs
at a time.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch.nn import functional

from ....quant.kinds.base.incoherence import hadamard_blocks
from ....quant.kinds.base.tensor import QuantizedTensor
from ....quant.kinds.trellis.kind import TrellisTensor
from ....quant.kinds.trellis.scheme import TRELLIS_CODEBOOKS
from ....quant.kinds.trellis.viterbi import TILE
from ....quant.native.build import Native, native
from .native_hadamard import FLOAT_BITS, NativeHadamardLinear


class TransformedLinear:
    """The reference: transform inputs, dequantize `TILE_ROWS` outputs at a time, transform outputs."""

    TILE_ROWS = 1024

    def __init__(self, weight: QuantizedTensor, dtype: torch.dtype) -> None:
        assert isinstance(weight, TrellisTensor)
        self._weight = weight
        self.weight_bytes = weight.nbytes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.in_float32(x).to(x.dtype)

    def in_float32(self, x: torch.Tensor) -> torch.Tensor:
        """The result before it is rounded to the inputs' dtype."""
        weight = self._weight
        inputs = hadamard_blocks(x.float() * weight.suh.float())
        tiles = [
            functional.linear(inputs, weight.rows(slice(begin, begin + self.TILE_ROWS)).inner())
            for begin in range(0, weight.out_features, self.TILE_ROWS)
        ]
        return hadamard_blocks(torch.cat(tiles, dim=-1)) * weight.svh.float()


def native_trellis() -> Native:
    """The compiled GEMM in float32, or the reason why there is none."""
    return native(Path(__file__).with_name("trellis.c"))


def native_trellis_integer() -> Native:
    """The compiled GEMM of quantized inputs, or the reason why there is none."""
    return native(Path(__file__).with_name("trellis_integer.c"))


class NativeTrellisLinear(NativeHadamardLinear):
    """The C kernel in float32, or that of integers, whose inputs are quantized behind their transform.

    With `input_bits` 16 they have 13 bits, and weights are the codebook's values to 2^-14; with 8 they have
    8 bits, and weights are mul1's byte sums, without the float16 rounding of its values.
    """

    def __init__(self, weight: QuantizedTensor, input_bits: int = FLOAT_BITS) -> None:
        assert isinstance(weight, TrellisTensor)
        assert input_bits != 8 or weight.scheme.codebook == "mul1"
        in_floats, bits = input_bits == FLOAT_BITS, weight.scheme.bits
        super().__init__(
            weight,
            _in_memory(weight.trellis) if in_floats else in_spans(weight.trellis, bits),
            (weight.suh.float(), weight.svh.float()),
            native_trellis() if in_floats else native_trellis_integer(),
            "llmopt_trellis" if in_floats else "llmopt_trellis_integer",
            bits=bits,
            codebook=TRELLIS_CODEBOOKS.index(weight.scheme.codebook),
            input_bits=input_bits,
        )


def _in_memory(trellis: torch.Tensor) -> torch.Tensor:
    """A copy: a tensor of a checkpoint may lie in its mapped file, which can change."""
    return trellis.clone(memory_format=torch.contiguous_format)


def in_spans(trellis: torch.Tensor, bits: int) -> torch.Tensor:
    """The words of tiles `[in / 16, out / 16, 16 * bits]` in the order of the integer GEMM.

    They go by 128 outputs, 128 inputs, 32 outputs, 16 inputs, the word's number in its span of 16 weights,
    16 outputs, and the span.
    """
    words = trellis.unflatten(2, (-1, 2)).flip(-1).flatten(2)  # halves of 32-bit words are swapped
    tiles = words.view(trellis.shape[0] // 8, 8, trellis.shape[1] // 8, 4, 2, TILE, bits)
    return tiles.permute(2, 0, 3, 1, 6, 4, 5).contiguous()
