"""Linear layers with unquantized weights: `y [tokens, out] = x [tokens, in] @ weight [out, in].T`.

Beside float32 inputs on a CPU, weights of 16 bits stay so in memory and are widened by the kernel: nothing is
lost, and a token reads half of the bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch.nn import functional

from ....base.processor import computes_in_bf16
from ..common.devices import refuses_cpu, serves_all
from ..common.dispatch import Candidate, Operation, lazily
from .native_pack import native_pack
from .onednn_linear import ONEDNN_OPERATORS, OneDnnLinear

HALVES = (torch.bfloat16, torch.float16)


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
    """Kernel query of an unquantized linear: device, dtype of the weight, shape, and dtype of the inputs
    where it is another."""

    device: str
    dtype: torch.dtype
    out_features: int
    in_features: int
    inputs: torch.dtype | None = None

    @property
    def widens(self) -> bool:
        """Whether the kernel widens the weight."""
        return self.inputs not in (None, self.dtype)

    def __str__(self) -> str:
        inputs = f", inputs in {self.inputs}," if self.widens else ""
        return f"{self.out_features} × {self.in_features} in {self.dtype}{inputs} on {self.device}"


WIDENED_AT_ONCE = 512
"""Output channels whose weights torch widens at once: they stay near for the GEMM behind."""


class TorchLinear:
    """The reference: `torch.nn.functional.linear`, of a widened weight where the inputs are wider."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight
        self.bias: torch.Tensor | None = None
        self.weight_bytes = weight.nbytes

    def fuse_bias(self, bias: torch.Tensor) -> None:
        """Add `bias [out]` to the output of every later call."""
        self.bias = bias
        self.weight_bytes += bias.nbytes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype is self.weight.dtype:
            return functional.linear(x, self.weight, self.bias)
        some = self.weight.split(WIDENED_AT_ONCE)
        y = torch.cat([functional.linear(x, weight.to(x.dtype)) for weight in some], dim=-1)
        return y if self.bias is None else y + self.bias


def _refuses_packed(kernel_query: LinearKernelQuery) -> str | None:
    if not kernel_query.widens:
        return "its inputs are of another dtype than its weights"
    return refuses_cpu(kernel_query.device) or native_pack().reason


def _refuses_onednn(kernel_query: LinearKernelQuery) -> str | None:
    if kernel_query.widens:
        return "its inputs are of the weight's dtype"
    if kernel_query.device != "cpu":
        return "it is a CPU library"
    if kernel_query.dtype is not torch.bfloat16:
        return f"it gains nothing in {kernel_query.dtype}"
    if not torch.backends.mkldnn.is_available():
        return "this torch has no oneDNN"
    missing = [name for name in ONEDNN_OPERATORS if not hasattr(torch.ops.mkldnn, name)]
    if missing:
        return f"this torch has no operator mkldnn.{missing[0]}"
    if not computes_in_bf16():
        return "this processor has no bf16 instructions"
    return None


LINEAR: Operation[LinearKernelQuery, Callable[[torch.Tensor], LinearKernel]] = Operation(
    "linear",
    [
        Candidate("onednn-prepacked", _refuses_onednn, OneDnnLinear),
        Candidate(
            "native-16bit-weights", _refuses_packed, lazily("linear.native_linear", "HalfLinear")
        ),
        Candidate("torch", serves_all, TorchLinear),
    ],
)


def keeps_halves(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether an engine of that dtype takes linears of 16 bits as they are stored."""
    return device.type == "cpu" and dtype is torch.float32


def prepare_linear(weight: torch.Tensor, dtype: torch.dtype) -> LinearKernel:
    """Prepack `weight` [out, in] for the best kernel of its device and dtype, and inputs in `dtype`."""
    kernel_query = LinearKernelQuery(
        weight.device.type, weight.dtype, weight.shape[0], weight.shape[1], dtype
    )
    return LINEAR.select(kernel_query).run(weight)
