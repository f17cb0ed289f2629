"""bfloat16 linears on a CPU: oneDNN's GEMM of a prepacked weight, `few_rows.c` for decode, and row lookup.

oneDNN chooses the layout by processor and shape, and says it to nobody; so it is found by trial, and used
where all of the weight read back is the weight.
"""

from __future__ import annotations

import ctypes

import torch

from ....base.build import beside, fields
from ..common.graphs import launch

ONEDNN_OPERATORS = (
    "_linear_pointwise",
    "_reorder_linear_weight",
)
"""Private operators of torch that `OneDnnLinear` calls; torch 2.11 to 2.15 have them."""
ONEDNN_BLOCKS = (16, 32, 48, 64)
"""Output channels side by side in the layouts for bfloat16: `[out / block, in / 2, block, 2]`, padded."""
FEW_ROWS = 16
"""Rows up to which `few_rows.c` is faster than oneDNN, whose threads take turns with those of our kernels."""

native_few_rows = beside(__file__, "few_rows.c")
"""The compiled kernel, or the reason why there is none."""


class _CallStruct(ctypes.Structure):
    """`Call` of `few_rows.c`."""

    _fields_ = fields("weight x y", "block pairs out_features in_features rows x_stride threads")


class OneDnnLinear:
    """oneDNN GEMM with a prepacked weight; `functional.linear` reorders the weight in every call.

    Attributes:
        packed: the weight in oneDNN's layout.
        words: its memory, int32 [blocks, pairs, block], two input channels each; None: an unknown layout.
    """

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
            found = words.view(blocks, pairs, block)
            call = self._call(found, weight.contiguous())
            if native_few_rows().function("llmopt_is_packed")(ctypes.byref(call)):
                return found
        return None

    def _call(
        self, words: torch.Tensor, x: torch.Tensor, y: torch.Tensor | None = None
    ) -> _CallStruct:
        _, pairs, block = words.shape
        return _CallStruct(
            words.data_ptr(),
            x.data_ptr(),
            None if y is None else y.data_ptr(),
            block,
            pairs,
            *self._shape,
            len(x),
            x.stride(0),
            torch.get_num_threads(),
        )


class OneDnnRows:
    """Row lookup in the weight that oneDNN prepacked: a tied head and its embedding are in memory once.

    Attributes:
        weight_bytes: of the packed weight, padding included.
    """

    def __init__(self, linear: OneDnnLinear, words: torch.Tensor, in_features: int) -> None:
        self._linear = linear  # owns the memory that `words` shows
        self._words = words
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
