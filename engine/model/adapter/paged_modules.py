"""Forward passes of transformers models over the paged KV cache: packed batch, or sequence by sequence."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from transformers import AttentionInterface
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer

from ...kernels.attention.dispatch import PAGED_ATTENTION, AttentionKernelQuery
from ...kernels.attention.paged_attention import AttentionRule
from ...kernels.attention.paged_tensor import PagedTensor
from ..layers.attention import LayerCache, StepInputs
from ..spec.spec import KvLayout

PAGED = "llmopt_paged"
"""Name of the paged attention in transformers' `AttentionInterface`."""


class _Layouts:
    """Records each layer's KV layout in a dry run; its attention returns zeros."""

    def __init__(self) -> None:
        self.by_layer: dict[int, KvLayout] = {}

    def attend(
        self, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, _: Any
    ) -> torch.Tensor:
        self.by_layer[layer] = KvLayout(keys.shape[1], keys.shape[2], values.shape[2])
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
    paged: _PagedStep | _Layouts | None = None,
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

    def layouts(self, tokens: torch.Tensor) -> tuple[KvLayout, ...]:
        """Each layer's KV layout, from a dry run over `tokens`."""
        layouts = _Layouts()
        self._run(tokens, torch.arange(len(tokens), device=tokens.device), layouts)
        return tuple(layouts.by_layer[layer] for layer in range(len(layouts.by_layer)))

    def __call__(self, inputs: StepInputs, caches: Sequence[LayerCache]) -> torch.Tensor:
        return self._run(inputs.token_ids, inputs.positions, _PagedStep(inputs, caches))

    def _run(
        self, tokens: torch.Tensor, positions: torch.Tensor, paged: _PagedStep | _Layouts
    ) -> torch.Tensor:
        return self._model(
            input_ids=tokens[None], position_ids=positions[None], use_cache=False, paged=paged
        ).logits[0]


class SequentialForward:
    """One forward pass per sequence, over a `Cache` that reads and writes the sequence's blocks."""

    def __init__(self, model: Any, own_attention: str) -> None:
        self._model = model
        self._takes = set(inspect.signature(model.forward).parameters)
        model.set_attn_implementation(own_attention)

    def layouts(self, tokens: torch.Tensor) -> None:
        """None: the layouts are those of the model's own cache."""

    def __call__(self, inputs: StepInputs, caches: Sequence[LayerCache]) -> torch.Tensor:
        batch = inputs.batch
        runs = [(s.begin, s.end, s.num_cached, s.block_ids) for s in batch.spans]
        if (group := batch.decode) is not None:
            tables = group.block_ids.view(group.rows.numel(), -1)
            for row, length, table in zip(
                group.rows.tolist(), group.lengths.tolist(), tables, strict=True
            ):
                runs.append((row, row + 1, length, table[: -(-length // batch.block_size)]))
        scores: list[torch.Tensor] = []
        for begin, end, length, table in sorted(runs, key=lambda run: run[0]):
            rows = slice(begin, end)
            layers: list[Any] = [
                _PagedLayer(cache, inputs.slots[rows], table, length - (end - begin), length)
                for cache in caches
            ]
            arguments = {
                "input_ids": inputs.token_ids[None, rows],
                "position_ids": inputs.positions[None, rows],
                "attention_mask": inputs.positions.new_ones(1, length),
                "past_key_values": Cache(layers=layers),
                "use_cache": True,
            }
            named = {name: value for name, value in arguments.items() if name in self._takes}
            scores.append(self._model(**named).logits[0])
        return torch.cat(scores)


class _PagedLayer(DynamicLayer):
    """The blocks of one sequence in one layer, behind transformers' cache-layer interface.

    It holds `held` tokens before the step, `length` after it.
    """

    def __init__(
        self, cache: LayerCache, slots: torch.Tensor, table: torch.Tensor, held: int, length: int
    ) -> None:
        super().__init__()
        self._cache, self._slots, self._table = cache, slots, table
        self._held, self._length = held, length

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self._cache.keys.write(key_states[0].transpose(0, 1), self._slots)
        self._cache.values.write(value_states[0].transpose(0, 1), self._slots)
        dtype = key_states.dtype
        return self._gathered(self._cache.keys, dtype), self._gathered(self._cache.values, dtype)

    def get_seq_length(self) -> int:
        return self._held

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._length, 0

    def _gathered(self, blocks: PagedTensor, dtype: torch.dtype) -> torch.Tensor:
        """Keys or values of the sequence, [1, heads, length, head_dim]."""
        held = blocks.read(self._table, dtype).flatten(0, 1)
        return held[None, : self._length].transpose(1, 2)


def cached_layouts(cache: Any) -> tuple[KvLayout, ...] | None:
    """Each layer's KV layout in a model's own cache; None if it is no KV cache."""
    layers = getattr(cache, "layers", None)
    if not layers or any(type(x) not in (DynamicLayer, DynamicSlidingWindowLayer) for x in layers):
        return None
    if any(layer.keys is None or layer.keys.dim() != 4 for layer in layers):
        return None
    return tuple(
        KvLayout(layer.keys.shape[1], layer.keys.shape[3], layer.values.shape[3])
        for layer in layers
    )
