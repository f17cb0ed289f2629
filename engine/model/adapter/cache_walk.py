"""Walk over what a cache object of transformers holds: its tensors and counters, and their places."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch


class Key(NamedTuple):
    """One step of a place: the attribute of that name, or the item of a list or dict."""

    name: Any
    is_attribute: bool


Place = tuple[Key, ...]
"""Where something is in an object: attributes and items, from the outside in."""


def walk(value: Any, place: Place = ()) -> Iterator[tuple[Place, torch.Tensor | int]]:
    """Every tensor and integer (booleans too) that an object reaches through attributes, lists and dicts."""
    if isinstance(value, torch.Tensor | int):
        yield place, value
        return
    for key, part in _parts(value):
        yield from walk(part, (*place, key))


def copy_structure(value: Any, copy: Callable[[Any], Any] = lambda leaf: leaf) -> Any:
    """A copy of an object and of what it consists of; tensors, numbers and the like are `copy` of it."""
    if isinstance(value, dict):
        return {key: copy_structure(part, copy) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(copy_structure(part, copy) for part in value)
    if not _is_holder(value):
        return copy(value)
    made = object.__new__(type(value))
    for name, part in vars(value).items():
        made.__dict__[name] = copy_structure(part, copy)
    return made


def copy_leaf(leaf: Any) -> Any:
    """A clone of a tensor; anything else as it is."""
    return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf


def get(value: Any, place: Place) -> Any:
    """What is at a place."""
    for key in place:
        value = getattr(value, key.name) if key.is_attribute else value[key.name]
    return value


def put(value: Any, place: Place, part: Any) -> None:
    """Put something at a place."""
    holder, last = get(value, place[:-1]), place[-1]
    if isinstance(holder, tuple):
        changed = (*holder[: last.name], part, *holder[last.name + 1 :])
        put(value, place[:-1], changed)
    elif last.is_attribute:
        setattr(holder, last.name, part)
    else:
        holder[last.name] = part


def path(place: Place) -> str:
    """A place as a reader writes it: `layers[3].conv_states[0]`."""
    keys = (f".{key.name}" if key.is_attribute else f"[{key.name!r}]" for key in place)
    return "".join(keys).removeprefix(".")


def _parts(value: Any) -> Iterator[tuple[Key, Any]]:
    if isinstance(value, dict):
        items: Any = value.items()
    elif isinstance(value, list | tuple):
        items = enumerate(value)
    elif _is_holder(value):
        yield from ((Key(name, True), part) for name, part in vars(value).items())
        return
    else:
        return
    yield from ((Key(key, False), part) for key, part in items)


def _is_holder(value: Any) -> bool:
    """Whether it is a cache or a layer of one: a plain object, and no module, class, function or config."""
    if callable(value) or type(value).__module__.partition(".")[0] == "torch":
        return False
    return hasattr(value, "__dict__") and not hasattr(value, "to_diff_dict")
