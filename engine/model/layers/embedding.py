"""Token embeddings: a table of floats, or the rows of a packed weight, which a tied LM head shares."""

from __future__ import annotations

from typing import Protocol

import torch

from ...kernels.elementwise.native_rows import embedding_rows
from ...kernels.linear.lookup import LooksUpRows
from .projection import Projection


class TokenEmbedding(Protocol):
    """Maps token ids to vectors.

    Attributes:
        width: elements of a vector.
        nbytes: bytes that it holds, but for a packed weight that is the LM head's too.
    """

    width: int
    nbytes: int
    device: torch.device

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Vectors [tokens, width] of token ids, int64 [tokens]."""
        ...

    def head(self, part: slice) -> Projection:
        """The tied LM head of a part of the vocabulary, which of a packed weight is all of it."""
        ...


class EmbeddingTable:
    """An embedding of floats [vocab, width]."""

    def __init__(self, table: torch.Tensor) -> None:
        self._table = table
        self.width, self.nbytes, self.device = table.shape[1], table.nbytes, table.device

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        return embedding_rows(self._table, token_ids)

    def head(self, part: slice) -> Projection:
        return Projection([self._table[part]], None, self._table.dtype)


class PackedEmbedding:
    """The rows of a packed weight on a CPU; its vectors are in `dtype`."""

    def __init__(
        self, packed: Projection, rows: LooksUpRows, width: int, dtype: torch.dtype
    ) -> None:
        self._packed, self._rows, self._dtype = packed, rows, dtype
        self.width, self.nbytes, self.device = width, packed.weight_bytes, torch.device("cpu")

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        return self._rows.lookup(token_ids, self._dtype)

    def head(self, part: slice) -> Projection:
        self.nbytes = 0
        return self._packed
