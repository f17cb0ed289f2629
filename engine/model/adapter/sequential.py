"""Forward passes of transformers models over their own kind of cache: by sequence, and batched decode steps.

What it holds is measured, from caches of one sequence at two lengths; the planner's probe tells the strides
of entries for several tokens. A sequence's cache is filled from its blocks and state slot before the pass,
and what the pass added is written back.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from ....quant.model.auto import read_config
from ...kernels.attention.batch import AttentionBatch
from ...probe.measure import Place, measure_cache, walk
from ...probe.oracle import build_on_meta
from ..layers.attention import LayerCache, StepInputs
from ..layers.spec import KvLayout
from ..layers.state import StateLayout
from .cached_tensors import (
    CachedTensors,
    PositionTensor,
    StateTensor,
    TokenTensor,
    copy_leaf,
    copy_structure,
    get,
    path,
    put,
)
from .linears import CurrentAdapters
from .packed import CacheOfLayer, ModuleAttention, StepAttention
from .text_model import plain_tokens, text_decoder, token_arguments

CacheOf = Callable[[int, Any], Any]
"""The cache of a sequence of that many tokens, computed from an empty one, or None: the model makes it."""

_LENGTHS = (3, 7)


def measured_cache(cache_of: CacheOf, config: Any) -> CachedTensors:
    """Measure a model's caches. ValueError: an unknown law; BadInput: the probe finds no strides."""
    longer = cache_of(_LENGTHS[1], None)
    empty = _recording(longer)
    strides: dict[tuple[Any, ...], int] = {}
    lengths = _LENGTHS
    if any(torch.is_tensor(v) and v.dim() and not v.numel() for _, v in walk(longer)):
        strides = _strides(config.to_json_string(use_diff=False))
    if strides:  # else what is empty stays so
        widest = max(strides.values())
        lengths = (2 * widest - 1, 4 * widest - 1)
    if empty is not None or strides:
        longer = cache_of(lengths[1], _recording(longer))
    shorter = cache_of(lengths[0], _recording(longer))
    return _measure(shorter, longer, lengths, strides, empty)


