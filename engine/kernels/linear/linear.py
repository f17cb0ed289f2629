"""A linear layer with plain weights: `y [tokens, out] = x [tokens, in] @ weight [out, in].T`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch.nn import functional

from ..common.dispatch import Candidate, Operation


class LinearKernel(Protocol):
    """A weight in the form that a kernel wants, ready to be applied; it adds no bias."""

    @property
    def weight_bytes(self) -> int:
        """Bytes that one application reads of the weight."""
        ...

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...


@runtime_checkable
class FusesBias(Protocol):
    """A kernel that can add a bias itself."""

    def fuse_bias(self, bias: torch.Tensor) -> None:
        """Add `bias [out]` to every result from now on."""
        ...


@dataclass(frozen=True, slots=True)
class LinearKernelQuery:
    """What a candidate may look at."""

    device: str
    dtype: torch.dtype
    out_features: int
    in_features: int

    def __str__(self) -> str:
        return f"{self.out_features} × {self.in_features} in {self.dtype} on {self.device}"


class TorchLinear:
    """The reference: torch's own linear."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight
        self.weight_bytes = weight.nbytes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self.weight)


class OneDnnLinear:
    """oneDNN with the weight reordered once; torch's own linear reorders it in every call.

    The results are bit-equal to the reference.
    """

    EXPECTED_TOKENS = 8
    """Tokens a call for which oneDNN chooses the blocked layout; others work with it too."""

    def __init__(self, weight: torch.Tensor) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, self.EXPECTED_TOKENS)
        self.weight_bytes = weight.nbytes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self._weight, None, "none", [], "")


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
        Candidate("torch", lambda kernel_query: None, TorchLinear),
    ],
)


def prepare_linear(weight: torch.Tensor) -> LinearKernel:
    """Hand `weight` [out, in] to the best kernel for its device and dtype."""
    kernel_query = LinearKernelQuery(
        weight.device.type, weight.dtype, weight.shape[0], weight.shape[1]
    )
    return LINEAR.select(kernel_query).run(weight)
