"""Variable-length batches through transformers' modules: paged attention in place of their own.

The attention function and the mask function are registered with transformers under one name. A dry run
records what each layer caches, and the mask that the model's own code makes for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from transformers import AttentionInterface
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.masking_utils import AttentionMaskInterface

from ...kernels.attention.dispatch import PAGED_ATTENTION, AttentionKernelQuery
from ...kernels.attention.paged_attention import AttentionRule
from ..layers.attention import LayerCache, StepInputs
from ..layers.embedded_rows import EmbeddedRows
from ..spec.spec import KvLayout
from .masks import LayerMask, layer_mask, recorded_mask
from .text_model import text_decoder, token_arguments

PAGED = "llmopt_paged"
"""Name of the paged attention among transformers' attention and mask functions."""
_ATTRIBUTE = "llmopt_paged_attention"


class PagedAttention(Protocol):
    """What the attention of a layer calls, with tensors [tokens, heads, head_dim]."""

    def attend(
        self,
        layer: int,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        rule: AttentionRule,
    ) -> torch.Tensor:
        """Cache `keys` and `values` of the step's tokens, and attend over what is cached."""
        ...


@dataclass(frozen=True, slots=True)
class _CacheOfLayer:
    """Index of the cache that a layer reads, and whether the layer fills it.

    A layer that shares keys and values (Gemma 3n) reads the cache of the layer that computed them.
    """

    index: int
    is_filled: bool


class _DryRun:
    """Records each layer's cache and the KV layouts; its attention returns zeros."""

    def __init__(self) -> None:
        self.caches: dict[int, _CacheOfLayer] = {}
        self.layouts: list[KvLayout] = []
        self._keys: list[torch.Tensor] = []

    def attend(
        self,
        layer: int,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        rule: AttentionRule,
    ) -> torch.Tensor:
        if layer in self.caches:
            raise ValueError("a layer attends more than once")
        shared = next((i for i, held in enumerate(self._keys) if _is_same(held, keys)), None)
        if shared is None:
            self._keys.append(keys)
            begins_keys = keys.data_ptr() == values.data_ptr() and keys.stride() == values.stride()
            self.layouts.append(
                KvLayout(keys.shape[1], keys.shape[2], values.shape[2], begins_keys)
            )
        index = len(self._keys) - 1 if shared is None else shared
        self.caches[layer] = _CacheOfLayer(index, shared is None)
        return queries.new_zeros(*queries.shape[:2], values.shape[2])


class _Step:
    """Paged attention of a step: writes a layer's keys and values to its blocks, then attends over them."""

    def __init__(
        self,
        inputs: StepInputs,
        caches: Sequence[LayerCache],
        of_layers: dict[int, _CacheOfLayer],
    ) -> None:
        self._inputs, self._caches, self._of_layers = inputs, caches, of_layers

    def attend(
        self,
        layer: int,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        rule: AttentionRule,
    ) -> torch.Tensor:
        place = self._of_layers[layer]
        cache = self._caches[place.index]
        if place.is_filled:
            cache.keys.write(keys, self._inputs.slots)
            if not cache.values_in_keys:
                cache.values.write(values, self._inputs.slots)
        kernel_query = AttentionKernelQuery(
            queries.device.type,
            queries.dtype,
            cache.keys.dim,
            cache.values.dim,
            mask="tree" if self._inputs.batch.has_trees else "causal",
            stored=cache.keys.codes.dtype,
        )
        kernel = PAGED_ATTENTION.select(kernel_query).run
        return kernel(queries, cache.keys, cache.values, self._inputs.batch, rule)


@dataclass(slots=True)
class _Attention:
    """What the attention function runs at present, and each layer's mask; every attention module holds it."""

    run: PagedAttention | None = None
    masks: dict[int, LayerMask] = field(default_factory=dict)


def paged_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attention function for transformers: [1, heads, tokens, head_dim] in, [1, tokens, heads, ..] out.

    Raises:
        ValueError: the module gives a mask or a bias that paged attention does not have.
    """
    attention: _Attention | None = getattr(module, _ATTRIBUTE, None)
    if attention is None or attention.run is None or query.shape[0] != 1:
        raise ValueError("its attention is not that of a decoder's layer")
    if position_bias is not None:
        raise ValueError("its attention has a bias")
    layer = module.layer_idx
    if layer not in attention.masks:
        attention.masks[layer] = layer_mask(attention_mask, sliding_window)
    mask = attention.masks[layer]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    rule = AttentionRule(scale, mask.window, chunk=mask.chunk, softcap=softcap, sinks=s_aux)
    queries, keys, values = (x[0].transpose(0, 1) for x in (query, key, value))
    return attention.run.attend(layer, queries, keys, values, rule)[None], None


AttentionInterface.register(PAGED, paged_attention)
AttentionMaskInterface.register(PAGED, recorded_mask)


class PackedForward:
    """One forward pass per step over the tokens of all sequences, concatenated (variable-length batch).

    Raises:
        ValueError: the model does not support transformers' `AttentionInterface`.
    """

    def __init__(self, model: Any, _: str) -> None:
        decoder = text_decoder(model)
        if not (decoder._supports_attention_backend and decoder._supports_flash_attn):
            raise ValueError("its attention cannot be replaced")
        self._model = model
        self._attention = _Attention()
        self._caches: dict[int, _CacheOfLayer] = {}
        for module in decoder.modules():
            if isinstance(getattr(module, "layer_idx", None), int):
                setattr(module, _ATTRIBUTE, self._attention)
        decoder.set_attn_implementation(PAGED)

    def layouts(self, tokens: torch.Tensor) -> tuple[tuple[KvLayout, ...], tuple[()]]:
        """The KV layout of each layer with a cache of its own, from a dry run over `tokens`; no state.

        Raises:
            ValueError: a mask other than causal, sliding-window or chunked.
        """
        dry = _DryRun()
        self._run(tokens, torch.arange(len(tokens), device=tokens.device), dry)
        if not dry.caches:
            raise ValueError("its attention cannot be replaced")
        self._caches = dry.caches
        return tuple(dry.layouts), ()

    def __call__(self, inputs: StepInputs, caches: Sequence[LayerCache]) -> torch.Tensor:
        step = _Step(inputs, caches, self._caches)
        return self._run(inputs.token_ids, inputs.positions, step, inputs.embedded)

    def _run(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        paged: PagedAttention,
        embedded: EmbeddedRows | None = None,
    ) -> torch.Tensor:
        self._attention.run = paged
        try:
            return self._model(
                **token_arguments(self._model, tokens, embedded),
                # All ones: without it the mask functions would look for sequences in the positions.
                attention_mask=torch.ones_like(tokens)[None],
                position_ids=positions[None],
                use_cache=False,
            ).logits[0]
        finally:
            self._attention.run = None


def has_attention_alone(cache: Any) -> bool:
    """Whether a model's own cache holds the keys and values of attention, and nothing else.

    Layers that read another layer's keys and values have no tensors there.
    """
    layers = getattr(cache, "layers", None) or ()
    holders = {
        type(layer) for layer in layers if any(torch.is_tensor(x) for x in vars(layer).values())
    }
    return bool(holders) and holders <= {DynamicLayer, DynamicSlidingWindowLayer}


def _is_same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.stride() == b.stride()
