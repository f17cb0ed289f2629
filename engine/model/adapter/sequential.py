"""Forward passes of transformers models sequence by sequence, over the model's own kind of cache.

A sequence's cache object is filled from its blocks and its state slot before the pass, and what the pass
added is written back after it.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import DynamicCache

from ...kernels.attention.paged_attention import AttentionBatch
from ..layers.attention import LayerCache, StepInputs
from ..layers.state import StateLayout
from ..spec.spec import KvLayout
from .cache_walk import walk
from .cached_tensors import CachedTensors
from .linears import CurrentAdapters
from .measured_cache import measured_cache
from .text_model import plain_tokens, token_arguments

_CACHES = ("past_key_values", "cache_params", "state")
"""What models call the cache that they take and return."""


class SequentialForward:
    """One forward pass per sequence.

    Raises:
        ValueError: the model returns no cache, or one whose tensors are neither per token nor constant.
    """

    one_by_one = False
    """Whether tokens after a sequence's first step are computed one at a time."""

    def __init__(self, model: Any, own_attention: str) -> None:
        self._model = model
        self._takes = set(inspect.signature(model.forward).parameters)
        self._tensors: CachedTensors | None = None
        self._is_given_a_cache = False
        self.adapters = CurrentAdapters()
        model.set_attn_implementation(own_attention)

    def layouts(self, tokens: torch.Tensor) -> tuple[tuple[KvLayout, ...], tuple[StateLayout, ...]]:
        """Layouts of what is paged and of the states, measured without `tokens`."""
        self._tensors = measured_cache(self._cache_of, self._model.config)
        return self._tensors.kv_layouts, self._tensors.state_layouts

    def __call__(self, inputs: StepInputs, caches: Sequence[LayerCache]) -> torch.Tensor:
        assert self._tensors is not None
        runs = _runs(inputs.batch)
        slots = [0] * len(runs)
        if inputs.states.tensors and inputs.states.slots is not None:
            slots = inputs.states.slots.tolist()
        scores: list[torch.Tensor] = []
        arguments = token_arguments(self._model, inputs.token_ids, inputs.embedded)
        for (begin, end, length, table), slot in zip(runs, slots, strict=True):
            self.adapters.take_sequence(inputs.adapters, begin)
            states = [tensor[slot] for tensor in inputs.states.tensors]
            start = length - (end - begin)
            size = inputs.batch.block_size
            cache = self._tensors.load(caches, table, states, size, start)
            step = 1 if self.one_by_one and start else end - begin
            for first in range(begin, end, step):
                rows = slice(first, first + step)
                known = length - (end - rows.stop)
                tokens = {name: held[:, rows] for name, held in arguments.items()}
                logits, cache = self._pass(tokens, inputs.positions[None, rows], known, cache)
                scores.append(logits)
            self._tensors.store(cache, caches, inputs.slots[begin:end], states, size, length)
        return torch.cat(scores)

    def _pass(
        self, tokens: Mapping[str, torch.Tensor], positions: torch.Tensor, length: int, cache: Any
    ) -> tuple[torch.Tensor, Any]:
        """Logits [tokens, vocab] of the last tokens of a sequence of `length`, and its cache after them.

        `tokens` are ids [1, tokens] or embeddings [1, tokens, hidden], by the name of the argument.
        """
        if cache is None and self._is_given_a_cache:
            cache = DynamicCache(config=self._model.config.get_text_config(decoder=True))
        arguments = {
            **tokens,
            "position_ids": positions,
            "use_cache": True,
            **dict.fromkeys(_CACHES, cache),
        }
        given = {name: value for name, value in arguments.items() if name in self._takes}
        output = self._model(**given)
        returned = (getattr(output, name, None) for name in _CACHES)
        after = next((held for held in returned if held is not None), cache)
        return output.logits[0], after

    def _cache_of(self, length: int, empty: Any) -> Any:
        """The cache after `length` tokens."""
        device = next(self._model.parameters()).device
        positions = torch.arange(length, device=device)[None]
        tokens = {"input_ids": plain_tokens(self._model, length).to(device)[None]}
        _, cache = self._pass(tokens, positions, length, empty)
        if cache is None and _CACHES[0] in self._takes:  # it may fill one that it does not return
            self._is_given_a_cache, before = True, self._attributes()
            _, cache = self._pass(tokens, positions, length, empty)
            cache = None if self._attributes() - before else cache  # Recurrent Gemma keeps the rest
        if cache is None or not any(isinstance(x, torch.Tensor) for _, x in walk(cache)):
            raise ValueError("it returns no cache: its state is in its modules")
        return cache

    def _attributes(self) -> set[tuple[str, str, int]]:
        """The tensors that modules hold beside their parameters and buffers."""
        return {
            (name, key, id(value))
            for name, module in self._model.named_modules()
            for key, value in vars(module).items()
            if isinstance(value, torch.Tensor)
        }


class TokenByTokenForward(SequentialForward):
    """For modules whose state takes one token at a time once it has begun."""

    one_by_one = True


def _runs(batch: AttentionBatch) -> list[tuple[int, int, int, torch.Tensor]]:
    """First row, end, tokens after the step and block table of each sequence, in the order of their rows."""
    runs = [(s.begin, s.end, s.num_cached, s.block_ids) for s in batch.spans]
    if (group := batch.decode) is not None:
        tables = group.block_ids.view(group.rows.numel(), -1)
        for row, length, table in zip(
            group.rows.tolist(), group.lengths.tolist(), tables, strict=True
        ):
            runs.append((row, row + 1, length, table[: -(-length // batch.block_size)]))
    return sorted(runs, key=lambda run: run[0])
