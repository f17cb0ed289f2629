"""Nested arguments and results of a layer: their tensors, in a fixed order, and copies with others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import is_dataclass
from typing import Any

import torch


def tensors_of(value: Any) -> list[torch.Tensor]:
    """The tensors in nested tuples, lists and dicts."""
    tensors: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        tensors.append(tensor)
        return tensor

    with_tensors(value, keep)
    return tensors


def with_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A copy in which `change` was applied to every tensor; other leaves are kept."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, Mapping):
        parts = {name: with_tensors(part, change) for name, part in value.items()}
        return type(value)(**parts) if is_dataclass(value) else parts
    if isinstance(value, tuple):
        parts = [with_tensors(part, change) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    if isinstance(value, list):
        return [with_tensors(part, change) for part in value]
    return value


Container = MutableMapping[Any, Any] | list[Any]


def containers_of(value: Any) -> list[Container]:
    """The lists and dicts in a nested value, which a layer may write into."""
    inner: list[Container] = []
    if isinstance(value, (list, MutableMapping)):
        inner.append(value)
    if isinstance(value, (tuple, list, Mapping)):
        for part in value.values() if isinstance(value, Mapping) else value:
            inner += containers_of(part)
    return inner


def entries_of(container: Container) -> dict[Any, Any]:
    """Items by key, or by index."""
    return dict(enumerate(container) if isinstance(container, list) else container)


def set_entry(container: Container, key: Any, value: Any) -> None:
    """Write an item, or append it where the index is the list's length."""
    if isinstance(container, list) and key == len(container):
        container.append(value)
    else:
        container[key] = value
