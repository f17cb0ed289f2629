"""Forward passes of transformers models over the paged KV cache, all sequences packed into one batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from transformers import AttentionInterface

from ...kernels.attention.dispatch import PAGED_ATTENTION, AttentionKernelQuery
from ...kernels.attention.paged_attention import AttentionRule
from ..layers.attention import LayerCache, StepInputs
from ..spec.spec import KvLayout

PAGED = "llmopt_paged"
"""Name of the paged attention in transformers' `AttentionInterface`."""


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


class _Layouts:
    """Records each layer's KV layout in a dry run; its attention returns zeros."""

    def __init__(self) -> None:
        self.by_layer: dict[int, KvLayout] = {}

    def attend(
        self,
        layer: int,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        rule: AttentionRule,
    ) -> torch.Tensor:
        shared = keys.data_ptr() == values.data_ptr() and keys.stride() == values.stride()
        self.by_layer[layer] = KvLayout(keys.shape[1], keys.shape[2], values.shape[2], shared)
        return queries.new_zeros(*queries.shape[:2], values.shape[2])


class _PagedStep:
    """Paged attention of a step: writes a layer's keys and values to its blocks, then attends over them."""

    def __init__(self, inputs: StepInputs, caches: Sequence[LayerCache]) -> None:
        self._inputs, self._caches = inputs, caches

    def attend(
        self,
        layer: int,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        rule: AttentionRule,
    ) -> torch.Tensor:
        cache = self._caches[layer]
        kernel_query = AttentionKernelQuery(
            queries.device.type,
            queries.dtype,
            cache.keys.dim,
            cache.values.dim,
            self._inputs.batch.has_trees,
        )
        kernel = PAGED_ATTENTION.select(kernel_query).run
        cache.keys.write(keys, self._inputs.slots)
        if not cache.values_in_keys:
            cache.values.write(values, self._inputs.slots)
        return kernel(queries, cache.keys, cache.values, self._inputs.batch, rule)


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
    paged: PagedAttention | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attention function for transformers: [1, heads, tokens, head_dim] in, [1, tokens, heads, ..] out.

    Raises:
        ValueError: the module passes an attention mask or bias.
    """
    if paged is None or attention_mask is not None or query.shape[0] != 1:
        raise ValueError("its attention needs a mask beyond causal positions")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    rule = AttentionRule(scale, window=sliding_window, softcap=softcap, sinks=s_aux)
    queries, keys, values = (x[0].transpose(0, 1) for x in (query, key, value))
    return paged.attend(module.layer_idx, queries, keys, values, rule)[None], None


AttentionInterface.register(PAGED, paged_attention)


class PackedForward:
    """One forward pass per step over the tokens of all sequences, concatenated (variable-length batch).

    Raises:
        ValueError: the model does not support transformers' `AttentionInterface`, or has other layer types
            than full and sliding-window attention.
    """

    def __init__(self, model: Any, own_attention: str) -> None:
        kinds = set(getattr(model.config, "layer_types", None) or ())
        exchangeable = model._supports_attention_backend and model._supports_flash_attn
        if not exchangeable or kinds - {"full_attention", "sliding_attention"}:
            raise ValueError("its attention cannot be replaced")
        self._model = model
        model.set_attn_implementation(PAGED)

    def layouts(self, tokens: torch.Tensor) -> tuple[tuple[KvLayout, ...], tuple[()]]:
        """Each layer's KV layout, from a dry run over `tokens`, and no state."""
        layouts = _Layouts()
        self._run(tokens, torch.arange(len(tokens), device=tokens.device), layouts)
        return tuple(layouts.by_layer[layer] for layer in range(len(layouts.by_layer))), ()

    def __call__(self, inputs: StepInputs, caches: Sequence[LayerCache]) -> torch.Tensor:
        return self._run(inputs.token_ids, inputs.positions, _PagedStep(inputs, caches))

    def _run(
        self, tokens: torch.Tensor, positions: torch.Tensor, paged: PagedAttention
    ) -> torch.Tensor:
        return self._model(
            input_ids=tokens[None], position_ids=positions[None], use_cache=False, paged=paged
        ).logits[0]
