"""Linears with E8P codes: transforms go to the activations, codes are decoded as they are read.

`y = ((x ⊙ su) U Qᵀ Vᵀ) ⊙ sv`, with Hadamard transforms `U` and `V` of whole widths: the weight stays packed.
In C codes become bytes in registers or in the first-level cache, which multiply quantized inputs in integer
dot products; elsewhere torch decodes some rows at a time.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import torch
from torch.nn import functional

from ....quant.kinds.base.tensor import QuantizedTensor
from ....quant.kinds.e8p.codebook import (
    CPU,
    DIM,
    RESIDUAL_STEPS,
    SIGN_BITS,
    patterns,
    residual_points,
)
from ....quant.kinds.e8p.kind import E8pTensor
from ....quant.native.build import Native, native
from .native_hadamard import FLOAT_BITS, NativeHadamardLinear

UNIT = 0.25
"""Of which the coordinates of E8P are odd multiples."""
_OUTPUTS, _VECTORS, _GROUPS = 16, 4, 4  # of codes that are decoded at once; in a block of inputs
_SIGN_PLACES = (2, 1, 3, 0, 6, 5, 7)  # in the kernel, by channel
_SHIFT_PLACE = 4


class E8pLinear:
    """The reference: transform inputs, decode `TILE_ROWS` rows of codes at a time, transform outputs."""

    TILE_ROWS = 1024

    def __init__(self, weight: QuantizedTensor, dtype: torch.dtype) -> None:
        assert isinstance(weight, E8pTensor)
        self._weight, self._transforms = weight, weight.transforms
        self.weight_bytes = weight.nbytes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.in_float32(x).to(x.dtype)

    def in_float32(self, x: torch.Tensor) -> torch.Tensor:
        """The result before it is rounded to the inputs' dtype."""
        weight, sides = self._weight, self._transforms
        inputs = sides.turn_inputs.forward(x.float() * sides.inputs)
        tiles = [
            functional.linear(inputs, weight.inner(slice(begin, begin + self.TILE_ROWS)))
            for begin in range(0, weight.out_features, self.TILE_ROWS)
        ]
        return sides.turn_outputs.backward(torch.cat(tiles, dim=-1)) * sides.outputs


def native_e8p() -> Native:
    """The compiled GEMM, or the reason why there is none."""
    return native(Path(__file__).with_name("e8p.c"))


class NativeE8pLinear(NativeHadamardLinear):
    """The C kernel: in float32, or with inputs that are quantized to 8 or 16 bits behind their transform.

    A row of inputs has a scale for each 128 of them. Weights are exact.
    """

    def __init__(self, weight: QuantizedTensor, input_bits: int = FLOAT_BITS) -> None:
        assert isinstance(weight, E8pTensor)
        bits, left, right = weight.scheme.bits, weight.left, weight.right
        sides = (
            weight.su.float() * _scale(weight.in_features, left),
            weight.sv.float() * _scale(weight.out_features, right),
        )
        super().__init__(
            *(weight, packed_codes(weight), sides, native_e8p(), "llmopt_e8p"),
            tables=tables(),
            scales=(weight.scale.float() * UNIT).expand(weight.out_features).contiguous(),
            left=None if left is None else left.mT.contiguous(),
            right=None if right is None else right.clone(memory_format=torch.contiguous_format),
            left_order=1 if left is None else len(left),
            right_order=1 if right is None else len(right),
            residual=RESIDUAL_STEPS.get(bits, 0.0) * (2 if bits == 3 else 1),
            bits=bits,
            input_bits=input_bits,
        )


def _scale(width: int, factor: torch.Tensor | None) -> float:
    """What makes a transform of ones and minus ones orthonormal."""
    return (width if factor is None else width // len(factor)) ** -0.5


def packed_codes(weight: E8pTensor) -> torch.Tensor:
    """The codes in the order of `e8p.c`, uint8 `[out / 16, bytes]`, with any codes behind the last output.

    They go by 16 outputs, 128 inputs, E8P and residual, and 32 inputs: 64 patterns, their signs; or points.
    """
    levels = [_e8p_bytes(weight.codes)]
    if weight.residual is not None:
        three = weight.scheme.bits == 3
        levels.append(_vectors(weight.residual) if three else _e8p_bytes(weight.residual))
    groups = levels[0].shape[1]
    parts = [
        level[:, begin : begin + _GROUPS].flatten(1)
        for begin in range(0, groups, _GROUPS)
        for level in levels
    ]
    return torch.cat(parts, dim=1)


def _e8p_bytes(codes: torch.Tensor) -> torch.Tensor:
    """Patterns and signs, uint8 `[out / 16, in / 32, 128]`, of codes int16 `[out, in / 8]`."""
    signs = _sign_bytes()[codes.long() & 255]
    return torch.cat([_vectors((codes >> 8).to(torch.uint8)), _vectors(signs)], dim=2)


def _vectors(codes: torch.Tensor) -> torch.Tensor:
    """Bytes `[out, in / 8]` as they are decoded together: `[out / 16, in / 32, 64]`."""
    padded = functional.pad(codes, (0, 0, 0, -len(codes) % _OUTPUTS))
    return (
        padded.view(-1, _OUTPUTS, codes.shape[1] // _VECTORS, _VECTORS).transpose(1, 2).flatten(2)
    )


@lru_cache
def _sign_bytes() -> torch.Tensor:
    """The kernel's signs for those of a code, uint8 `[256]`: of seven channels, and of the shift."""
    stored = torch.arange(256, device=CPU)
    bits = torch.stack([stored >> bit & 1 for bit in range(8)])
    moved = bits.sum(dim=0) % 2 << _SHIFT_PLACE
    for bit, place in zip(SIGN_BITS, _SIGN_PLACES, strict=False):  # channel 7 has none
        moved |= bits[bit] << place
    return moved.to(torch.uint8)


@lru_cache
def tables() -> torch.Tensor:
    """The tables of `e8p_values.h`, uint8 `[6, 256]`: magnitudes of patterns, and points of the residual."""
    magnitudes = patterns().to(torch.int64)  # 0.5, 1.5 and 2.5 become 0, 1 and 2
    low, high = (
        sum(magnitudes[:, channel] << 2 * place for place, channel in enumerate(channels))
        for channels in ((0, 1, 4, 5), (2, 3, 6, 7))
    )
    points = (residual_points() * 2 + 4).to(torch.int64)
    half = DIM // 2
    both = [points[:, channel] | points[:, channel + half] << 4 for channel in range(half)]
    assert isinstance(low, torch.Tensor) and isinstance(high, torch.Tensor)
    return torch.stack([low, high, *both]).to(torch.uint8)
