"""Attention over the keys and values of an earlier layer (KV sharing)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...kernels.activations.quantized_activations import ActivationQuant, Rows
from ...kernels.attention.paged_attention import AttentionRule
from .attention import LayerCache, Rotation, Step
from .norm import Norm
from .projection import Projection


@dataclass(frozen=True, slots=True)
class SharedAttention:
    """Grouped-query attention with queries of its own; the cache is that of the layer it shares with.

    That layer has written this step's keys and values before.

    Source: Brandon et al., "Reducing Transformer Key-Value Cache Size with Cross-Layer Attention"
    (arXiv:2405.12981).
    """

    num_heads: int
    head_dim: int
    query: Projection
    output: Projection
    rule: AttentionRule
    rotation: Rotation
    query_norm: Norm | None

    @property
    def weight_bytes(self) -> int:
        norm = 0 if self.query_norm is None else self.query_norm.weight_bytes
        return self.query.weight_bytes + self.output.weight_bytes + norm

    @property
    def activation_quant(self) -> ActivationQuant | None:
        """Quantization of its input that a preceding kernel may fuse."""
        return self.query.activation_quant

    def __call__(self, x: Rows, step: Step, cache: LayerCache) -> torch.Tensor:
        adapters = step.inputs.adapters
        queries = self.query(x, adapters).view(-1, self.num_heads, self.head_dim)
        if self.query_norm is not None:
            queries = self.query_norm(queries)
        queries = self.rotation(queries, step)
        mixed = step.attend(queries, cache.keys, cache.values, step.inputs.batch, self.rule)
        return self.output(mixed.flatten(1), adapters)