def _measure(
    shorter: Any,
    longer: Any,
    lengths: tuple[int, int],
    strides: Mapping[tuple[Any, ...], int],
    fresh: Any,
) -> CachedTensors:
    before, after = dict(walk(shorter)), dict(walk(longer))
    if before.keys() != after.keys():
        (tensor_path, *_) = before.keys() ^ after.keys()
        raise ValueError(f"its cache's {path(tensor_path)} comes and goes with the length")
    aliases: dict[int, list[Place]] = {}
    counters: list[tuple[Place, int]] = []
    for tensor_path, value in after.items():
        if isinstance(value, torch.Tensor) and value.dim():
            aliases.setdefault(id(value), []).append(tensor_path)
        elif bool(before[tensor_path] != value):
            counts = (int(before[tensor_path]), value)
            steps = (1, *sorted(set(strides.values())))
            stride = next((s for s in steps if counts == tuple(n // s for n in lengths)), None)
            if stride is None or isinstance(value, torch.Tensor | bool):
                raise ValueError(f"its cache's {path(tensor_path)} is not told by the length alone")
            counters.append((tensor_path, stride))
    template = copy_structure(longer)
    tensors = []
    for places in aliases.values():
        tensors.append(_tensor(tuple(places), (before, after), lengths, strides, longer))
        for tensor_path in places:
            put(template, tensor_path, None)
    return CachedTensors(
        tuple(tensor for tensor in tensors if isinstance(tensor, TokenTensor)),
        tuple(tensor for tensor in tensors if isinstance(tensor, StateTensor)),
        tuple(tensor for tensor in tensors if isinstance(tensor, PositionTensor)),
        tuple(counters),
        template,
        fresh,
    )


def _tensor(
    places: tuple[Place, ...],
    before_and_after: tuple[Mapping[Place, Any], Mapping[Place, Any]],
    lengths: tuple[int, int],
    strides: Mapping[tuple[Any, ...], int],
    held_by: Any,
) -> TokenTensor | StateTensor | PositionTensor:
    small, large = (at[places[0]] for at in before_and_after)
    shape, dtype = tuple(large.shape), large.dtype
    layer, name = get(held_by, places[0][:-1]), places[0][-1].name
    if name in ("keys", "values") and isinstance(getattr(layer, "sliding_window", None), int):
        axis = large.dim() - 2
        kept, is_recorded = _window(layer, name)
        if not is_recorded:
            return StateTensor(places, (*shape[:axis], kept, shape[-1]), dtype, axis)
        return TokenTensor(places, axis, (*shape[:axis], shape[-1]), dtype, kept)
    stride = strides.get(_name(places[0]), 0)
    sizes = list(zip(small.shape, large.shape, strict=True))
    if stride:
        remainder = tuple(length % stride for length in lengths)
        for axis in range(1, large.dim()):
            if sizes[axis] == remainder:
                whole = (*shape[:axis], stride - 1, *shape[axis + 1 :])
                return StateTensor(places, whole, dtype, axis, stride)
    axes = [axis for axis, pair in enumerate(sizes) if pair[0] != pair[1]]
    if not axes:
        # A constant is there after the first full stride of the entries of its name.
        name = _name(places[0])
        of_name = [s for n, s in strides.items() if (n[0], n[-1]) == (name[0], name[-1])]
        return StateTensor(places, shape, dtype, since=max(of_name, default=1))
    entries = tuple(length // (stride or 1) for length in lengths)
    if len(axes) == 1 and not stride and sizes[axes[0]] == lengths:
        axis = axes[0]
        counted = PositionTensor(places, axis, (*shape[:axis], *shape[axis + 1 :]), dtype)
        pairs = zip(lengths, (small, large), strict=True)
        if all(torch.equal(counted.of(length, x.device), x) for length, x in pairs):
            return counted
    if len(axes) != 1 or sizes[axes[0]] != entries or not dtype.is_floating_point:
        raise ValueError(
            f"its cache's {path(places[0])} grows from {tuple(small.shape)} to {shape}"
        )
    axis = axes[0]
    return TokenTensor(places, axis, (*shape[:axis], *shape[axis + 1 :]), dtype, 0, stride or 1)


@cache
def _strides(config: str) -> dict[tuple[Any, ...], int]:
    """Tokens per entry of the cache's tensors with strides, by layer and name, of a `config.json`."""
    tensors = measure_cache(build_on_meta(read_config(json.loads(config))))
    return {
        (tensor.layer, *tensor.name.split(".")): tensor.stride
        for tensor in tensors
        if tensor.stride > 1
    }


def _name(steps: Place) -> tuple[Any, ...]:
    first = next((at for at, key in enumerate(steps) if isinstance(key.name, int)), 0)
    return tuple(key.name for key in steps[first:])


def _recording(longer: Any) -> Any:
    """Empty copy whose sliding windows are views of paged entries, so that any block can be gone on from."""
    windows = map(_is_window, getattr(longer, "layers", ()))
    if not hasattr(longer, "reset") or not any(windows):
        return None
    fresh = copy_structure(longer, copy_leaf)
    fresh.reset()
    layers: list[Any] = fresh.layers
    for layer in layers:
        if isinstance(layer, DynamicLayer):
            # Older releases of transformers (5.17) set the entries to zero and keep their number.
            layer.keys = layer.values = None
            layer.is_initialized = False
    for layer in layers:
        if _is_window(layer) and hasattr(layer, "activate_past_recording"):
            layer.activate_past_recording()
    return fresh


def _is_window(layer: Any) -> bool:
    """True if it is a sliding window and nothing else: convolution states record by the same flag."""
    has_window = isinstance(getattr(layer, "sliding_window", None), int)
    return has_window and not hasattr(layer, "conv_states")


def _window(layer: Any, name: str) -> tuple[int, bool]:
    """Entries that a layer keeps of a long sequence, and whether it records those that leave."""
    limit = layer.sliding_window
    kept = []
    for recorded in (False, True):
        grown = copy_structure(layer, copy_leaf)
        grown.record_past = recorded
        parts = (layer.keys, layer.values)
        grown.update(*(x.new_zeros((*x.shape[:-2], 2 * limit, x.shape[-1])) for x in parts))
        kept.append(getattr(grown, name).shape[-2])
    everything = 2 * limit + getattr(layer, name).shape[-2]
    return kept[0], kept[1] == everything and bool(getattr(layer, "record_past", False))


_CACHES = ("past_key_values", "cache_params", "state")
"""Names by which models take and return their cache."""


class SequentialForward:
    """One forward pass per sequence. ValueError: a cache is missing, or neither per token nor constant."""

    one_by_one = False
    """True if tokens after a sequence's first step are computed one at a time."""

    def __init__(self, model: Any, own_attention: str) -> None:
        self._model = model
        self._takes = set(inspect.signature(model.forward).parameters)
        self._tensors: CachedTensors | None = None
        self._is_given_a_cache = False
        self.batched: BatchedDecode | None = None
        self.adapters = CurrentAdapters()
        model.set_attn_implementation(own_attention)

    def layouts(self, tokens: torch.Tensor) -> tuple[tuple[KvLayout, ...], tuple[StateLayout, ...]]:
        """Layouts of what is paged and of the states, measured without `tokens`."""
        self._tensors = measured_cache(self._cache_of, self._model.config)
        return self._tensors.kv_layouts, self._tensors.state_layouts

    def batch_decode(self) -> None:
        """Compute steps of one token a sequence in one pass from now on. ValueError: as `BatchedDecode`."""
        assert self._tensors is not None
        self.batched = BatchedDecode(self._model, self._pass, self._tensors)

    def __call__(self, inputs: StepInputs, caches: Sequence[LayerCache]) -> torch.Tensor:
        assert self._tensors is not None
        if self.batched is not None and not inputs.batch.spans and inputs.embedded is None:
            return self.batched(inputs, caches)
        scores: list[torch.Tensor] = []
        arguments = token_arguments(self._model, inputs.token_ids, inputs.embedded)
        for index, (begin, end, length, table) in enumerate(_runs(inputs.batch)):
            self.adapters.take_sequence(inputs.adapters, begin)
            slot, states = None, []
            if inputs.states.tensors and inputs.states.slots is not None:
                slot = inputs.states.slots[index : index + 1]
                states = [tensor.index_select(0, slot)[0] for tensor in inputs.states.tensors]
            start = length - (end - begin)
            size = inputs.batch.block_size
            cache = self._tensors.load(caches, table, states, size, start)
            step = 1 if self.one_by_one and start else end - begin
            for first in range(begin, end, step):
                rows = slice(first, first + step)
                known = length - (end - rows.stop)
                tokens = {name: value[:, rows] for name, value in arguments.items()}
                logits, cache = self._pass(tokens, inputs.positions[None, rows], known, cache)
                scores.append(logits)
            self._tensors.store(cache, caches, inputs.slots[begin:end], states, size, length)
            if slot is not None:
                for tensor, state in zip(inputs.states.tensors, states, strict=True):
                    tensor.index_copy_(0, slot, state[None])
        return torch.cat(scores)

    def _pass(
        self, tokens: Mapping[str, torch.Tensor], positions: torch.Tensor, length: int, cache: Any
    ) -> tuple[torch.Tensor, Any]:
        """Logits [tokens, vocab] of the last tokens of a sequence of `length`, and its cache after them.
        `tokens` are ids [1, tokens] or embeddings [1, tokens, hidden], by the name of the argument; or ids
        [sequences, 1]."""
        if cache is None and self._is_given_a_cache:
            cache = DynamicCache(config=self._model.config.get_text_config(decoder=True))
        arguments = {**tokens, "position_ids": positions, "use_cache": True}
        arguments |= dict.fromkeys(_CACHES, cache)
        output = self._model(**{k: v for k, v in arguments.items() if k in self._takes})
        returned = (getattr(output, name, None) for name in _CACHES)
        after = next((candidate for candidate in returned if candidate is not None), cache)
        return output.logits.flatten(0, 1), after

    def _cache_of(self, length: int, empty: Any) -> Any:
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
        if group.counts is not None:
            rows, lengths = group.counts
        else:
            rows, lengths = group.rows.tolist(), group.lengths.tolist()
        for row, length, table in zip(rows, lengths, tables, strict=True):
            runs.append((row, row + 1, length, table[: -(-length // batch.block_size)]))
    return sorted(runs, key=lambda run: run[0])


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
            for leaf in tensor.places:
                put(cache, leaf, gathered)
        paged = [LayerCache(caches[key].keys, caches[value].keys) for key, value in self._pairs]
        with self._attention.running(StepAttention(inputs, paged, self._of_layers)):
            tokens = {"input_ids": inputs.token_ids[:, None]}
            logits, after = self._run(tokens, inputs.positions[:, None], 0, cache)
        for tensor, state in zip(self._tensors.states, states, strict=True):
            rows = get(after, tensor.places[0])
            state.index_copy_(0, slots, rows.unsqueeze(1).to(state.dtype))
        return logits
