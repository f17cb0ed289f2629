"""Loading of the token embedding, which a tied LM head shares."""

from __future__ import annotations

import torch

from ...kernels.linear.lookup import LooksUpRows
from ..layers.embedding import EmbeddingTable, PackedEmbedding, TokenEmbedding
from ..parallel.shard import Shard
from .reader import CheckpointReader


def load_embedding(
    reader: CheckpointReader,
    name: str,
    vocab: int,
    hidden: int,
    dtype: torch.dtype,
    shard: Shard | None,
) -> TokenEmbedding:
    """Load the embedding [vocab, hidden]: as the file packs it where a kernel looks up rows, else floats.

    A tensor-parallel rank has floats: its head is a part of them.
    """
    packed = reader.packed_table(name, vocab, hidden) if shard is None else None
    if packed is None or not isinstance(packed.kernel, LooksUpRows):
        return EmbeddingTable(reader.tensor(name, vocab, hidden))
    return PackedEmbedding(packed, packed.kernel, hidden, dtype)
