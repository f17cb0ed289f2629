"""GEMMs in C of codes between Hadamard transforms: the call that they share."""

from __future__ import annotations

import ctypes

import torch

from ....quant.kinds.base.tensor import QuantizedTensor
from ....quant.native.build import Native
from ..common.launch import launch

FLOAT_BITS = 32
"""`input_bits` of a GEMM that does not quantize its inputs."""


class HadamardCall(ctypes.Structure):
    """`HadamardCall` of `hadamard.h`."""

    _fields_ = [
        *[
            (name, ctypes.c_void_p)
            for name in (
                *("codes", "su", "sv", "x", "bias", "y"),
                *("tables", "scales", "left", "right"),
            )
        ],
        *[
            (name, ctypes.c_int64)
            for name in (
                *("left_order", "right_order", "rows", "stride", "in_features", "out_features"),
                *("bits", "codebook", "x_is_bf16", "y_is_bf16", "threads", "input_bits"),
            )
        ],
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
        assert kernel.library is not None
        self._run = getattr(kernel.library, function)

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
