"""Linears of codes between Hadamard transforms: trellis (EXL3) in C and torch, E8P (QuIP#) in torch.

Transforms go to the activations, codes are decoded as they are read: the weight stays packed. Trellis: `y = H
(Qᵀ H (x ⊙ suh)) ⊙ svh`. E8P: `y = ((x ⊙ su) U Qᵀ Vᵀ) ⊙ sv`, with transforms of whole widths.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from ....base.build import beside
from ....quant.kinds.base.tensor import QuantizedTensor
from ....quant.kinds.e8p.kind import E8pTensor
from ....quant.kinds.trellis.kind import TrellisTensor
from ....quant.kinds.trellis.scheme import TRELLIS_CODEBOOKS
from ....quant.kinds.trellis.viterbi import TILE
from ..common.graphs import addresses, launch, struct

FLOAT_BITS = 32
"""`input_bits` of a GEMM that does not quantize its inputs."""

HadamardCall = struct(  # of `hadamard.h`
    "HadamardCall",
    "codes su sv x bias y",
    "rows stride in_features out_features bits codebook x_is_bf16 y_is_bf16 threads input_bits",
)

native_trellis = beside(__file__, "trellis.c")
native_trellis_integer = beside(__file__, "trellis_integer.c")


class NativeTrellisLinear:
    """C kernel in float32, or in integers, whose inputs are quantized after their transform.

    Inputs are bfloat16 or float32. With `input_bits` 16 they have 13 bits, and weights are the codebook's
    values to 2^-14; with 8 they have 8 bits, and weights are mul1's byte sums, without the float16 rounding
    of its values.
    """

    def __init__(self, weight: QuantizedTensor, input_bits: int = FLOAT_BITS) -> None:
        assert isinstance(weight, TrellisTensor)
        assert input_bits != 8 or weight.scheme.codebook == "mul1"
        in_floats, bits = input_bits == FLOAT_BITS, weight.scheme.bits
        # A copy: a tensor of a checkpoint may lie in its mapped file, which can change.
        whole = weight.trellis.clone(memory_format=torch.contiguous_format) if in_floats else None
        self._codes = in_spans(weight.trellis, bits) if whole is None else whole
        self._sides = weight.suh.float(), weight.svh.float()
        self._codebook = TRELLIS_CODEBOOKS.index(weight.scheme.codebook)
        self._bits, self._input_bits = bits, input_bits
        self._bias: torch.Tensor | None = None
        self.weight_bytes = weight.nbytes
        kernel = native_trellis() if in_floats else native_trellis_integer()
        self._run = kernel.function("llmopt_trellis" if in_floats else "llmopt_trellis_integer")

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._multiply(x, x.dtype)

    def in_float32(self, x: torch.Tensor) -> torch.Tensor:
        return self._multiply(x, torch.float32)

    def fuse_bias(self, bias: torch.Tensor) -> None:
        self._bias = bias.to(torch.float32).contiguous()
        self.weight_bytes += self._bias.nbytes

    def _multiply(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        if x.stride(1) != 1:
            x = x.contiguous()
        inputs, outputs = self._sides
        y = torch.empty(x.shape[0], len(outputs), dtype=dtype)
        are_bf16 = (kind is torch.bfloat16 for kind in (x.dtype, dtype))
        call = HadamardCall(
            *addresses(self._codes, *self._sides, x, self._bias, y),
            *(x.shape[0], x.stride(0), len(inputs), len(outputs), self._bits, self._codebook),
            *(*are_bf16, torch.get_num_threads(), self._input_bits),
        )
        if x.shape[0] and launch(self._run, call):
            raise MemoryError(f"no memory for {x.shape[0]} rows of {len(inputs)} inputs")
        return y


def in_spans(trellis: torch.Tensor, bits: int) -> torch.Tensor:
    """The words of tiles `[in / 16, out / 16, 16 * bits]` in the order of the integer GEMM. They go by 128
    outputs, 128 inputs, 32 outputs, 16 inputs, the word's number in its span of 16 weights, 16 outputs, and
    the span."""
    words = trellis.unflatten(2, (-1, 2)).flip(-1).flatten(2)  # halves of 32-bit words are swapped
    tiles = words.view(trellis.shape[0] // 8, 8, trellis.shape[1] // 8, 4, 2, TILE, bits)
    return tiles.permute(2, 0, 3, 1, 6, 4, 5).contiguous()


class TransformedLinear:
    """The reference: transform inputs, decode `TILE_ROWS` rows of codes at a time, transform outputs."""

    TILE_ROWS = 1024

    def __init__(self, weight: QuantizedTensor, dtype: torch.dtype) -> None:
        assert isinstance(weight, TrellisTensor | E8pTensor)
        self._weight, self._transforms = weight, weight.transforms
        self.weight_bytes = weight.nbytes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.in_float32(x).to(x.dtype)

    def in_float32(self, x: torch.Tensor) -> torch.Tensor:
        weight, sides = self._weight, self._transforms
        inputs = sides.turn_inputs.forward(x.float() * sides.inputs)
        tiles: list[torch.Tensor] = []
        for begin in range(0, weight.out_features, self.TILE_ROWS):
            rows = slice(begin, begin + self.TILE_ROWS)
            is_e8p = isinstance(weight, E8pTensor)  # whose codes alone divide into rows
            inner = weight.inner(rows) if is_e8p else weight.rows(rows).inner()
            tiles.append(functional.linear(inputs, inner))
        return sides.turn_outputs.backward(torch.cat(tiles, dim=-1)) * sides.outputs
