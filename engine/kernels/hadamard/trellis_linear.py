"""Linears with trellis-coded weights: transforms go to the activations, tiles are decoded as they are read.

`y = H (Qᵀ H (x ⊙ suh)) ⊙ svh`: the weight stays packed. In C tiles of 16 × 16 weights are decoded in
registers or in the first-level cache, to floats or to integers; elsewhere torch decodes some tiles of outputs
at a time.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch
from torch.nn import functional

from ....quant.base.scheme import TRELLIS_CODEBOOKS
from ....quant.native.build import Native, native
from ....quant.tensors.base import QuantizedTensor
from ....quant.tensors.trellis import TrellisTensor
from ....quant.trellis.incoherence import hadamard_blocks
from ....quant.trellis.tiles import TILE
from ..common.launch import launch


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


class _TrellisCall(ctypes.Structure):
    """`TrellisCall` of `trellis.h`."""

    _fields_ = [
        *[(name, ctypes.c_void_p) for name in ("trellis", "suh", "svh", "x", "bias", "y")],
        *[
            (name, ctypes.c_int64)
            for name in (
                *("rows", "stride", "in_features", "out_features", "bits", "codebook"),
                *("x_is_bf16", "y_is_bf16", "threads", "input_bits"),
            )
        ],
    ]


def native_trellis() -> Native:
    """The compiled GEMM in float32, or the reason why there is none."""
    return native(Path(__file__).with_name("trellis.c"))


def native_trellis_integer() -> Native:
    """The compiled GEMM of quantized inputs, or the reason why there is none."""
    return native(Path(__file__).with_name("trellis_integer.c"))


class _NativeLinear:
    """A GEMM in C, with inputs in bfloat16 or float32."""

    def __init__(
        self, weight: TrellisTensor, trellis: torch.Tensor, kernel: Native, input_bits: int = 32
    ) -> None:
        self._trellis, self._input_bits = trellis, input_bits
        self._sides = weight.suh.float(), weight.svh.float()
        self._scheme = weight.scheme
        self._bias: torch.Tensor | None = None
        self.weight_bytes = weight.nbytes
        library = kernel.library
        assert library is not None
        name = "llmopt_trellis" if input_bits == 32 else "llmopt_trellis_integer"
        self._run = getattr(library, name)

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
        call = _TrellisCall(
            self._trellis.data_ptr(),
            inputs.data_ptr(),
            outputs.data_ptr(),
            x.data_ptr(),
            None if self._bias is None else self._bias.data_ptr(),
            y.data_ptr(),
            x.shape[0],
            x.stride(0),
            len(inputs),
            len(outputs),
            self._scheme.bits,
            TRELLIS_CODEBOOKS.index(self._scheme.codebook),
            x.dtype is torch.bfloat16,
            dtype is torch.bfloat16,
            torch.get_num_threads(),
            self._input_bits,
        )
        if x.shape[0] and launch(self._run, call):
            raise MemoryError(f"no memory for {x.shape[0]} rows of {len(inputs)} inputs")
        return y


class NativeTrellisLinear(_NativeLinear):
    """The C kernel in float32."""

    def __init__(self, weight: QuantizedTensor, dtype: torch.dtype) -> None:
        assert isinstance(weight, TrellisTensor)
        super().__init__(weight, weight.trellis.contiguous(), native_trellis())


class QuantizedInputTrellisLinear(_NativeLinear):
    """The C kernel of integer dot products, whose inputs are quantized behind their transform.

    With `input_bits` 16 they have 13 bits, and weights are the codebook's values to 2^-14; with 8 they have
    8 bits, and weights are mul1's byte sums, without the float16 rounding of its values.
    """

    def __init__(self, weight: QuantizedTensor, input_bits: int) -> None:
        assert isinstance(weight, TrellisTensor)
        assert input_bits == 16 or weight.scheme.codebook == "mul1"
        trellis = in_spans(weight.trellis, weight.scheme.bits)
        super().__init__(weight, trellis, native_trellis_integer(), input_bits)


def in_spans(trellis: torch.Tensor, bits: int) -> torch.Tensor:
    """The words of tiles `[in / 16, out / 16, 16 * bits]` in the order of the integer GEMM.

    They go by 128 outputs, 128 inputs, 32 outputs, 16 inputs, the word's number in its span of 16 weights,
    16 outputs, and the span.
    """
    words = trellis.unflatten(2, (-1, 2)).flip(-1).flatten(2)  # halves of 32-bit words are swapped
    tiles = words.view(trellis.shape[0] // 8, 8, trellis.shape[1] // 8, 4, 2, TILE, bits)
    return tiles.permute(2, 0, 3, 1, 6, 4, 5).contiguous()
