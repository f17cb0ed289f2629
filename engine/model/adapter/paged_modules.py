"""Two ways to run a module of transformers over paged blocks: all sequences at once, or one by one."""

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
"""The name under which transformers knows this engine's attention."""


class _Layouts:
    """Notes what each layer would keep of a token, and attends to nothing."""

    def __init__(self) -> None:
        self.found: dict[int, KvLayout] = {}

    def attend(
        self, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, _: Any
    ) -> torch.Tensor:
        self.found[layer] = KvLayout(keys.shape[1], keys.shape[2], values.shape[2])
        return queries.new_zeros(*queries.shape[:2], values.shape[2])


class _PagedStep:
    """Writes what a layer brings into its blocks, and attends to what they hold."""

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
    """An attention function of transformers: [1, heads, tokens, head_dim] in, [1, tokens, heads, ..] out.

    Raises:
        ValueError: the module attends by a mask or a bias of its own.
    """
    if paged is None or attention_mask is not None or query.shape[0] != 1:
        raise ValueError("its attention is told more than positions can tell")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    rule = AttentionRule(scale, window=sliding_window, softcap=softcap, sinks=s_aux)
    queries, keys, values = (x[0].transpose(0, 1) for x in (query, key, value))
    return paged.attend(module.layer_idx, queries, keys, values, rule)[None], None


AttentionInterface.register(PAGED, paged_attention)


class PackedForward:
    """One pass for the whole step: the tokens of all sequences lie behind one another.

    Raises:
        ValueError: the model does not let its attention be exchanged, or tells it more than its
            arguments say.
    """

    def __init__(self, model: Any, own_attention: str) -> None:
        kinds = set(getattr(model.config, "layer_types", None) or ())
        exchangeable = model._supports_attention_backend and model._supports_flash_attn
        if not exchangeable or kinds - {"full_attention", "sliding_attention"}:
            raise ValueError("its attention is its own")
        self._model = model
        model.set_attn_implementation(PAGED)

    def layouts(self, tokens: torch.Tensor) -> tuple[KvLayout, ...]:
        """What each layer keeps of a token."""
        notes = _Layouts()
        self._run(tokens, torch.arange(len(tokens), device=tokens.device), notes)
        return tuple(notes.found[layer] for layer in range(len(notes.found)))

    def __call__(self, inputs: StepInputs, caches: Sequence[LayerCache]) -> torch.Tensor:
        return self._run(inputs.token_ids, inputs.positions, _PagedStep(inputs, caches))

    def _run(
        self, tokens: torch.Tensor, positions: torch.Tensor, paged: _PagedStep | _Layouts
    ) -> torch.Tensor:
        return self._model(
            input_ids=tokens[None], position_ids=positions[None], use_cache=False, paged=paged
        ).logits[0]


class SequentialForward:
    """One pass for each sequence, over a cache object that reads and writes its blocks."""

    def __init__(self, model: Any, own_attention: str) -> None:
        self._model = model
        self._takes = set(inspect.signature(model.forward).parameters)
        model.set_attn_implementation(own_attention)

    def layouts(self, tokens: torch.Tensor) -> None:
        """They are those of the model's own cache."""

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
            given = {
                "input_ids": inputs.token_ids[None, rows],
                "position_ids": inputs.positions[None, rows],
                "attention_mask": inputs.positions.new_ones(1, length),
                "past_key_values": Cache(layers=layers),
                "use_cache": True,
            }
            named = {name: value for name, value in given.items() if name in self._takes}
            scores.append(self._model(**named).logits[0])
        return torch.cat(scores)


class _PagedLayer(DynamicLayer):
    """The blocks of one sequence in one layer, as transformers' modules expect a cache.

    `held` tokens lie in it before this step, `length` after it.
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
        """[1, heads, length, head_dim] of this sequence."""
        held = blocks.read(self._table, dtype).flatten(0, 1)
        return held[None, : self._length].transpose(1, 2)


def cached_layouts(cache: Any) -> tuple[KvLayout, ...] | None:
    """What each layer of a model's own cache keeps of a token; None if that is not keys and values."""
    layers = getattr(cache, "layers", None)
    if not layers or any(type(x) not in (DynamicLayer, DynamicSlidingWindowLayer) for x in layers):
        return None
    if any(layer.keys is None or layer.keys.dim() != 4 for layer in layers):
        return None
    return tuple(
        KvLayout(layer.keys.shape[1], layer.keys.shape[3], layer.values.shape[3])
        for layer in layers
    )
