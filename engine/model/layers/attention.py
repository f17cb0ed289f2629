"""Attention layers: grouped-query (GQA), on an earlier layer's keys and values, and latent (MLA)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from ....quant.families.spec_parts import Temperature
from ...kernels.attention.batch import AttentionBatch, AttentionRule
from ...kernels.attention.paged_attention import AttentionKernel, ScoredSpan, add_key_scores
from ...kernels.attention.paged_tensor import CacheDtype, PagedTensor
from ...kernels.elementwise.dispatch import LATENT, RowKernelQuery
from ...kernels.elementwise.reference import (
    ActivationQuant,
    HeadNorms,
    RopeAndCacheKernel,
    RopeCall,
    Rows,
    TakesWideWeights,
    TorchRopeAndCache,
    apply_rotary_emb,
    interleaved_to_halves,
)
from .embedding import EmbeddedRows
from .norm import Norm, ShardedNorm
from .projection import AdapterRows, Projection, Weights
from .spec import KvLayout
from .state import NO_STATES, NO_STEP_STATES, StateBatch, StepStates

if TYPE_CHECKING:
    from ...kernels.elementwise.triton_cache_write import TritonLatent

KvScales = tuple[torch.Tensor, torch.Tensor]
"""Static scales of a layer's keys and values, float32 [kv_heads] or [1]."""


@dataclass(frozen=True, slots=True)
class LayerCache:
    """Paged KV cache of a layer, by `index` among those with one; `values` may be views of `keys` (MLA)."""

    keys: PagedTensor
    values: PagedTensor
    values_in_keys: bool = False
    index: int = 0

    @classmethod
    def empty(
        cls,
        layout: KvLayout,
        num_blocks: int,
        block_size: int,
        device: torch.device,
        dtype: CacheDtype,
        index: int = 0,
    ) -> LayerCache:
        shape = (num_blocks, layout.entries(block_size), layout.num_heads)
        keys = PagedTensor.empty(*shape, layout.key_dim, device, dtype)
        if layout.values_in_keys:
            return cls(keys, keys.first_elements(layout.value_dim), True, index)
        values = PagedTensor.empty(*shape, layout.value_dim, device, dtype)
        return cls(keys, values, index=index)

    @property
    def parts(self) -> tuple[torch.Tensor, ...]:
        return self.keys.parts if self.values_in_keys else (*self.keys.parts, *self.values.parts)


NO_CACHE = LayerCache.empty(KvLayout(1, 0, 0), 1, 1, torch.device("cpu"), torch.float32)
"""The cache of a layer without keys and values."""


@dataclass(frozen=True, slots=True)
class StepInputs:
    """Input tensors of a step.

    Attributes:
        positions: int64 [tokens]; [3, tokens], temporal, height and width, with M-RoPE where they differ.
        slots: int64 [tokens], slot mapping: where each token's keys and values are written.
        batch: attention metadata: block tables, lengths, tree masks.
        aux_hidden_state_layers: layers whose input is returned with the final hidden states (EAGLE-3).
        states: states of the sequences of a model with constant state.
        embedded: tokens of images, whose embeddings are not the table's.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    batch: AttentionBatch
    adapters: AdapterRows = field(default_factory=dict)
    aux_hidden_state_layers: tuple[int, ...] = ()
    states: StateBatch = NO_STATES
    scored: Sequence[ScoredSpan] = ()
    embedded: EmbeddedRows | None = None


@dataclass(frozen=True, slots=True)
class Step:
    """Per-step data shared by all layers: inputs, cos/sin of each RoPE, kernels.

    `cache_positions` differ from `inputs.positions` with StreamingLLM only; `sink_cos_sin` rotates the
    sink queries, and is empty without sink tokens. `per_layer_inputs` are [tokens, layers, width] or None.
    `states` are those of layers with a recurrence.
    """

    inputs: StepInputs
    cache_positions: torch.Tensor
    cos_sin: Sequence[tuple[torch.Tensor, torch.Tensor]]
    attend: AttentionKernel
    sink_cos_sin: Sequence[tuple[torch.Tensor, torch.Tensor]] = ()
    rope_and_cache: RopeAndCacheKernel = field(default_factory=TorchRopeAndCache)
    per_layer_inputs: torch.Tensor | None = None
    states: StepStates = NO_STEP_STATES


@dataclass(frozen=True, slots=True)
class Rotation:
    """RoPE of a layer: index into the step's cos/sin, and whether pairs are interleaved (GPT-J)."""

    index: int
    interleaved: bool

    def __call__(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        return self._rotate(x, step.cos_sin)

    def sink_queries(self, x: torch.Tensor, step: Step) -> torch.Tensor | None:
        return self._rotate(x, step.sink_cos_sin) if step.sink_cos_sin else None

    def _rotate(
        self, x: torch.Tensor, cos_sin: Sequence[tuple[torch.Tensor, torch.Tensor]]
    ) -> torch.Tensor:
        cos, sin = cos_sin[self.index]
        if self.interleaved:
            x = interleaved_to_halves(x, cos.shape[-1])
        return apply_rotary_emb(x, cos, sin)


@dataclass(frozen=True, slots=True)
class HeadAttention(Weights):
    """Grouped-query attention (Ainslie et al., 2023).

    Attributes:
        qkv: stacked QKV projection; with `grouped`, stacked per KV head.
        query_norm, key_norm: QK-norm, of each head or, with `norm_whole`, of all heads.
        norm_after_rotation: QK-norm follows RoPE.
        temperature: attention temperature by position (Llama 4).
        value_norm: norm of each head of the values.
        keys_as_values: `qkv` projects no values: they are the keys, before norm and RoPE.
        kv_scales: calibrated scales of an fp8 KV cache, of keys and of values.
        gated: `qkv` projects a gate next to each query head; its sigmoid weighs the head's output.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    qkv: Projection
    output: Projection
    rule: AttentionRule
    rotation: Rotation | None
    query_norm: Norm | ShardedNorm | None = None
    key_norm: Norm | ShardedNorm | None = None
    norm_whole: bool = False
    norm_after_rotation: bool = False
    temperature: Temperature | None = None
    grouped: bool = False
    value_norm: Norm | None = None
    keys_as_values: bool = False
    kv_scales: KvScales | None = None
    gated: bool = False

    @property
    def weight_bytes(self) -> int:
        total = self.qkv.weight_bytes + self.output.weight_bytes
        total += sum(n.weight_bytes for n in (self.query_norm, self.key_norm) if n is not None)
        return total + (0 if self.rule.sinks is None else self.rule.sinks.nbytes)

    @property
    def activation_quant(self) -> ActivationQuant | None:
        return self.qkv.activation_quant

    def __call__(self, x: Rows, step: Step, cache: LayerCache) -> torch.Tensor:
        adapters = step.inputs.adapters
        qkv = self.qkv(x, adapters)
        if not self.gated:
            return self.output(self._heads(qkv, step, cache), adapters)
        heads = qkv.unflatten(-1, (-1, self.head_dim))
        pairs, rest = heads[:, : 2 * self.num_heads], heads[:, 2 * self.num_heads :]
        queries, gate = pairs.unflatten(1, (-1, 2)).unbind(2)
        qkv = torch.cat([queries, rest], dim=1).flatten(1)
        mixed = self._heads(qkv, step, cache).view_as(gate) * gate.sigmoid()
        return self.output(mixed.flatten(1), adapters)

    def _heads(self, qkv: torch.Tensor, step: Step, cache: LayerCache) -> torch.Tensor:
        """Attend with the projections: [tokens, heads * head_dim]; fills the cache."""
        if self.norm_whole:
            qkv = self._with_whole_norms(qkv)
        if self.value_norm is not None or self.keys_as_values:
            qkv = self._with_values(qkv)
        wide = isinstance(step.rope_and_cache, TakesWideWeights)
        norms = self._head_norms(qkv.dtype, wide=wide)
        key_scale, value_scale = self.kv_scales or (None, None)
        rotation = self.rotation
        is_plain = rotation is not None and not rotation.interleaved and self.temperature is None
        is_normed = self.norm_whole or self.query_norm is None or norms is not None
        # The fused kernels compute the scale of each vector.
        is_fused = not (step.sink_cos_sin or self.grouped or cache.keys.takes(key_scale))
        if is_fused and is_plain and is_normed:
            assert rotation is not None
            stacked = qkv.view(-1, self.num_heads + 2 * self.num_kv_heads, self.head_dim)
            cos, sin = step.cos_sin[rotation.index]
            written = cache.keys, cache.values, step.inputs.slots
            call = RopeCall(stacked, self.num_heads, cos, sin, *written, norms)
            queries = step.rope_and_cache(call)
            self._score_keys(queries, step, cache)
            mixed = step.attend(queries, cache.keys, cache.values, step.inputs.batch, self.rule)
            return mixed.flatten(1)
        queries, keys, values = self._split(qkv)
        by_head = not self.norm_whole
        if by_head and not self.norm_after_rotation:
            queries, keys = _normed(queries, self.query_norm), _normed(keys, self.key_norm)
        sink_queries = None
        if rotation is not None:
            sink_queries = rotation.sink_queries(queries, step)
            queries, keys = rotation(queries, step), rotation(keys, step)
        if by_head and self.norm_after_rotation:
            queries, keys = _normed(queries, self.query_norm), _normed(keys, self.key_norm)
            if sink_queries is not None:
                sink_queries = _normed(sink_queries, self.query_norm)
        if (scaling := self.temperature) is not None:
            steps = ((step.cache_positions.float() + scaling.first) / scaling.floor).floor()
            factor = steps.log1p() * scaling.weight + 1.0
            queries = (queries * factor[:, None, None]).to(queries.dtype)
        cache.keys.write(keys, step.inputs.slots, key_scale)
        cache.values.write(values, step.inputs.slots, value_scale)
        queries = cache.keys.rescaled(queries, key_scale)
        if sink_queries is not None:
            sink_queries = cache.keys.rescaled(sink_queries, key_scale)
        self._score_keys(queries, step, cache)
        mixed = step.attend(
            queries, cache.keys, cache.values, step.inputs.batch, self.rule, sink_queries
        )
        return cache.values.rescaled(mixed, value_scale).flatten(1)

    def _score_keys(self, queries: torch.Tensor, step: Step, cache: LayerCache) -> None:
        for span in step.inputs.scored:
            add_key_scores(queries, cache.keys, self.rule, span, cache.index)

    def _with_whole_norms(self, qkv: torch.Tensor) -> torch.Tensor:
        width, kv_width = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        queries, keys, values = qkv.split([width, kv_width, kv_width], dim=-1)
        queries = _normed(queries.contiguous(), self.query_norm)
        return torch.cat([queries, _normed(keys.contiguous(), self.key_norm), values], dim=-1)

    def _with_values(self, qkv: torch.Tensor) -> torch.Tensor:
        """QKV with its values: the keys where it has none, and normed."""
        width = self.num_kv_heads * self.head_dim
        values = qkv[:, -width:].reshape(-1, self.num_kv_heads, self.head_dim)
        kept = qkv if self.keys_as_values else qkv[:, :-width]
        return torch.cat([kept, _normed(values, self.value_norm).flatten(1)], dim=-1)

    def _head_norms(self, dtype: torch.dtype, *, wide: bool) -> HeadNorms | None:
        """The QK-norm, where the fused RoPE kernel can apply it; `wide`: with float32 weights too."""
        query, key = self.query_norm, self.key_norm
        if self.norm_whole or self.norm_after_rotation:
            return None
        if not isinstance(query, Norm) or not isinstance(key, Norm):
            return None
        if query.weight is None or key.weight is None:
            return None
        dtypes = (dtype, torch.float32) if wide else (dtype,)
        same = query.eps == key.eps and query.weight.dtype is key.weight.dtype
        same = same and query.weight.dtype in dtypes
        shapes = query.weight.shape == key.weight.shape == (self.head_dim,)
        plain = shapes and not (query.centered or key.centered)
        return HeadNorms(query.weight, key.weight, query.eps) if same and plain else None

    def _split(self, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values, [tokens, heads, head_dim] each."""
        heads, kv_heads = self.num_heads, self.num_kv_heads
        if self.grouped:
            groups = qkv.view(-1, kv_heads, heads // kv_heads + 2, self.head_dim)
            queries, keys, values = groups.split([heads // kv_heads, 1, 1], dim=2)
            return queries.flatten(1, 2), keys.squeeze(2), values.squeeze(2)
        stacked = qkv.view(-1, heads + 2 * kv_heads, self.head_dim)
        queries, keys, values = stacked.split([heads, kv_heads, kv_heads], dim=1)
        return queries, keys, values


@dataclass(frozen=True, slots=True)
class LatentAttention(Weights):
    """Multi-head latent attention (MLA) with absorbed up-projections: the cached latent is never expanded.

    A token caches its normed latent and one rotated key, shared by all heads. Queries are projected into the
    latent space and outputs out of it, so that all heads attend to the latent as one KV head (MQA). Two
    linears with different scales read the input, and each quantizes it itself.

    Attributes:
        query: hidden → heads x (nope + rope), or → rank where `query_up` follows.
        latent: hidden → kv_rank + rope; None: `query` gives it too, after the queries.
        key_up: [heads, nope, kv_rank]; value_up: [heads, value_dim, kv_rank].
        kv_scales: calibrated scales of an fp8 cache of latents; the first one is its.

    Source: DeepSeek-AI, "DeepSeek-V2" (arXiv:2405.04434), section 2.1.
    """

    num_heads: int
    nope_dim: int
    query: Projection
    query_norm: Norm | None
    query_up: Projection | None
    latent: Projection | None
    latent_norm: Norm
    key_up: torch.Tensor
    value_up: torch.Tensor
    output: Projection
    rule: AttentionRule
    rotation: Rotation
    kv_scales: KvScales | None = None
    _kernel: TritonLatent | None = field(init=False, default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        up = self.key_up
        kernel_query = RowKernelQuery(up.device.type, up.dtype, up.shape[2])
        object.__setattr__(self, "_kernel", LATENT.select(kernel_query).run())

    @property
    def weight_bytes(self) -> int:
        parts = (self.query, self.query_norm, self.query_up, self.latent, self.latent_norm)
        total = self.key_up.nbytes + self.value_up.nbytes + self.output.weight_bytes
        return total + sum(part.weight_bytes for part in parts if part is not None)

    def __call__(self, x: Rows, step: Step, cache: LayerCache) -> torch.Tensor:
        adapters = step.inputs.adapters
        queries, latent = self.query(x, adapters), None
        if self.latent is not None:
            latent = self.latent(x, adapters)
        elif self.query_norm is not None:
            queries, latent = queries.split(
                [self.query_norm.size, queries.shape[1] - self.query_norm.size], dim=1
            )
        assert latent is not None, "a stacked projection has a query norm"
        scale = None if self.kv_scales is None else self.kv_scales[0]
        # The fused kernels rotate once, and compute the scale of each vector.
        is_fused = self._kernel is not None and not (step.sink_cos_sin or cache.keys.takes(scale))
        attend = self._fused if is_fused else self._composed
        return self.output(attend(queries, latent, step, cache), adapters)

    def _fused(
        self, queries: torch.Tensor, latent: torch.Tensor, step: Step, cache: LayerCache
    ) -> torch.Tensor:
        """Attend as `_composed` does, in the fused kernels."""
        kernel, cos_sin = self._kernel, step.cos_sin[self.rotation.index]
        assert kernel is not None and self.latent_norm.weight is not None
        turns = cos_sin, self.rotation.interleaved
        latent_norm, query_norm = (self.latent_norm.weight, self.latent_norm.eps), None
        if self.query_norm is not None and self.query_norm.weight is not None:
            query_norm = (self.query_norm.weight, self.query_norm.eps)
        normed = kernel.write(
            latent,
            latent_norm,
            None if query_norm is None else queries,
            query_norm,
            *turns,
            cache.keys,
            step.inputs.slots,
        )
        if normed is not None and self.query_up is not None:
            queries = self.query_up(normed, step.inputs.adapters)
        heads = queries.view(len(queries), self.num_heads, -1)
        absorbed = torch.bmm(heads[..., : self.nope_dim].transpose(0, 1), self.key_up)
        rotated = kernel.queries(absorbed, heads[..., self.nope_dim :], *turns)
        mixed = step.attend(rotated, cache.keys, cache.values, step.inputs.batch, self.rule)
        out = mixed.new_empty(len(mixed), self.num_heads, self.value_up.shape[1])
        # Written in the order that the output projection reads.
        torch.bmm(mixed.transpose(0, 1), self.value_up.transpose(1, 2), out=out.transpose(0, 1))
        return out.flatten(1)

    def _composed(
        self, queries: torch.Tensor, latent: torch.Tensor, step: Step, cache: LayerCache
    ) -> torch.Tensor:
        """Attend with the projections: [tokens, heads * value_dim]; fills the cache."""
        if self.query_norm is not None and self.query_up is not None:
            queries = self.query_up(self.query_norm(queries), step.inputs.adapters)
        queries = queries.view(len(queries), self.num_heads, -1)
        nope_queries, rope_queries = queries[..., : self.nope_dim], queries[..., self.nope_dim :]
        rank = self.latent_norm.size
        key = self.rotation(latent[:, None, rank:], step)
        latent_and_key = torch.cat([self.latent_norm(latent[:, :rank])[:, None], key], dim=-1)
        scale = None if self.kv_scales is None else self.kv_scales[0]
        cache.keys.write(latent_and_key, step.inputs.slots, scale)
        absorbed = torch.einsum("thn,hnr->thr", nope_queries, self.key_up)
        sink_queries = self.rotation.sink_queries(rope_queries, step)
        if sink_queries is not None:
            sink_queries = torch.cat([absorbed, sink_queries], dim=-1)
            sink_queries = cache.keys.rescaled(sink_queries, scale)
        queries = torch.cat([absorbed, self.rotation(rope_queries, step)], dim=-1)
        queries = cache.keys.rescaled(queries, scale)
        mixed = step.attend(
            queries, cache.keys, cache.values, step.inputs.batch, self.rule, sink_queries
        )
        mixed = cache.keys.rescaled(mixed, scale)
        return torch.einsum("thr,hvr->thv", mixed, self.value_up).flatten(1)


def _normed(x: torch.Tensor, norm: Norm | ShardedNorm | None) -> torch.Tensor:
    return x if norm is None else norm(x)


@dataclass(frozen=True, slots=True)
class SharedAttention(Weights):
    """Grouped-query attention on the cache of an earlier layer, which has written this step's keys. Source:
    Brandon et al., "Cross-Layer Attention" (arXiv:2405.12981)."""

    num_heads: int
    head_dim: int
    query: Projection
    output: Projection
    rule: AttentionRule
    rotation: Rotation
    query_norm: Norm | None
    kv_scales: KvScales | None

    @property
    def activation_quant(self) -> ActivationQuant | None:
        return self.query.activation_quant

    def __call__(self, x: Rows, step: Step, cache: LayerCache) -> torch.Tensor:
        adapters = step.inputs.adapters
        queries = self.query(x, adapters).view(-1, self.num_heads, self.head_dim)
        if self.query_norm is not None:
            queries = self.query_norm(queries)
        key_scale, value_scale = self.kv_scales or (None, None)
        queries = cache.keys.rescaled(self.rotation(queries, step), key_scale)
        mixed = step.attend(queries, cache.keys, cache.values, step.inputs.batch, self.rule)
        return self.output(cache.values.rescaled(mixed, value_scale).flatten(1), adapters)
