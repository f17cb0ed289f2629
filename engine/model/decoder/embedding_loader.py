"""Loading of the token embedding, which a tied LM head shares."""

from __future__ import annotations

import torch

from ...kernels.linear.linear import OneDnnLinear, onednn_rows
from ...kernels.linear.native_linear import LooksUpRows
from ..layers.embedding import EmbeddingTable, PackedEmbedding, TokenEmbedding
from ..layers.parallel import Shard
from .reader import CheckpointReader


def load_embedding(
    reader: CheckpointReader,
    name: str,
    vocab: int,
    hidden: int,
    dtype: torch.dtype,
    shard: Shard | None,
    *,
    tied: bool,
) -> TokenEmbedding:
    """Load the embedding [vocab, hidden]: as the file packs it where a kernel looks up rows, else floats.

    Floats that the LM head shares (`tied`) are prepacked for its GEMM alone where rows can be looked up
    there. A tensor-parallel rank has a table: its head is a part of it.
    """
    packed = reader.packed_table(name, vocab, hidden) if shard is None else None
    if packed is not None and isinstance(packed.kernel, LooksUpRows):
        return PackedEmbedding(packed, packed.kernel, hidden, dtype)
    table = reader.tensor(name, vocab, hidden)
    if not tied or shard is not None:
        return EmbeddingTable(table)
    head = reader.stacked([table], None)
    rows = onednn_rows(head.kernel, table) if isinstance(head.kernel, OneDnnLinear) else None
    return EmbeddingTable(table) if rows is None else PackedEmbedding(head, rows, hidden, dtype)
