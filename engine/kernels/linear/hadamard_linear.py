"""Linears whose codes lie between Hadamard transforms, in C and in torch: trellis codes (EXL3), E8P (QuIP#).

Transforms go to the activations, codes are decoded as they are read: the weight stays packed.
Trellis: `y = H (Qᵀ H (x ⊙ suh)) ⊙ svh`. In C tiles of 16 × 16 weights are decoded in registers or in the
first-level cache, to floats or to integers. E8P: `y = ((x ⊙ su) U Qᵀ Vᵀ) ⊙ sv`, with transforms `U` and `V`
of whole widths; in C codes become bytes, which multiply quantized inputs in integer dot products. Elsewhere
torch decodes some rows or tiles of outputs at a time.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch.nn import functional

from ....quant.base.build import Native, beside, fields
from ....quant.base.scheme import Scheme
from ....quant.kinds.base.tensor import QuantizedTensor
from ....quant.kinds.e8p.kind import (
    CPU,
    DIM,
    RESIDUAL_STEPS,
    SIGN_BITS,
    E8pTensor,
    patterns,
    residual_points,
)
from ....quant.kinds.trellis.kind import TrellisTensor
from ....quant.kinds.trellis.scheme import TRELLIS_CODEBOOKS
from ....quant.kinds.trellis.viterbi import TILE
from ..common.devices import CPU_DTYPES
from ..common.graphs import launch

FLOAT_BITS = 32
"""`input_bits` of a GEMM that does not quantize its inputs."""


class HadamardCall(ctypes.Structure):
    """`HadamardCall` of `hadamard.h`."""

    _fields_ = [
        *fields(
            "codes su sv x bias y tables scales left right",
            "left_order right_order rows stride in_features out_features "
            "bits codebook x_is_bf16 y_is_bf16 threads input_bits",
        ),
        ("residual", ctypes.c_float),
    ]


class NativeHadamardLinear:
    """A GEMM in C, with inputs in bfloat16 or float32.

    Args:
        codes: packed for the kernel.
        sides: float32 `su` `[in]` and `sv` `[out]`, which the kernel multiplies with.
        function: of the library.
        more: fields of the call that a kernel needs beside these; tensors are given by their address.
    """

    def __init__(
        self,
        weight: QuantizedTensor,
        codes: torch.Tensor,
        sides: tuple[torch.Tensor, torch.Tensor],
        kernel: Native,
        function: str,
        **more: torch.Tensor | float | None,
    ) -> None:
        self._sides = sides
        self._held = {**more, "codes": codes, "su": sides[0], "sv": sides[1]}
        self._fields = {name: _argument(value) for name, value in self._held.items()}
        self._bias: torch.Tensor | None = None
        self.weight_bytes = weight.nbytes
        self._run = kernel.function(function)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._multiply(x, x.dtype)

    def in_float32(self, x: torch.Tensor) -> torch.Tensor:
        """The result before it is rounded to the inputs' dtype."""
        return self._multiply(x, torch.float32)

    def fuse_bias(self, bias: torch.Tensor) -> None:
        """Add `bias [out]` to every row, in float32, before the cast to the output dtype."""
        self._bias = bias.to(torch.float32).contiguous()
        self.weight_bytes += self._bias.nbytes

    def _multiply(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        if x.stride(1) != 1:
            x = x.contiguous()
        inputs, outputs = self._sides
        y = torch.empty(x.shape[0], len(outputs), dtype=dtype)
        call = HadamardCall(
            **self._fields,
            x=x.data_ptr(),
            bias=_argument(self._bias),
            y=y.data_ptr(),
            rows=x.shape[0],
            stride=x.stride(0),
            in_features=len(inputs),
            out_features=len(outputs),
            x_is_bf16=x.dtype is torch.bfloat16,
            y_is_bf16=dtype is torch.bfloat16,
            threads=torch.get_num_threads(),
        )
        if x.shape[0] and launch(self._run, call):
            raise MemoryError(f"no memory for {x.shape[0]} rows of {len(inputs)} inputs")
        return y


def _argument(value: torch.Tensor | float | None) -> float | None:
    return value.data_ptr() if isinstance(value, torch.Tensor) else value


UNIT = 0.25
"""The coordinates of E8P are odd multiples of this."""
_OUTPUTS, _VECTORS, _GROUPS = 16, 4, 4  # of codes that are decoded at once; in a block of inputs
_SIGN_PLACES = (2, 1, 3, 0, 6, 5, 7)  # in the kernel, by channel
_SHIFT_PLACE = 4


native_e8p = beside(__file__, "e8p.c")
"""The compiled GEMM, or the reason why there is none."""


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
    """The factor that makes a transform of ones and minus ones orthonormal."""
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
        """The result before it is rounded to the inputs' dtype."""
        weight, sides = self._weight, self._transforms
        inputs = sides.turn_inputs.forward(x.float() * sides.inputs)
        tiles: list[torch.Tensor] = []
        for begin in range(0, weight.out_features, self.TILE_ROWS):
            rows = slice(begin, begin + self.TILE_ROWS)
            is_e8p = isinstance(weight, E8pTensor)  # whose codes alone divide into rows
            inner = weight.inner(rows) if is_e8p else weight.rows(rows).inner()
            tiles.append(functional.linear(inputs, inner))
        return sides.turn_outputs.backward(torch.cat(tiles, dim=-1)) * sides.outputs


native_trellis = beside(__file__, "trellis.c")
"""The compiled GEMM in float32, or the reason why there is none."""


native_trellis_integer = beside(__file__, "trellis_integer.c")
"""The compiled GEMM of quantized inputs, or the reason why there is none."""


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


@dataclass(frozen=True, slots=True)
class HadamardKernels:
    """The C kernels of one kind of codes.

    Attributes:
        kind_name: of the weights' scheme.
        codes: what they are called.
        native: makes the linear with inputs quantized to 8 or 16 bits, or in floats (`FLOAT_BITS`).
        in_floats, in_integers: the compiled GEMMs of float32 and of quantized inputs.
        codebook: the only one with 8-bit inputs, where there are several.
    """

    kind_name: str
    codes: str
    native: Callable[[QuantizedTensor, int], NativeHadamardLinear]
    in_floats: Callable[[], Native]
    in_integers: Callable[[], Native]
    codebook: str | None = None

    def refuses(
        self, input_bits: int, dtype: torch.dtype, scheme: Scheme, wants_8: bool
    ) -> str | None:
        """The reason why the kernel with inputs of so many bits does not serve a scheme of the kind, or None.

        Args:
            wants_8: activations may be quantized to 8 bits.
        """
        if dtype not in CPU_DTYPES:
            return f"it takes bfloat16 and float32, not {dtype}"
        if input_bits == FLOAT_BITS:
            return self.in_floats().reason
        if input_bits == 8 and getattr(scheme, "codebook", None) != self.codebook:
            return f"it adds up the bytes of codebook {self.codebook}, which is not that of {scheme.label}"
        if input_bits == 8 and not wants_8:
            return "it quantizes the activations to 8 bits, which is not asked for"
        if input_bits == 16 and dtype is torch.float32:
            return "it quantizes the activations, to fewer bits than float32 has"
        return self.in_integers().reason


TRELLIS = HadamardKernels(
    *("trellis", "trellis codes", NativeTrellisLinear),
    *(native_trellis, native_trellis_integer, "mul1"),
)
E8P = HadamardKernels("e8p", "E8P codes", NativeE8pLinear, native_e8p, native_e8p)
