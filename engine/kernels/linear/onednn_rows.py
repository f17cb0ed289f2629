"""Row lookup in the weight that oneDNN prepacked: a tied LM head and its embedding are in memory once.

oneDNN chooses its layout by processor and shape, and says it to nobody; so it is found by trial, and used
where all of the weight read back is the weight.
"""

from __future__ import annotations

import ctypes

import torch

from .linear import OneDnnLinear

BLOCKS = (16, 32, 48, 64)
"""Output channels side by side in the layouts for bfloat16: `[out / block, in / 2, block, 2]`, padded."""
_ROWS_AT_ONCE = 4096  # compared: bounds the copies


class OneDnnRows:
    """The rows of a prepacked weight.

    Attributes:
        weight_bytes: of the packed weight, padding included.
    """

    def __init__(self, linear: OneDnnLinear, words: torch.Tensor, in_features: int) -> None:
        self._linear = linear  # owns the memory that `words` shows
        self._words = words  # int32 [blocks, pairs, block], two input channels each
        self._in_features = in_features
        self.weight_bytes = words.nbytes

    def lookup(self, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Rows of the weight, `[ids, in]`, for ids int64 `[ids]`."""
        block = self._words.shape[2]
        words = self._words[ids // block, :, ids % block]
        return words.view(torch.bfloat16)[:, : self._in_features].to(dtype)


def onednn_rows(linear: OneDnnLinear, weight: torch.Tensor) -> OneDnnRows | None:
    """The rows of `linear`, whose weight is `weight` [out, in]; None: its layout is none that is known."""
    library = torch.ops.mkldnn
    if not (hasattr(library, "data_ptr") and hasattr(library, "_nbytes")):
        return None
    out, in_features = weight.shape
    address = ctypes.c_char * library._nbytes(linear.packed)
    memory = address.from_address(library.data_ptr(linear.packed))
    words = torch.frombuffer(memory, dtype=torch.int32)
    for block in BLOCKS:
        blocks = -(-out // block)
        pairs, rest = divmod(words.numel(), blocks * block)
        if rest or 2 * pairs < in_features:
            continue
        rows = OneDnnRows(linear, words.view(blocks, pairs, block), in_features)
        slices = (slice(at, at + _ROWS_AT_ONCE) for at in range(0, out, _ROWS_AT_ONCE))
        ids = torch.arange(out)
        if all(torch.equal(rows.lookup(ids[s], weight.dtype), weight[s]) for s in slices):
            return rows
    return None
