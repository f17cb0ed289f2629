"""Linear layers with unquantized weights: `y [tokens, out] = x [tokens, in] @ weight [out, in].T`."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch.nn import functional

from ..common.devices import serves_all
from ..common.dispatch import Candidate, Operation


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


class OneDnnLinear:
    """oneDNN GEMM with a prepacked weight; `functional.linear` reorders the weight in every call.

    Results are bit-identical to the reference. `packed` is the weight in oneDNN's layout.
    """

    EXPECTED_TOKENS = 8
    """Batch size for which oneDNN selects the blocked layout; other sizes work with it too."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight, self.EXPECTED_TOKENS)
        self.weight_bytes = weight.nbytes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, None, "none", [], "")


ONEDNN_BLOCKS = (16, 32, 48, 64)
"""Output channels side by side in the layouts for bfloat16: `[out / block, in / 2, block, 2]`, padded."""
_ROWS_COMPARED = 4096  # compared: bounds the copies


class OneDnnRows:
    """Row lookup in the weight that oneDNN prepacked: a tied head and its embedding are in memory once.

    Attributes:
        weight_bytes: of the packed weight, padding included.
    """

    def __init__(self, linear: OneDnnLinear, words: torch.Tensor, in_features: int) -> None:
        self._linear = linear  # owns the memory that `words` shows
        self._words = words  # int32 [blocks, pairs, block], two input channels each
        self._columns = torch.arange(words.shape[1]) * words.shape[2]
        self._in_features = in_features
        self.weight_bytes = words.nbytes

    def lookup(self, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Rows of the weight, `[ids, in]`, for ids int64 `[ids]`."""
        _, pairs, block = self._words.shape
        places = ids // block * (pairs * block) + ids % block
        # Not by indexing, which a graph cannot hold: it may be by a mask.
        flat = (places[:, None] + self._columns).view(-1)
        words = self._words.view(-1).index_select(0, flat).view(-1, pairs)
        return words.view(torch.bfloat16)[:, : self._in_features].to(dtype)


def onednn_rows(linear: OneDnnLinear, weight: torch.Tensor) -> OneDnnRows | None:
    """The rows of `linear`, whose weight is `weight` [out, in]; None: its layout is none that is known.

    oneDNN chooses the layout by processor and shape, and says it to nobody; so it is found by trial, and
    used where all of the weight read back is the weight.
    """
    library = torch.ops.mkldnn
    if not (hasattr(library, "data_ptr") and hasattr(library, "_nbytes")):
        return None
    out, in_features = weight.shape
    address = ctypes.c_char * library._nbytes(linear.packed)
    memory = address.from_address(library.data_ptr(linear.packed))
    words = torch.frombuffer(memory, dtype=torch.int32)
    for block in ONEDNN_BLOCKS:
        blocks = -(-out // block)
        pairs, rest = divmod(words.numel(), blocks * block)
        if rest or 2 * pairs < in_features:
            continue
        rows = OneDnnRows(linear, words.view(blocks, pairs, block), in_features)
        slices = (slice(at, at + _ROWS_COMPARED) for at in range(0, out, _ROWS_COMPARED))
        ids = torch.arange(out)
        if all(torch.equal(rows.lookup(ids[s], weight.dtype), weight[s]) for s in slices):
            return rows
    return None


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
