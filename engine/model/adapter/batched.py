"""Decode steps of transformers models with constant state: one pass, in which each sequence is a batch row.

States are gathered from their slots into the model's cache, and written back; attention is the engine's. So
shapes depend on the number of sequences alone, which lets a graph hold the step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ..layers.attention import LayerCache, StepInputs
from .cached_tensors import CachedTensors, Place, copy_structure, get, put
from .packed import CacheOfLayer, ModuleAttention, StepAttention
from .text_model import text_decoder

Pass = Callable[[Mapping[str, torch.Tensor], torch.Tensor, int, Any], tuple[torch.Tensor, Any]]
"""Logits [rows, vocab] and the cache after a pass, from tokens, positions, a length and the cache before."""


class BatchedDecode:
    """One forward pass for a token of each sequence. ValueError: rows of its cache are no sequences."""

    def __init__(self, model: Any, run: Pass, tensors: CachedTensors) -> None:
        self._run, self._tensors, self._template = run, tensors, copy_structure(tensors.template)
        self._attention = ModuleAttention(text_decoder(model))
        holders = dict.fromkeys(tensor.places[0][:-1] for tensor in tensors.paged)
        for state in tensors.states:
            if state.axis is not None or state.since > 1 or state.shape[0] != 1:
                raise ValueError("a state is no row of a batch")
        if tensors.positions or any(path[:-1] not in holders for path, _ in tensors.counters):
            raise ValueError("its cache counts tokens")
        self._pairs = [self._key_and_value(holder) for holder in holders]
        self._of_layers: dict[int, CacheOfLayer] = {}
        for index, holder in enumerate(holders):
            # The index of a layer's cache is the one by which its attention module knows it.
            number = holder[-1].name if holder else None
            if not isinstance(number, int):
                raise ValueError("its cache is not one of layers")
            self._of_layers[number] = CacheOfLayer(index, is_filled=True)
            layer = get(self._template, holder)
            layer.keys = layer.values = torch.empty(0)
            # Keys and values of the step alone, which the attention writes.
            layer.update = lambda keys, values, *_, **__: (keys, values)

    def _key_and_value(self, holder: Place) -> tuple[int, int]:
        """Indices among the paged tensors of the keys and the values of a layer's cache."""
        indices = {
            tensor.places[0][-1].name: index
            for index, tensor in enumerate(self._tensors.paged)
            if tensor.places[0][:-1] == holder
            and (tensor.axis, len(tensor.shape), tensor.shape[0], tensor.stride) == (2, 3, 1, 1)
        }
        if indices.keys() != {"keys", "values"}:
            raise ValueError("its cache holds more than keys and values")
        return indices["keys"], indices["values"]

    def __call__(self, inputs: StepInputs, caches: Sequence[LayerCache]) -> torch.Tensor:
        """Logits [rows, vocab] of a step that brings one token of each sequence."""
        group, slots, states = inputs.batch.decode, inputs.states.slots, inputs.states.tensors
        assert group is not None and slots is not None
        cache, fresh = copy_structure(self._template), group.lengths <= 1
        for tensor, state in zip(self._tensors.states, states, strict=True):
            gathered = state.index_select(0, slots).flatten(0, 1)
            gathered = gathered.masked_fill(fresh.view(-1, *(1,) * (gathered.dim() - 1)), 0)
            for path in tensor.places:
                put(cache, path, gathered)
        paged = [LayerCache(caches[key].keys, caches[value].keys) for key, value in self._pairs]
        with self._attention.running(StepAttention(inputs, paged, self._of_layers)):
            tokens = {"input_ids": inputs.token_ids[:, None]}
            logits, after = self._run(tokens, inputs.positions[:, None], 0, cache)
        for tensor, state in zip(self._tensors.states, states, strict=True):
            rows = get(after, tensor.places[0])
            state.index_copy_(0, slots, rows.unsqueeze(1).to(state.dtype))
        return logits
