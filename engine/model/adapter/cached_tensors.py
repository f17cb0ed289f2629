"""The tensors of a transformers cache: entries per token, which are paged, and constant states, in slots.

Which is which is measured, not listed: caches of two lengths are compared, so that keys and values, latents,
index keys, windows, convolution and recurrent states are the same thing to the engine, whatever class holds
them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from ..layers.attention import LayerCache
from ..layers.state import StateLayout
from ..spec.spec import KvLayout
from .cache_walk import Place, copy_structure, get, path, put, walk


@dataclass(frozen=True, slots=True)
class TokenTensor:
    """A tensor with an entry per token along `axis`, at all of `places`.

    Attributes:
        shape: of one sequence, without the axis of tokens.
        window: entries that a later token reads; 0: all.
    """

    places: tuple[Place, ...]
    axis: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    window: int = 0

    @property
    def layout(self) -> KvLayout:
        """One vector per token and head; dimensions before the tokens' are heads."""
        width = prod(self.shape[self.axis :])
        return KvLayout(prod(self.shape[: self.axis]), width, width, values_in_keys=True)

    def read(self, cache: LayerCache, table: torch.Tensor, length: int) -> torch.Tensor:
        """The entries of the first `length` tokens, or of the window's, from the blocks of `table`."""
        size = cache.keys.codes.shape[1]
        first = max(0, length - self.window) if self.window else 0
        blocks = cache.keys.read(table[first // size : -(-length // size)], self.dtype)
        entries = blocks.flatten(0, 1)[first % size : first % size + length - first]
        return entries.reshape(-1, *self.shape).movedim(0, self.axis)

    def write(self, cache: LayerCache, slots: torch.Tensor, held: torch.Tensor) -> None:
        """Write the entries of the last tokens of `held`, one for each of `slots`."""
        new = held.movedim(self.axis, 0)[held.shape[self.axis] - len(slots) :]
        layout = self.layout
        cache.keys.write(new.reshape(-1, layout.num_heads, layout.key_dim), slots)


@dataclass(frozen=True, slots=True)
class StateTensor:
    """A tensor of constant size, at all of `places`.

    With an `axis` it is a window that the cache cuts itself: it holds the last tokens' entries, at most
    `shape[axis]`, and fewer of a short sequence.
    """

    places: tuple[Place, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    axis: int | None = None

    @property
    def layout(self) -> StateLayout:
        return StateLayout(self.shape, self.dtype)

    def held(self, state: torch.Tensor, length: int) -> torch.Tensor:
        """What is held of a slot's tensor after `length` tokens."""
        if self.axis is None:
            return state
        return state.narrow(self.axis, 0, min(length, self.shape[self.axis]))


@dataclass(frozen=True, slots=True)
class CachedTensors:
    """What a model's cache holds, and an object of it to fill for a sequence.

    Attributes:
        paged, states: its tensors.
        counters: integers that count the tokens.
        template: the cache without tensors.
        fresh: an empty cache for a new sequence; None: the model makes its own.
    """

    paged: tuple[TokenTensor, ...]
    states: tuple[StateTensor, ...]
    counters: tuple[Place, ...]
    template: Any
    fresh: Any

    @property
    def kv_layouts(self) -> tuple[KvLayout, ...]:
        """A layout for each paged tensor."""
        return tuple(tensor.layout for tensor in self.paged)

    @property
    def state_layouts(self) -> tuple[StateLayout, ...]:
        """A layout for each state."""
        return tuple(tensor.layout for tensor in self.states)

    def load(
        self,
        caches: Sequence[LayerCache],
        table: torch.Tensor,
        states: Sequence[torch.Tensor],
        length: int,
    ) -> Any:
        """The cache of a sequence of `length` tokens, from its blocks and its slot's `states`.

        None: a new sequence, for which the model makes its own cache.
        """
        if not length:
            return None if self.fresh is None else copy_structure(self.fresh, _copied)
        cache = copy_structure(self.template)
        for tensor, pages in zip(self.paged, caches, strict=True):
            held = tensor.read(pages, table, length)
            for place in tensor.places:
                put(cache, place, held)
        for tensor, state in zip(self.states, states, strict=True):
            # A clone: a failed step leaves the slot as it was.
            held = tensor.held(state, length).clone()
            for place in tensor.places:
                put(cache, place, held)
        for place in self.counters:
            put(cache, place, length)
        return cache

    def store(
        self,
        cache: Any,
        caches: Sequence[LayerCache],
        slots: torch.Tensor,
        states: Sequence[torch.Tensor],
        length: int,
    ) -> None:
        """Write the entries of the last tokens to their `slots`, and the states, after `length` tokens."""
        for tensor, pages in zip(self.paged, caches, strict=True):
            tensor.write(pages, slots, get(cache, tensor.places[0]))
        for tensor, state in zip(self.states, states, strict=True):
            tensor.held(state, length).copy_(get(cache, tensor.places[0]))


def measure(
    shorter: Any, longer: Any, lengths: tuple[int, int], fresh: Any = None
) -> CachedTensors:
    """What caches of one sequence hold, from a cache after each of two `lengths`.

    Raises:
        ValueError: the cache holds something whose law is neither an entry per token nor constant.
    """
    before, after = dict(walk(shorter)), dict(walk(longer))
    if before.keys() != after.keys():
        (place, *_) = before.keys() ^ after.keys()
        raise ValueError(f"its cache's {path(place)} comes and goes with the length")
    aliases: dict[int, list[Place]] = {}
    counters: list[Place] = []
    for place, value in after.items():
        if isinstance(value, torch.Tensor) and value.dim():
            if not _is_empty(value):
                aliases.setdefault(id(value), []).append(place)
        elif (int(before[place]), int(value)) == lengths and not isinstance(value, torch.Tensor):
            counters.append(place)
        elif before[place] != value:
            raise ValueError(f"its cache's {path(place)} is not told by the length alone")
    paged: list[TokenTensor] = []
    states: list[StateTensor] = []
    template = copy_structure(longer)
    for places in aliases.values():
        tensor = _tensor(tuple(places), before, after, lengths, longer)
        if isinstance(tensor, TokenTensor):
            paged.append(tensor)
        else:
            states.append(tensor)
        for place in places:
            put(template, place, None)
    return CachedTensors(tuple(paged), tuple(states), tuple(counters), template, fresh)


def record_windows(cache: Any) -> Any:
    """An empty copy of a cache whose sliding windows keep what leaves them; None if it has none.

    Windows then are views of paged entries, so that another sequence can go on from any block of them.
    """
    if not hasattr(cache, "reset") or not any(_is_window(x) for x in getattr(cache, "layers", ())):
        return None
    fresh = copy_structure(cache, _copied)
    fresh.reset()
    for layer in fresh.layers:
        if _is_window(layer) and hasattr(layer, "activate_past_recording"):
            layer.activate_past_recording()
    return fresh


def _tensor(
    places: tuple[Place, ...],
    before: dict[Place, Any],
    after: dict[Place, Any],
    lengths: tuple[int, int],
    cache: Any,
) -> TokenTensor | StateTensor:
    small, large = before[places[0]], after[places[0]]
    shape = tuple(large.shape)
    layer, name = get(cache, places[0][:-1]), places[0][-1].name
    if name in ("keys", "values") and isinstance(getattr(layer, "sliding_window", None), int):
        axis = large.dim() - 2
        kept, is_recorded = _window(layer, name)
        if not is_recorded:
            return StateTensor(places, (*shape[:axis], kept, shape[-1]), large.dtype, axis)
    elif small.shape == large.shape:
        return StateTensor(places, shape, large.dtype)
    else:
        sizes = list(zip(small.shape, large.shape, strict=True))
        axes = [axis for axis, pair in enumerate(sizes) if pair[0] != pair[1]]
        if len(axes) != 1 or sizes[axes[0]] != lengths or not large.dtype.is_floating_point:
            raise ValueError(
                f"its cache's {path(places[0])} grows from {tuple(small.shape)} to {shape}"
            )
        (axis,), kept = axes, 0
    return TokenTensor(places, axis, (*shape[:axis], *shape[axis + 1 :]), large.dtype, kept)


def _window(layer: Any, name: str) -> tuple[int, bool]:
    """Entries that a layer keeps of a long sequence, and whether it records those that leave."""
    limit = layer.sliding_window
    kept = []
    for recorded in (False, True):
        grown = copy_structure(layer, _copied)
        grown.record_past = recorded
        grown.update(*(_zeros(part, 2 * limit) for part in (layer.keys, layer.values)))
        kept.append(getattr(grown, name).shape[-2])
    everything = 2 * limit + getattr(layer, name).shape[-2]
    return kept[0], kept[1] == everything and bool(getattr(layer, "record_past", False))


def _zeros(held: torch.Tensor, num_tokens: int) -> torch.Tensor:
    return held.new_zeros((*held.shape[:-2], num_tokens, held.shape[-1]))


def _is_window(layer: Any) -> bool:
    """Whether it is a sliding window and nothing else: convolution states record by the same flag."""
    return isinstance(getattr(layer, "sliding_window", None), int) and not hasattr(
        layer, "conv_states"
    )


def _is_empty(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and bool(value.dim()) and not value.numel()


def _copied(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf
