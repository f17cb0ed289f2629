"""The two kinds of attention: over heads of keys and values, and over a latent that all heads share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from ...kernels.activations.quantized_activations import ActivationQuant, Rows
from ...kernels.attention.paged_attention import AttentionBatch, AttentionKernel, AttentionRule
from ...kernels.attention.paged_tensor import PagedTensor
from ...kernels.elementwise.dispatch import RopeAndCacheKernel, TorchRopeAndCache
from ...kernels.elementwise.head_norms import HeadNorms
from ...kernels.elementwise.rotary import apply_rotary_emb, interleaved_to_halves
from ..spec.spec import KvLayout, Temperature
from .norm import Norm
from .projection import AdapterRows, Projection


@dataclass(frozen=True, slots=True)
class LayerCache:
    """What one layer keeps: keys and values.

    `values` may be a view of the front of `keys`: whoever writes keys has then written both.
    """

    keys: PagedTensor
    values: PagedTensor
    values_in_keys: bool = False

    @classmethod
    def zeros(
        cls,
        layout: KvLayout,
        num_blocks: int,
        block_size: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> LayerCache:
        """An empty one, with elements of `dtype`."""
        shape = (num_blocks, block_size, layout.num_heads)
        keys = PagedTensor.zeros(*shape, layout.key_dim, device, dtype)
        if layout.values_in_keys:
            return cls(keys, keys.first_elements(layout.value_dim), True)
        return cls(keys, PagedTensor.zeros(*shape, layout.value_dim, device, dtype))

    @property
    def parts(self) -> tuple[torch.Tensor, ...]:
        """The tensors that take room."""
        return self.keys.parts if self.values_in_keys else (*self.keys.parts, *self.values.parts)


@dataclass(frozen=True, slots=True)
class StepInputs:
    """One step as tensors.

    Attributes:
        token_ids, positions: int64 [tokens].
        slots: int64 [tokens], where each token's keys and values go.
        batch: what each token may see.
        adapters: int64, the tokens of each adapter that somebody asks for; None: all tokens.
        taps: layers whose input is asked for beside the final hidden states.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    batch: AttentionBatch
    adapters: AdapterRows = field(default_factory=dict)
    aux_hidden_state_layers: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Step:
    """What every layer of a step needs: its inputs, the angles of each rotation, the kernels.

    `cache_positions` are the positions within what is in sight, other than `inputs.positions` where a sequence has
    no end; `sink_cos_sin` are the angles at which queries then meet its first tokens.
    """

    inputs: StepInputs
    cache_positions: torch.Tensor
    cos_sin: Sequence[tuple[torch.Tensor, torch.Tensor]]
    attend: AttentionKernel
    sink_cos_sin: Sequence[tuple[torch.Tensor, torch.Tensor]] = ()
    rope_and_cache: RopeAndCacheKernel = field(default_factory=TorchRopeAndCache)


