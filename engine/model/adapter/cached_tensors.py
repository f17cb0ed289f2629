"""The tensors of a transformers cache: entries per token, which are paged, and constant states, in slots.

Which is which is measured, not listed: caches of two lengths are walked and compared, so that keys and
values, latents, index keys, windows, convolution and recurrent states are the same thing to the engine,
whatever class holds them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from ...probe.measure import Place, is_holder
from ..layers.attention import LayerCache
from ..layers.spec import KvLayout
from ..layers.state import StateLayout


def copy_structure(value: Any, copy: Callable[[Any], Any] = lambda leaf: leaf) -> Any:
    """Deep copy; leaves go through `copy`."""
    if isinstance(value, dict):
        return {key: copy_structure(part, copy) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(copy_structure(part, copy) for part in value)
    if not is_holder(value):
        return copy(value)
    copied = object.__new__(type(value))
    for name, part in vars(value).items():
        copied.__dict__[name] = copy_structure(part, copy)
    return copied


def copy_leaf(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf


def get(value: Any, steps: Place) -> Any:
    for key in steps:
        value = getattr(value, key.name) if key.is_attribute else value[key.name]
    return value


def put(value: Any, steps: Place, part: Any) -> None:
    holder, last = get(value, steps[:-1]), steps[-1]
    if isinstance(holder, tuple):
        changed = (*holder[: last.name], part, *holder[last.name + 1 :])
        put(value, steps[:-1], changed)
    elif last.is_attribute:
        setattr(holder, last.name, part)
    else:
        holder[last.name] = part


def path(steps: Place) -> str:
    keys = (f".{key.name}" if key.is_attribute else f"[{key.name!r}]" for key in steps)
    return "".join(keys).removeprefix(".")


@dataclass(frozen=True, slots=True)
class TokenTensor:
    """A tensor with an entry per `stride` tokens along `axis`, at all of `places`.

    Attributes:
        window: entries that a later token reads; 0: all.
    """

    places: tuple[Place, ...]
    axis: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    window: int = 0
    stride: int = 1

    @property
    def layout(self) -> KvLayout:
        width = prod(self.shape[self.axis :])
        return KvLayout(prod(self.shape[: self.axis]), width, width, True, self.stride)

    def read(
        self, cache: LayerCache, table: torch.Tensor, block_size: int, length: int
    ) -> torch.Tensor:
        """The entries of the first `length` tokens, or of the window's, from the blocks of `table`."""
        first = max(0, length - self.window) // block_size if self.window else 0
        blocks = cache.keys.read(table[first : -(-length // block_size)], self.dtype)
        entries = blocks.flatten(0, 1)
        if self.stride == 1:
            begin = max(0, length - self.window) if self.window else 0
            entries = entries[begin - first * block_size : length - first * block_size]
        else:
            count = torch.arange(1, length // self.stride + 1, device=entries.device)
            last = count * self.stride - 1
            entries = entries.index_select(0, self._slots(last, block_size))
        return entries.reshape(-1, *self.shape).movedim(0, self.axis)

    def write(
        self,
        cache: LayerCache,
        slots: torch.Tensor,
        block_size: int,
        cached: torch.Tensor,
        length: int,
    ) -> None:
        """Write the entries that the last tokens, one for each of `slots`, have added to `held`."""
        if self.stride > 1:
            first = -(length - len(slots) + 1) % self.stride
            slots = self._slots(slots[first :: self.stride], block_size)
        new = cached.movedim(self.axis, 0)[cached.shape[self.axis] - len(slots) :]
        layout = self.layout
        cache.keys.write(new.reshape(-1, layout.num_heads, layout.key_dim), slots)

    def _slots(self, of_tokens: torch.Tensor, block_size: int) -> torch.Tensor:
        per_block = self.layout.entries(block_size)
        return of_tokens // block_size * per_block + of_tokens % block_size // self.stride


@dataclass(frozen=True, slots=True)
class StateTensor:
    """A tensor of constant size, at all of `places`, from `since` tokens on. With an `axis` it holds the last
    tokens' entries, at most `shape[axis]`: a window that the cache cuts itself, or with a `stride` the tokens
    since the last full stride."""

    places: tuple[Place, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    axis: int | None = None
    stride: int = 0
    since: int = 1

    @property
    def layout(self) -> StateLayout:
        return StateLayout(self.shape, self.dtype)

    def held(self, state: torch.Tensor, length: int) -> torch.Tensor:
        """The part of a slot's tensor after `length` tokens."""
        if self.axis is None:
            return state
        num_entries = length % self.stride if self.stride else length
        return state.narrow(self.axis, 0, min(num_entries, self.shape[self.axis]))


@dataclass(frozen=True, slots=True)
class PositionTensor:
    """A tensor along `axis` with each token's position, or nothing; its `shape` is without that axis."""

    places: tuple[Place, ...]
    axis: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    def of(self, length: int, device: torch.device) -> torch.Tensor:
        shape = (*self.shape[: self.axis], length, *self.shape[self.axis :])
        along = [1] * len(shape)
        along[self.axis] = length
        positions = torch.arange(length, device=device).to(self.dtype).view(along)
        return positions.expand(shape).clone()


@dataclass(frozen=True, slots=True)
class CachedTensors:
    """The tensors of a model's cache, and an object of it to fill for a sequence.

    Attributes:
        template: the cache without tensors.
        fresh: an empty cache for a new sequence; None: the model makes its own.
    """

    paged: tuple[TokenTensor, ...]
    states: tuple[StateTensor, ...]
    positions: tuple[PositionTensor, ...]
    counters: tuple[tuple[Place, int], ...]
    template: Any
    fresh: Any

    @property
    def kv_layouts(self) -> tuple[KvLayout, ...]:
        return tuple(tensor.layout for tensor in self.paged)

    @property
    def state_layouts(self) -> tuple[StateLayout, ...]:
        return tuple(tensor.layout for tensor in self.states)

    def load(
        self,
        caches: Sequence[LayerCache],
        table: torch.Tensor,
        states: Sequence[torch.Tensor],
        block_size: int,
        length: int,
    ) -> Any:
        """Cache of a sequence of `length` tokens, from its blocks and `states`; None: a new sequence."""
        if not length:
            return None if self.fresh is None else copy_structure(self.fresh, copy_leaf)
        cache = copy_structure(self.template)
        for tensor, pages in zip(self.paged, caches, strict=True):
            cached = tensor.read(pages, table, block_size, length)
            for tensor_path in tensor.places:
                put(cache, tensor_path, cached)
        for tensor, state in zip(self.states, states, strict=True):
            if length < tensor.since:
                continue
            # A clone: a failed step leaves the slot as it was.
            cached = tensor.held(state, length).clone()
            for tensor_path in tensor.places:
                put(cache, tensor_path, cached)
        for tensor in self.positions:
            for tensor_path in tensor.places:
                put(cache, tensor_path, tensor.of(length, table.device))
        for tensor_path, stride in self.counters:
            put(cache, tensor_path, length // stride)
        return cache

    def store(
        self,
        cache: Any,
        caches: Sequence[LayerCache],
        slots: torch.Tensor,
        states: Sequence[torch.Tensor],
        block_size: int,
        length: int,
    ) -> None:
        for tensor, pages in zip(self.paged, caches, strict=True):
            tensor.write(pages, slots, block_size, get(cache, tensor.places[0]), length)
        for tensor, state in zip(self.states, states, strict=True):
            if length >= tensor.since:
                tensor.held(state, length).copy_(get(cache, tensor.places[0]))
