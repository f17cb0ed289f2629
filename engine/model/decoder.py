"""The decoder: embeddings, layers of attention and MLP, and the projection onto the vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from ..kernels.kv_write import write_kv
from ..kernels.paged_attention import (
    PAGED_ATTENTION,
    AttentionBatch,
    AttentionRule,
    AttentionSituation,
)
from ..kernels.rotary import apply_rotary, expand_angles
from .projection import Projection
from .rope import rope_table
from .spec import ModelSpec


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer. Norm weights are [hidden] or, for queries and keys, [head_dim]."""

    input_norm: torch.Tensor
    qkv: Projection
    query_norm: torch.Tensor | None
    key_norm: torch.Tensor | None
    attention_output: Projection
    mlp_norm: torch.Tensor
    gate_up: Projection
    down: Projection


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """Everything that was learnt. With tied embeddings `head` projects onto the embedding."""

    embedding: torch.Tensor
    layers: Sequence[LayerWeights]
    final_norm: torch.Tensor
    head: Projection
    is_tied: bool

    @property
    def bytes_held(self) -> int:
        """Bytes of weights in memory. A tied head counts only if its kernel keeps a layout of its own."""
        shared = self.is_tied and not self.head.holds_a_copy
        return self.bytes_per_step + (0 if shared else self.embedding.nbytes)

    @property
    def bytes_per_step(self) -> int:
        """Bytes of weights that a step reads: all but the embedding table, of which it reads rows."""
        norms = [self.final_norm]
        total = self.head.weight_bytes
        for layer in self.layers:
            norms += [layer.input_norm, layer.mlp_norm]
            norms += [norm for norm in (layer.query_norm, layer.key_norm) if norm is not None]
            for projection in (layer.qkv, layer.attention_output, layer.gate_up, layer.down):
                total += projection.weight_bytes
        return total + sum(norm.nbytes for norm in norms)


@dataclass(frozen=True, slots=True)
class LayerCache:
    """Keys and values of one layer, [blocks, block_size, kv_heads, head_dim] each."""

    keys: torch.Tensor
    values: torch.Tensor


@dataclass(frozen=True, slots=True)
class StepInputs:
    """One step as tensors.

    Attributes:
        token_ids, positions: int64 [tokens].
        slots: int64 [tokens], where each token's keys and values go.
        batch: what each token may see.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    batch: AttentionBatch


class Decoder:
    """A decoder-only transformer of the Llama shape and its relatives."""

    def __init__(
        self, spec: ModelSpec, weights: DecoderWeights, max_model_len: int, dtype: torch.dtype
    ) -> None:
        self.spec = spec
        self.weights = weights
        self._dtype = dtype
        device = weights.embedding.device
        self._cos, self._sin = rope_table(spec.rope, spec.head_dim, max_model_len, device)
        situation = AttentionSituation(device.type, dtype, spec.head_dim)
        self._attend = PAGED_ATTENTION.select(situation).run

    @torch.inference_mode()
    def forward(self, inputs: StepInputs, caches: Sequence[LayerCache]) -> torch.Tensor:
        """Run a step and fill the caches; returns the normed hidden states [tokens, hidden]."""
        eps = self.spec.rms_norm_eps
        cos, sin = expand_angles(
            self._cos.index_select(0, inputs.positions).to(self._dtype).unsqueeze(1),
            self._sin.index_select(0, inputs.positions).to(self._dtype).unsqueeze(1),
        )
        hidden = functional.embedding(inputs.token_ids, self.weights.embedding)
        size = (self.spec.hidden_size,)
        for index, layer in enumerate(self.weights.layers):
            x = functional.rms_norm(hidden, size, layer.input_norm, eps)
            hidden = hidden + self._attention(index, layer, x, cos, sin, inputs, caches[index])
            x = functional.rms_norm(hidden, size, layer.mlp_norm, eps)
            gate, up = layer.gate_up(x).chunk(2, dim=-1)
            hidden = hidden + layer.down(functional.silu(gate) * up)
        return functional.rms_norm(hidden, size, self.weights.final_norm, eps)

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Scores over the vocabulary, float32 [rows, vocab], of normed hidden states [rows, hidden]."""
        return self.weights.head(hidden).float()

    def _attention(
        self,
        index: int,
        layer: LayerWeights,
        x: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        inputs: StepInputs,
        cache: LayerCache,
    ) -> torch.Tensor:
        spec = self.spec
        heads, kv_heads, head_dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
        qkv = layer.qkv(x).view(-1, heads + 2 * kv_heads, head_dim)
        queries, keys, values = qkv.split([heads, kv_heads, kv_heads], dim=1)
        if layer.query_norm is not None and layer.key_norm is not None:
            queries = functional.rms_norm(queries, (head_dim,), layer.query_norm, spec.rms_norm_eps)
            keys = functional.rms_norm(keys, (head_dim,), layer.key_norm, spec.rms_norm_eps)
        queries = apply_rotary(queries, cos, sin)
        keys = apply_rotary(keys, cos, sin)
        write_kv(keys, values, cache.keys, cache.values, inputs.slots)
        mixed = self._attend(
            queries,
            cache.keys,
            cache.values,
            inputs.batch,
            AttentionRule(spec.attention_scale, spec.windows[index]),
        )
        return layer.attention_output(mixed.flatten(1))