@dataclass(frozen=True, slots=True)
class Rotation:
    """Which of the step's angles a layer turns by, and which elements make a pair."""

    index: int
    interleaved: bool

    def __call__(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        return self._rotate(x, step.cos_sin)

    def sink_queries(self, x: torch.Tensor, step: Step) -> torch.Tensor | None:
        """Queries as they meet the first tokens; None where no first tokens are kept."""
        return self._rotate(x, step.sink_cos_sin) if step.sink_cos_sin else None

    def _rotate(
        self, x: torch.Tensor, cos_sin: Sequence[tuple[torch.Tensor, torch.Tensor]]
    ) -> torch.Tensor:
        return apply_rotary_emb(
            interleaved_to_halves(x) if self.interleaved else x, *cos_sin[self.index]
        )


@dataclass(frozen=True, slots=True)
class HeadAttention:
    """Grouped-query attention (Ainslie et al., 2023).

    Attributes:
        qkv: queries, keys and values, stacked; with `grouped` KV head by KV head.
        query_norm, key_norm: before the rotation.
        turned_norm: of queries and keys after the rotation.
        temperature: of layers whose scores grow with the position.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    qkv: Projection
    output: Projection
    rule: AttentionRule
    rotation: Rotation | None
    query_norm: Norm | None = None
    key_norm: Norm | None = None
    rotated_norm: Norm | None = None
    temperature: Temperature | None = None
    grouped: bool = False

    @property
    def weight_bytes(self) -> int:
        total = self.qkv.weight_bytes + self.output.weight_bytes
        total += sum(n.weight_bytes for n in (self.query_norm, self.key_norm) if n is not None)
        return total + (0 if self.rule.sinks is None else self.rule.sinks.nbytes)

    @property
    def activation_quant(self) -> ActivationQuant | None:
        """How its input may be rounded before it comes."""
        return self.qkv.activation_quant

    def __call__(self, x: Rows, step: Step, cache: LayerCache) -> torch.Tensor:
        adapters = step.inputs.adapters
        qkv = self.qkv(x, adapters)
        norms = self._head_norms(qkv.dtype)
        if self._is_fusable_rope(norms) and not step.sink_cos_sin:
            assert self.rotation is not None
            stacked = qkv.view(-1, self.num_heads + 2 * self.num_kv_heads, self.head_dim)
            cos_sin = step.cos_sin[self.rotation.index]
            queries = step.rope_and_cache(
                stacked,
                self.num_heads,
                *cos_sin,
                cache.keys,
                cache.values,
                step.inputs.slots,
                norms,
            )
            mixed = step.attend(queries, cache.keys, cache.values, step.inputs.batch, self.rule)
            return self.output(mixed.flatten(1), adapters)
        queries, keys, values = self._split(qkv)
        if self.query_norm is not None and self.key_norm is not None:
            queries, keys = self.query_norm(queries), self.key_norm(keys)
        sink_queries = None
        if self.rotation is not None:
            sink_queries = self.rotation.sink_queries(queries, step)
            queries, keys = self.rotation(queries, step), self.rotation(keys, step)
        if self.rotated_norm is not None:
            queries, keys = self.rotated_norm(queries), self.rotated_norm(keys)
            sink_queries = None if sink_queries is None else self.rotated_norm(sink_queries)
        if self.temperature is not None:
            queries = _scale_by_position(queries, self.temperature, step.cache_positions)
        cache.keys.write(keys, step.inputs.slots)
        cache.values.write(values, step.inputs.slots)
        mixed = step.attend(
            queries, cache.keys, cache.values, step.inputs.batch, self.rule, sink_queries
        )
        return self.output(mixed.flatten(1), adapters)

    def _is_fusable_rope(self, norms: HeadNorms | None) -> bool:
        """Whether nothing happens to queries and keys but `norms` and the rotation."""
        rotation, others = self.rotation, (self.rotated_norm, self.temperature)
        is_normed = self.query_norm is None or norms is not None
        plain = rotation is not None and not rotation.interleaved and not self.grouped
        return plain and is_normed and others == (None, None)

    def _head_norms(self, dtype: torch.dtype) -> HeadNorms | None:
        """The norms of queries and keys, where a kernel for the rotation can do them on its way."""
        query, key = self.query_norm, self.key_norm
        if query is None or key is None or query.weight is None or key.weight is None:
            return None
        same = query.eps == key.eps and query.weight.dtype is key.weight.dtype is dtype
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
class LatentAttention:
    """Multi-head latent attention, in the form that never unpacks the cache.

    A token leaves its normed latent and one rotated key, shared by all heads. Queries are taken into the
    latent space and results out of it, so that the heads attend to the latent itself as one KV head.

    Attributes:
        query: hidden → heads x (nope + rope), or → rank where `query_up` follows.
        latent: hidden → kv_rank + rope.
        key_up: [heads, nope, kv_rank]; value_up: [heads, value_dim, kv_rank].

    Source: DeepSeek-AI, "DeepSeek-V2" (arXiv:2405.04434), section 2.1.
    """

    num_heads: int
    nope_dim: int
    query: Projection
    query_norm: Norm | None
    query_up: Projection | None
    latent: Projection
    latent_norm: Norm
    key_up: torch.Tensor
    value_up: torch.Tensor
    output: Projection
    rule: AttentionRule
    rotation: Rotation

    @property
    def weight_bytes(self) -> int:
        parts = (self.query, self.query_norm, self.query_up, self.latent, self.latent_norm)
        total = self.key_up.nbytes + self.value_up.nbytes + self.output.weight_bytes
        return total + sum(part.weight_bytes for part in parts if part is not None)

    @property
    def activation_quant(self) -> ActivationQuant | None:
        """Two linears with scales of their own read the input, so nobody else rounds it."""
        return None

    def __call__(self, x: Rows, step: Step, cache: LayerCache) -> torch.Tensor:
        adapters = step.inputs.adapters
        queries = self.query(x, adapters)
        if self.query_norm is not None and self.query_up is not None:
            queries = self.query_up(self.query_norm(queries), adapters)
        queries = queries.view(len(queries), self.num_heads, -1)
        plain, rope_queries = queries[..., : self.nope_dim], queries[..., self.nope_dim :]
        latent = self.latent(x, adapters)
        rank = self.latent_norm.size
        key = self.rotation(latent[:, None, rank:], step)
        latent_and_key = torch.cat([self.latent_norm(latent[:, :rank])[:, None], key], dim=-1)
        cache.keys.write(latent_and_key, step.inputs.slots)
        inward = torch.einsum("thn,hnr->thr", plain, self.key_up)
        sink_queries = self.rotation.sink_queries(rope_queries, step)
        if sink_queries is not None:
            sink_queries = torch.cat([inward, sink_queries], dim=-1)
        queries = torch.cat([inward, self.rotation(rope_queries, step)], dim=-1)
        mixed = step.attend(
            queries, cache.keys, cache.values, step.inputs.batch, self.rule, sink_queries
        )
        return self.output(torch.einsum("thr,hvr->thv", mixed, self.value_up).flatten(1), adapters)


Attention = HeadAttention | LatentAttention


def _scale_by_position(
    queries: torch.Tensor, temperature: Temperature, cache_positions: torch.Tensor
) -> torch.Tensor:
    steps = ((cache_positions.float() + 1.0) / temperature.floor).floor()
    factor = steps.log1p() * temperature.weight + 1.0
    return (queries * factor[:, None, None]).to(queries.dtype)
