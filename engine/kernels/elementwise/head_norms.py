"""The norms of queries and keys that some models have before the rotation."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional


@dataclass(frozen=True, slots=True, eq=False)
class HeadNorms:
    """Root mean square norms over each head: weights [head_dim] in the dtype of the heads."""

    query: torch.Tensor
    key: torch.Tensor
    eps: float

    def apply(self, stacked: torch.Tensor, num_heads: int) -> None:
        """Norm queries and keys of `stacked` [tokens, heads, dim] where they lie; values follow them."""
        kv_heads = (stacked.shape[1] - num_heads) // 2
        queries, keys, _ = stacked.split([num_heads, kv_heads, kv_heads], dim=1)
        for heads, weight in ((queries, self.query), (keys, self.key)):
            heads.copy_(functional.rms_norm(heads, weight.shape, weight, self.eps))
