"""Measure what a transformers cache holds, from caches of one sequence at two lengths.

Entries per token are told from constants by the two sizes. Where a cache holds an entry for several tokens
(compressed keys and values), the planner's probe tells the strides, and the lengths go beyond the largest.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch

from ....quant.model.auto import read_config
from ...planner.probe.build import build_on_meta
from ...planner.probe.cache_growth import measure_cache
from .cache_walk import Place, copy_leaf, copy_structure, get, path, put, walk
from .cached_tensors import CachedTensors, PositionTensor, StateTensor, TokenTensor

CacheOf = Callable[[int, Any], Any]
"""The cache of a sequence of that many tokens, computed from an empty one, or None: the model makes it."""

_LENGTHS = (3, 7)


def measured_cache(cache_of: CacheOf, config: Any) -> CachedTensors:
    """What a model's caches hold.

    Raises:
        ValueError: something whose law is not known.
        BadInput: the probe cannot tell the strides of the model of `config`.
    """
    longer = cache_of(_LENGTHS[1], None)
    empty = _recording(longer)
    strides: dict[tuple[Any, ...], int] = {}
    lengths = _LENGTHS
    if any(_is_empty(value) for _, value in walk(longer)):
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
        (place, *_) = before.keys() ^ after.keys()
        raise ValueError(f"its cache's {path(place)} comes and goes with the length")
    aliases: dict[int, list[Place]] = {}
    counters: list[tuple[Place, int]] = []
    for place, value in after.items():
        if isinstance(value, torch.Tensor) and value.dim():
            aliases.setdefault(id(value), []).append(place)
        elif bool(before[place] != value):
            counters.append((place, _counted(place, int(before[place]), value, lengths, strides)))
    paged: list[TokenTensor] = []
    states: list[StateTensor] = []
    positions: list[PositionTensor] = []
    template = copy_structure(longer)
    for places in aliases.values():
        tensor = _tensor(tuple(places), (before, after), lengths, strides, longer)
        if isinstance(tensor, TokenTensor):
            paged.append(tensor)
        elif isinstance(tensor, StateTensor):
            states.append(tensor)
        else:
            positions.append(tensor)
        for place in places:
            put(template, place, None)
    return CachedTensors(
        tuple(paged), tuple(states), tuple(positions), tuple(counters), template, fresh
    )


def _counted(
    place: Place,
    before: int,
    after: Any,
    lengths: tuple[int, int],
    strides: Mapping[tuple[Any, ...], int],
) -> int:
    """The stride that an integer counts."""
    if not isinstance(after, torch.Tensor | bool):
        for stride in (1, *sorted(set(strides.values()))):
            if (before, after) == tuple(length // stride for length in lengths):
                return stride
    raise ValueError(f"its cache's {path(place)} is not told by the length alone")


def _tensor(
    places: tuple[Place, ...],
    held: tuple[Mapping[Place, Any], Mapping[Place, Any]],
    lengths: tuple[int, int],
    strides: Mapping[tuple[Any, ...], int],
    held_by: Any,
) -> TokenTensor | StateTensor | PositionTensor:
    small, large = (at[places[0]] for at in held)
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
        return StateTensor(places, shape, dtype, since=_first_length(places[0], strides))
    entries = tuple(length // (stride or 1) for length in lengths)
    if len(axes) == 1 and not stride and sizes[axes[0]] == lengths:
        axis = axes[0]
        told = PositionTensor(places, axis, (*shape[:axis], *shape[axis + 1 :]), dtype)
        if all(
            torch.equal(told.of(length, at.device), at)
            for length, at in zip(lengths, (small, large), strict=True)
        ):
            return told
    if len(axes) != 1 or sizes[axes[0]] != entries or not dtype.is_floating_point:
        raise ValueError(
            f"its cache's {path(places[0])} grows from {tuple(small.shape)} to {shape}"
        )
    axis = axes[0]
    return TokenTensor(places, axis, (*shape[:axis], *shape[axis + 1 :]), dtype, 0, stride or 1)


def _first_length(place: Place, strides: Mapping[tuple[Any, ...], int]) -> int:
    """Tokens after which a constant is there: beside strided entries of its name, the first full stride."""
    layer, last = _name(place)[0], _name(place)[-1]
    return max(
        (s for name, s in strides.items() if (name[0], name[-1]) == (layer, last)), default=1
    )


@cache
def _strides(config: str) -> dict[tuple[Any, ...], int]:
    """Tokens per entry of the cache's tensors that do not hold one for each, by layer and name, of a model
    of that `config.json`."""
    tensors = measure_cache(build_on_meta(read_config(json.loads(config))))
    return {
        (tensor.layer, *tensor.name.split(".")): tensor.stride
        for tensor in tensors
        if tensor.stride > 1
    }


def _name(place: Place) -> tuple[Any, ...]:
    """A tensor's layer and name, as the probe names it."""
    first = next((at for at, key in enumerate(place) if isinstance(key.name, int)), 0)
    return tuple(key.name for key in place[first:])


def _recording(longer: Any) -> Any:
    """An empty copy of a cache whose sliding windows keep what leaves them; None if it has no such window.

    Windows then are views of paged entries, so that another sequence can go on from any block of them.
    """
    if not hasattr(longer, "reset") or not any(
        _is_window(x) for x in getattr(longer, "layers", ())
    ):
        return None
    fresh = copy_structure(longer, copy_leaf)
    fresh.reset()
    for layer in fresh.layers:
        if _is_window(layer) and hasattr(layer, "activate_past_recording"):
            layer.activate_past_recording()
    return fresh


def _is_window(layer: Any) -> bool:
    """Whether it is a sliding window and nothing else: convolution states record by the same flag."""
    return isinstance(getattr(layer, "sliding_window", None), int) and not hasattr(
        layer, "conv_states"
    )


def _window(layer: Any, name: str) -> tuple[int, bool]:
    """Entries that a layer keeps of a long sequence, and whether it records those that leave."""
    limit = layer.sliding_window
    kept = []
    for recorded in (False, True):
        grown = copy_structure(layer, copy_leaf)
        grown.record_past = recorded
        grown.update(*(_zeros(part, 2 * limit) for part in (layer.keys, layer.values)))
        kept.append(getattr(grown, name).shape[-2])
    everything = 2 * limit + getattr(layer, name).shape[-2]
    return kept[0], kept[1] == everything and bool(getattr(layer, "record_past", False))


def _zeros(held: torch.Tensor, num_tokens: int) -> torch.Tensor:
    return held.new_zeros((*held.shape[:-2], num_tokens, held.shape[-1]))


def _is_empty(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and bool(value.dim()) and not value.numel()
