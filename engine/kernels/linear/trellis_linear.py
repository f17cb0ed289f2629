"""Linears with trellis-coded weights: transforms go to the activations, tiles are decoded as they are read.

`y = H (Qᵀ H (x ⊙ suh)) ⊙ svh`: the weight stays packed. In C a tile of 16 × 16 weights is decoded in the
first-level cache; elsewhere torch decodes some tiles of outputs at a time.
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
    """`TrellisCall` of `trellis.c`."""

    _fields_ = [
        *[(name, ctypes.c_void_p) for name in ("trellis", "suh", "svh", "x", "bias", "y")],
        *[
            (name, ctypes.c_int64)
            for name in (
                *("rows", "stride", "in_features", "out_features", "bits", "codebook"),
                *("x_is_bf16", "y_is_bf16", "threads"),
            )
        ],
    ]


def native_trellis() -> Native:
    """The compiled GEMM, or the reason why there is none."""
    return native(Path(__file__).with_name("trellis.c"))


class NativeTrellisLinear:
    """The C kernel: float32 accumulation, inputs in bfloat16 or float32."""

    def __init__(self, weight: QuantizedTensor, dtype: torch.dtype) -> None:
        assert isinstance(weight, TrellisTensor)
        self._trellis = weight.trellis.contiguous()
        self._sides = weight.suh.float(), weight.svh.float()
        self._scheme = weight.scheme
        self._bias: torch.Tensor | None = None
        self.weight_bytes = weight.nbytes
        library = native_trellis().library
        assert library is not None
        self._run = library.llmopt_trellis

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
        )
        if x.shape[0] and launch(self._run, call):
            raise MemoryError(f"no memory for {x.shape[0]} rows of {len(inputs)} inputs")
        return y
