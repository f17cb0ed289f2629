"""Linear layers with unquantized weights: `y [tokens, out] = x [tokens, in] @ weight [out, in].T`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch.nn import functional

from ..common.devices import serves_all
from ..common.dispatch import Candidate, Operation
from .onednn_linear import OneDnnLinear


class LinearKernel(Protocol):
    """A GEMM with a weight prepacked for its kernel; it adds no bias."""

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weight that one call reads."""
        ...

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...


@runtime_checkable
class FusesBias(Protocol):
    """A GEMM kernel with a fused bias."""

    def fuse_bias(self, bias: torch.Tensor) -> None:
        """Add `bias [out]` to the output of every later call."""
        ...


@runtime_checkable
class GivesFloat32(Protocol):
    """A GEMM kernel that can leave its float32 accumulators unrounded, as logits want them."""

    def in_float32(self, x: torch.Tensor) -> torch.Tensor:
        """The result for `x [rows, in]` in float32."""
        ...


@dataclass(frozen=True, slots=True)
class LinearKernelQuery:
    """Kernel query of an unquantized linear: device, dtype, shape."""

    device: str
    dtype: torch.dtype
    out_features: int
    in_features: int

    def __str__(self) -> str:
        return f"{self.out_features} × {self.in_features} in {self.dtype} on {self.device}"


class TorchLinear:
    """The reference: `torch.nn.functional.linear`."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight
        self.bias: torch.Tensor | None = None
        self.weight_bytes = weight.nbytes

    def fuse_bias(self, bias: torch.Tensor) -> None:
        """Add `bias [out]` to the output of every later call."""
        self.bias = bias
        self.weight_bytes += bias.nbytes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self.weight, self.bias)


def _refuses_onednn(kernel_query: LinearKernelQuery) -> str | None:
    if kernel_query.device != "cpu":
        return "it is a CPU library"
    if kernel_query.dtype is not torch.bfloat16:
        return f"it gains nothing in {kernel_query.dtype}"
    if not torch.backends.mkldnn.is_available():
        return "this torch has no oneDNN"
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return "this processor has no bf16 instructions"
    return None


LINEAR: Operation[LinearKernelQuery, Callable[[torch.Tensor], LinearKernel]] = Operation(
    "linear",
    [
        Candidate("onednn-prepacked", _refuses_onednn, OneDnnLinear),
        Candidate("torch", serves_all, TorchLinear),
    ],
)


def prepare_linear(weight: torch.Tensor) -> LinearKernel:
    """Prepack `weight` [out, in] for the best kernel of its device and dtype."""
    kernel_query = LinearKernelQuery(
        weight.device.type, weight.dtype, weight.shape[0], weight.shape[1]
    )
    return LINEAR.select(kernel_query).run(weight)
