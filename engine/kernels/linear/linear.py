"""Linear layers with unquantized weights: `y [tokens, out] = x [tokens, in] @ weight [out, in].T`.

With float32 inputs on a CPU the kernel widens 16-bit weights: a token reads half of the bytes. bfloat16
linears take oneDNN's GEMM of a prepacked weight, and `few_rows.c` for decode. oneDNN's layout is
undocumented; a trial finds the one in which all of the weight reads back.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch.nn import functional

from ....base.build import beside
from ....base.processor import computes_in_bf16
from ..common.devices import refuses_cpu, serves_all
from ..common.dispatch import Candidate, Operation, lazily
from ..common.graphs import addresses, launch, struct
from .native_pack import native_pack

HALVES = (torch.bfloat16, torch.float16)


class LinearKernel(Protocol):
    """A GEMM with a weight prepacked for its kernel; it adds no bias."""

    @property
    def weight_bytes(self) -> int: ...

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...


@runtime_checkable
class FusesBias(Protocol):
    """A GEMM kernel with a fused bias."""

    def fuse_bias(self, bias: torch.Tensor) -> None:
        """Add `bias [out]` to the output of every later call."""


@runtime_checkable
class GivesFloat32(Protocol):
    """A GEMM kernel that can leave its float32 accumulators unrounded, as logits want them."""

    def in_float32(self, x: torch.Tensor) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class LinearKernelQuery:
    """Kernel query of an unquantized linear; `dtype` is the weight's, `inputs` the inputs' if another."""

    device: str
    dtype: torch.dtype
    out_features: int
    in_features: int
    inputs: torch.dtype | None = None

    @property
    def widens(self) -> bool:
        return self.inputs not in (None, self.dtype)

    def __str__(self) -> str:
        inputs = f", inputs in {self.inputs}," if self.widens else ""
        return f"{self.out_features} × {self.in_features} in {self.dtype}{inputs} on {self.device}"


WIDENED_AT_ONCE = 512
"""Output channels whose weights torch widens at once: they stay in the cache for the GEMM after it."""


class TorchLinear:
    """The reference: `torch.nn.functional.linear`, of a widened weight where the inputs are wider."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight
        self.bias: torch.Tensor | None = None
        self.weight_bytes = weight.nbytes

    def fuse_bias(self, bias: torch.Tensor) -> None:
        self.bias = bias
        self.weight_bytes += bias.nbytes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype is self.weight.dtype:
            return functional.linear(x, self.weight, self.bias)
        some = self.weight.split(WIDENED_AT_ONCE)
        y = torch.cat([functional.linear(x, weight.to(x.dtype)) for weight in some], dim=-1)
        return y if self.bias is None else y + self.bias


ONEDNN_OPERATORS = ("_linear_pointwise", "_reorder_linear_weight")
"""Private operators of torch that `OneDnnLinear` calls; torch 2.11 to 2.15 have them."""
ONEDNN_BLOCKS = (16, 32, 48, 64)
"""Output channels side by side in the layouts for bfloat16: `[out / block, in / 2, block, 2]`, padded."""
FEW_ROWS = 16
"""Rows up to which `few_rows.c` is faster than oneDNN, whose threads take turns with those of our kernels."""

native_few_rows = beside(__file__, "few_rows.c")

_CallStruct = struct(  # `Call` of `few_rows.c`
    "Call", "weight x y", "block pairs out_features in_features rows x_stride threads"
)


class OneDnnLinear:
    """oneDNN GEMM with a prepacked weight; `words`, if its layout is known, int32 [blocks, pairs, block]."""

    EXPECTED_TOKENS = 8
    """Batch size for which oneDNN selects the blocked layout; other sizes work with it too."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight, self.EXPECTED_TOKENS)
        self._shape = weight.shape
        self.words = self._found(weight)
        self.weight_bytes = weight.nbytes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        is_plain = x.dim() == 2 and x.dtype is torch.bfloat16
        if self.words is None or not is_plain or not 0 < len(x) <= FEW_ROWS:
            return torch.ops.mkldnn._linear_pointwise(x, self.packed, None, "none", [], "")
        x = x if x.stride(1) == 1 else x.contiguous()
        y = x.new_empty(len(x), self._shape[0])
        launch(native_few_rows().function("llmopt_few_rows"), self._call(self.words, x, y))
        return y

    def rows(self) -> OneDnnRows | None:
        """Row lookup in the packed weight; None: its layout is none that is known."""
        return None if self.words is None else OneDnnRows(self, self.words, self._shape[1])

    def _found(self, weight: torch.Tensor) -> torch.Tensor | None:
        """The memory in the layout in which all of the weight is found; None: in none."""
        library, (out, in_features) = torch.ops.mkldnn, self._shape
        says_memory = hasattr(library, "data_ptr") and hasattr(library, "_nbytes")
        if native_few_rows().library is None or not says_memory or in_features % 2:
            return None
        address = ctypes.c_char * library._nbytes(self.packed)
        memory = address.from_address(library.data_ptr(self.packed))
        words = torch.frombuffer(memory, dtype=torch.int32)
        for block in ONEDNN_BLOCKS:
            blocks = -(-out // block)
            pairs, rest = divmod(words.numel(), blocks * block)
            if rest or 2 * pairs < in_features:
                continue
            view = words.view(blocks, pairs, block)
            call = self._call(view, weight.contiguous())
            if native_few_rows().function("llmopt_is_packed")(ctypes.byref(call)):
                return view
        return None

    def _call(
        self, words: torch.Tensor, x: torch.Tensor, y: torch.Tensor | None = None
    ) -> ctypes.Structure:
        _, pairs, block = words.shape
        sizes = block, pairs, *self._shape, len(x), x.stride(0), torch.get_num_threads()
        return _CallStruct(*addresses(words, x, y), *sizes)


class OneDnnRows:
    """Row lookup in the weight that oneDNN prepacked: a tied head and its embedding are in memory once."""

    def __init__(self, linear: OneDnnLinear, words: torch.Tensor, in_features: int) -> None:
        self._linear = linear  # owns the memory that `words` shows
        self._words = words
        self._columns = torch.arange(words.shape[1]) * words.shape[2]
        self._in_features = in_features
        self.weight_bytes = words.nbytes

    def lookup(self, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        _, pairs, block = self._words.shape
        places = ids // block * (pairs * block) + ids % block
        # Not by indexing, which a graph cannot hold: it may be by a mask.
        flat = (places[:, None] + self._columns).view(-1)
        words = self._words.view(-1).index_select(0, flat).view(-1, pairs)
        return words.view(torch.bfloat16)[:, : self._in_features].to(dtype)


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
    """True if an engine of that dtype keeps 16-bit linears as they are stored."""
    return device.type == "cpu" and dtype is torch.float32


def prepare_linear(weight: torch.Tensor, dtype: torch.dtype) -> LinearKernel:
    kernel_query = LinearKernelQuery(
        weight.device.type, weight.dtype, weight.shape[0], weight.shape[1], dtype
    )
    return LINEAR.select(kernel_query).run(weight)
