"""Cache growth: the tensors of a model's cache object after forward passes of several lengths.

Each tensor is compared between lengths: the dimension that changes is that of the tokens, and how it
changes is the tensor's law: every token, a window of the last ones, an entry per so many tokens, or a
constant (the state of Mamba, linear attention and convolutions).
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping
from math import prod
from typing import Any

import torch
from transformers.cache_utils import DynamicCache

from ....quant.base.errors import BadInput
from ....quant.families.registry import type_of
from .data_free import DataFreeMode, ProbeTooLong
from .facts import CachedTensor, Law

SHORT_LENGTHS = (4, 8)
LONG_LENGTH = 509  # prime, so that a compressed cache leaves a remainder
MORE_LENGTHS = (256, 640, 1023)  # tell the strides apart that one length leaves possible
# A forward pass with a Python loop over tokens (Mamba without its kernel) is not run at the long lengths.
MAX_OPERATORS = 60_000

Size = tuple[tuple[int, ...], int, bool]
Shapes = dict[str, Size]
"""Of each tensor in the cache, by path: shape, bytes per element, and whether it is floating point."""


@torch.no_grad()
def cache_after(model: Any, num_tokens: int, max_operators: int = MAX_OPERATORS) -> Any:
    """The cache object of a forward pass over `num_tokens` tokens of one sequence."""
    device = next(model.parameters()).device
    ids = torch.zeros((1, num_tokens), dtype=torch.long, device=device)
    with DataFreeMode(max_operators):
        output = model(input_ids=ids, use_cache=True)
    for name in ("past_key_values", "cache_params", "state", "mems"):
        if (cache := getattr(output, name, None)) is not None:
            return cache
    # Some wrappers of a language model do not hand its cache out, but fill one that they are given.
    given = DynamicCache(config=model.config.get_text_config(decoder=True))
    with DataFreeMode(max_operators):
        model(input_ids=ids, use_cache=True, past_key_values=given)
    if not cache_bytes(given):
        raise BadInput(f"{type_of(model.config)} returns no cache: it cannot be planned")
    return given


def cache_shapes(cache: Any) -> Shapes:
    """Shapes of all tensors that a cache object holds, each once; scalars are counters and left out."""
    shapes, seen = Shapes(), set()
    for path, tensor in _tensors(cache, "", set()):
        if tensor.dim() and tensor.numel() and id(tensor) not in seen:
            seen.add(id(tensor))
            size = tensor.element_size()
            shapes[path] = (tuple(tensor.shape), size, tensor.dtype.is_floating_point)
    return shapes


def cache_bytes(cache: Any) -> int:
    """Bytes of all tensors that a cache object holds."""
    return sum(prod(shape) * size for shape, size, _ in cache_shapes(cache).values())


def measure_cache(model: Any) -> tuple[CachedTensor, ...]:
    """The law of every tensor in the model's cache, by layer.

    Raises:
        BadInput: no cache, or a tensor whose growth follows none of the laws.
    """
    shortest = cache_after(model, SHORT_LENGTHS[0])
    shapes = {SHORT_LENGTHS[0]: cache_shapes(shortest)}
    windows = _declared_windows(shortest)
    for length in (*SHORT_LENGTHS[1:], LONG_LENGTH):
        _measure(model, length, shapes)
    if not all(_grows_by_token(sizes) for _, sizes in _by_path(shapes)):
        for length in MORE_LENGTHS:
            _measure(model, length, shapes)
    return tuple(_law(path, sizes, windows) for path, sizes in _by_path(shapes))


def _measure(model: Any, length: int, shapes: dict[int, Shapes]) -> None:
    try:
        shapes[length] = cache_shapes(cache_after(model, length))
    except ProbeTooLong:
        return


def _by_path(shapes: Mapping[int, Shapes]) -> Iterator[tuple[str, dict[int, Size | None]]]:
    for path in dict.fromkeys(path for by_path in shapes.values() for path in by_path):
        yield path, {length: by_path.get(path) for length, by_path in shapes.items()}


def _grows_by_token(sizes: Mapping[int, Size | None]) -> bool:
    """Whether the short lengths tell the law: constant, or an entry per token."""
    first, second = (sizes[length] for length in SHORT_LENGTHS)
    if first is None or second is None:
        return False
    return all(
        b - a in (0, SHORT_LENGTHS[1] - SHORT_LENGTHS[0])
        for a, b in zip(first[0], second[0], strict=True)
    )


def _law(path: str, sizes: Mapping[int, Size | None], windows: Mapping[int, int]) -> CachedTensor:
    """The law of one tensor from its sizes at several lengths; None where it was not there yet."""
    known = {length: size for length, size in sizes.items() if size is not None}
    shape, element_bytes, is_float = next(reversed(known.values()))
    layer, name = _place(path)
    axis = _token_axis(path, [size[0] for size in known.values()], always=len(known) == len(sizes))
    if axis is None:
        return CachedTensor(
            name, layer, prod(shape), 1, element_bytes, "constant", is_float=is_float
        )
    held = {n: 0 if size is None else size[0][axis] for n, size in sizes.items()}
    law, window, stride = _growth(path, held, windows.get(layer))
    heads, width = prod(shape[:axis]), prod(shape[axis + 1 :])
    return CachedTensor(name, layer, heads, width, element_bytes, law, window, stride, is_float)


def _token_axis(path: str, shapes: list[tuple[int, ...]], *, always: bool) -> int | None:
    """The dimension that differs between lengths; None for a constant."""
    rank = len(shapes[0])
    if any(len(shape) != rank for shape in shapes):
        raise BadInput(f"the cache's {path} changes its rank: it cannot be planned")
    varying = [dim for dim in range(rank) if len({shape[dim] for shape in shapes}) > 1]
    if len(varying) > 1:
        raise BadInput(
            f"the cache's {path} grows in {len(varying)} dimensions: it cannot be planned"
        )
    if varying:
        return varying[0]
    # A remainder that was there once, or a state that appears with the first full stride.
    return None if always or len(shapes) > 1 else rank - 2


def _growth(path: str, held: Mapping[int, int], declared: int | None) -> tuple[Law, int, int]:
    """Law, window and stride of a tensor that held so many entries at each length."""
    most = max(held.values())
    if all(entries == min(length, most) for length, entries in held.items()):
        window = most if most < max(held) else (declared or 0)
        return "growing", window, 1
    for stride in range(2, max(held) + 1):
        if all(entries == length // stride for length, entries in held.items()):
            return "growing", 0, stride
        if all(entries == length % stride for length, entries in held.items()):
            return "remainder", 0, stride
    raise BadInput(f"the cache's {path} holds {dict(held)} entries: no law that is known")


def _declared_windows(cache: Any) -> dict[int, int]:
    """Entries at which each windowed cache layer stops to grow, as its own `update` says."""
    windows = {}
    for index, layer in enumerate(getattr(cache, "layers", ())):
        limit, keys = getattr(layer, "sliding_window", None), getattr(layer, "keys", None)
        if isinstance(limit, int) and isinstance(keys, torch.Tensor) and keys.dim() == 4:
            grown = copy.deepcopy(layer)
            values = layer.values
            try:
                grown.update(_longer(keys, 2 * limit), _longer(values, 2 * limit))
            except Exception:  # a layer with another update keeps its declared window
                windows[index] = limit - 1
                continue
            kept = grown.keys.shape[2]
            if kept < 2 * limit:
                windows[index] = kept
    return windows


def _longer(tensor: torch.Tensor, num_tokens: int) -> torch.Tensor:
    batch, heads, _, width = tensor.shape
    return tensor.new_empty((batch, heads, num_tokens, width))


def _tensors(value: Any, path: str, seen: set[int]) -> Iterator[tuple[str, torch.Tensor]]:
    """All tensors that an object reaches through attributes, lists and dicts."""
    if isinstance(value, torch.Tensor):
        yield path, value
        return
    if id(value) in seen or isinstance(value, torch.nn.Module):
        return
    if isinstance(value, Mapping):
        items: Any = ((f"{path}.{key}", part) for key, part in value.items())
    elif isinstance(value, list | tuple):
        items = ((f"{path}[{i}]", part) for i, part in enumerate(value))
    elif hasattr(value, "__dict__") and not isinstance(value, type):
        if hasattr(value, "to_diff_dict"):  # a config
            return
        items = ((f"{path}.{key}", part) for key, part in vars(value).items())
    else:
        return
    seen.add(id(value))
    for name, part in items:
        yield from _tensors(part, name, seen)


def _place(path: str) -> tuple[int, str]:
    """Layer and name of a tensor from its path: `.layers[3].conv_states.0` is conv_states of layer 3."""
    match = re.search(r"\[(\d+)\]|\.(\d+)(?=\.|\[|$)", path)
    if match is None:
        return 0, path.strip(".")
    name = path[match.end() :] or path[: match.start()]
    return int(match.group(1) or match.group(2)), re.sub(r"\.\d+|\[\d+\]", "", name).strip(".")
