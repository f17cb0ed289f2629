"""Nested arguments and results of a layer: their tensors, in a fixed order, and copies with others."""

from __future__ import annotations

from collections.abc import Callable
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
    if isinstance(value, dict):
        parts = {name: with_tensors(part, change) for name, part in value.items()}
        return parts if type(value) is dict else type(value)(**parts)
    if isinstance(value, tuple):
        parts = [with_tensors(part, change) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    if isinstance(value, list):
        return [with_tensors(part, change) for part in value]
    return value


def containers_of(value: Any) -> list[dict[Any, Any] | list[Any]]:
    """The lists and dicts in a nested value, which a layer may write into."""
    inner: list[dict[Any, Any] | list[Any]] = []
    if isinstance(value, (list, dict)):
        inner.append(value)
    parts = value.values() if isinstance(value, dict) else value
    if isinstance(value, (tuple, list, dict)):
        for part in parts:
            inner += containers_of(part)
    return inner


def entries_of(container: dict[Any, Any] | list[Any]) -> dict[Any, Any]:
    """Items by key, or by index."""
    return dict(container if isinstance(container, dict) else enumerate(container))


def set_entry(container: dict[Any, Any] | list[Any], key: Any, value: Any) -> None:
    """Write an item, or append it where the index is the list's length."""
    if isinstance(container, list) and key == len(container):
        container.append(value)
    else:
        container[key] = value
