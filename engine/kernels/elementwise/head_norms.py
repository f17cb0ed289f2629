"""QK-norm: RMSNorm of each query and key head before RoPE (Qwen3, Gemma 3)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional


@dataclass(frozen=True, slots=True, eq=False)
class HeadNorms:
    """QK-norm weights [head_dim] of queries and keys, in the dtype of the heads, or in float32
    for a kernel that takes wide weights."""

    query: torch.Tensor
    key: torch.Tensor
    eps: float

    def apply(self, stacked: torch.Tensor, num_heads: int) -> None:
        """Norm the queries and keys of `stacked` [tokens, heads, dim] (queries, keys, values) in place."""
        kv_heads = (stacked.shape[1] - num_heads) // 2
        queries, keys, _ = stacked.split([num_heads, kv_heads, kv_heads], dim=1)
        for heads, weight in ((queries, self.query), (keys, self.key)):
            heads.copy_(functional.rms_norm(heads, weight.shape, weight, self.eps))
