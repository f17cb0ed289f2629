"""Measure parameters by role, layer and part, and the growth of a cache over passes of several lengths.

The dimension of a tensor that changes is that of the tokens, and tells its law: every token, a window, an
entry per so many, or a constant. Meta tensors have no values: `DataFreeMode` answers `nonzero` and a mask
with one hit, a scalar with zero or False, on which sizes do not depend.
"""

from __future__ import annotations

import copy
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from math import prod
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.cache_utils import DynamicCache

from ...base.errors import BadInput
from ...quant.families.registry import type_of
from .facts import CachedTensor, Law, Parameters, Part

_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks|block)\.(\d+)\.")
_VISION = re.compile(
    r"vision|visual|image_|audio|sound|speech|vit(?:_|\.|$)|sam_|patch_embed|video|resampler|embed_vision"
)
_PROJECTOR = re.compile(
    r"multi_modal_projector|projector|connector|merger|aligner|mm_|embed_vision|embed_audio|vlm?_connector"
)
_ROUTER = re.compile(r"(?:^|\.)(?:gate|router|wg|classifier)(?:\.|$)")
_LATENT_DOWN = re.compile(r"q_a_proj|kv_a_proj|q_down|kv_down|fused_qkv_a|wq_a|wkv_a|indexer")
_KV = re.compile(r"(?:^|[._])(?:k_proj|v_proj|key|value|kv_proj)(?:\.|$)")


def measure_parameters(model: Any, num_experts: int, per_token: int) -> tuple[Parameters, ...]:
    """All parameters of a model, equal ones of a layer in one row. A parameter that several modules share is
    counted where it comes first. Of stacked experts, the first dimension counts them."""
    head = model.get_output_embeddings()
    output = None if head is None else getattr(head, "weight", None)
    tables = {
        id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Embedding)
    }
    count: Counter[tuple[Part, str, str, int, int, int]] = Counter()
    for name, parameter in model.named_parameters():
        part: Part = "vision" if _VISION.search(name) else "text"
        if re.search(r"(?:^|\.)(?:language_model|text_model|lm_head)\.", name):
            part = "text"
        elif _PROJECTOR.search(name):
            part = "projector"
        match = _LAYER.search(name) if part == "text" else None
        layer = -1 if match is None else int(match[1])
        role, shard, experts = _role(name, parameter, num_experts)
        if id(parameter) in tables:
            role, shard = "embedding", "ranks"
        elif parameter is output:
            role, shard = "head", "ranks"
        if part != "text":
            role, shard, experts = part, "whole", 1
        # Of each of the stacked matrices; further dimensions are columns.
        rows, *columns = parameter.shape[1:] if experts > 1 else parameter.shape or (1,)
        count[part, role, shard, layer, rows, prod(columns)] += max(1, experts)
    parameters = []
    for key, number in count.items():
        is_routed = key[1] in ("expert", "expert_bias") and num_experts
        used = number * per_token // num_experts if is_routed else number
        parameters.append(Parameters(*key, number, used))
    return tuple(parameters)


def _role(name: str, parameter: torch.Tensor, num_experts: int) -> tuple[str, str, int]:
    """Role, placement under tensor parallelism, and the experts that the parameter stacks."""
    in_experts = re.search(r"(?:^|\.)experts(?:\.|$)", name) is not None
    if parameter.dim() < 2:
        return ("bias" if name.endswith("bias") else "norm"), "whole", 1
    if in_experts and num_experts and parameter.shape[0] == num_experts:
        return ("expert_bias" if parameter.dim() == 2 else "expert"), "ranks", num_experts
    if in_experts and num_experts:
        return "expert", "ranks", 1
    if _ROUTER.search(name) and num_experts and num_experts in parameter.shape:
        return "router", "whole", 1
    if _LATENT_DOWN.search(name):
        return "linear", "whole", 1
    return "linear", "kv_heads" if _KV.search(name) else "ranks", 1


aten = torch.ops.aten


class ProbeTooLong(Exception):
    """A forward pass took more operators than it was allowed."""


class DataFreeMode(TorchDispatchMode):
    """Answer data-dependent operators of meta tensors; count operators, at most `max_operators`."""

    def __init__(self, max_operators: int) -> None:
        super().__init__()
        self._left = max_operators

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._left -= 1
        if self._left < 0:
            raise ProbeTooLong
        answer = _ANSWERS.get(func)
        if answer is not None and isinstance(args[0], torch.Tensor) and args[0].is_meta:
            return answer(args)
        return func(*args, **(kwargs or {}))


def _empty(*shape: int, dtype: torch.dtype = torch.long) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _indexed(args: tuple[Any, ...]) -> torch.Tensor:
    """`tensor[indices]`, each mask as the position of one hit."""
    tensor, indices = args
    positions: list[torch.Tensor | None] = []
    for index in indices:
        if index is not None and index.dtype is torch.bool:
            positions += [_empty(1)] * index.dim()
        else:
            positions.append(index)
    return aten.index.Tensor(tensor, positions)


_ANSWERS: dict[Any, Callable[[tuple[Any, ...]], Any]] = {
    aten.nonzero.default: lambda args: _empty(1, args[0].dim()),
    aten._local_scalar_dense.default: lambda args: torch.zeros((), dtype=args[0].dtype).item(),
    aten.masked_select.default: lambda args: _empty(1, dtype=args[0].dtype),
    aten.bincount.default: lambda args: _empty(max(1, args[2] if len(args) > 2 else 0)),
    aten.equal.default: lambda args: False,
    aten.index.Tensor: _indexed,
}

SHORT_LENGTHS = (4, 8)
LONG_LENGTH = 509  # prime, so that a compressed cache leaves a remainder
MORE_LENGTHS = (256, 640, 1023)  # tell the strides apart that one length leaves possible
# A forward pass with a Python loop over tokens (Mamba without its kernel) is not run at the long lengths.
MAX_OPERATORS = 60_000

Size = tuple[tuple[int, ...], int, bool]
Shapes = dict[str, Size]
"""The tensors of a cache by path: shape, bytes per element, and whether it is floating point."""


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
    for steps, tensor in walk(cache):
        if not isinstance(tensor, torch.Tensor) or not tensor.dim() or not tensor.numel():
            continue
        if id(tensor) not in seen:
            seen.add(id(tensor))
            names = (key.name for key in steps)
            path = "".join(f"[{n}]" if isinstance(n, int) else f".{n}" for n in names)
            size = tensor.element_size()
            shapes[path] = (tuple(tensor.shape), size, tensor.dtype.is_floating_point)
    return shapes


def cache_bytes(cache: Any) -> int:
    return sum(prod(shape) * size for shape, size, _ in cache_shapes(cache).values())


def measure_cache(model: Any) -> tuple[CachedTensor, ...]:
    """Law of every tensor in the model's cache, by layer. BadInput: no cache, or no law fits."""
    shortest = cache_after(model, SHORT_LENGTHS[0])
    shapes = {SHORT_LENGTHS[0]: cache_shapes(shortest)}
    windows = _declared_windows(shortest)
    for length in (*SHORT_LENGTHS[1:], LONG_LENGTH):
        _measure(model, length, shapes)
    # The two shortest runs may show constant or per-token growth already.
    per_token = SHORT_LENGTHS[1] - SHORT_LENGTHS[0]
    short = ([sizes[length] for length in SHORT_LENGTHS] for _, sizes in _by_path(shapes))
    if not all(
        first is not None
        and second is not None
        and all(b - a in (0, per_token) for a, b in zip(first[0], second[0], strict=True))
        for first, second in short
    ):
        for length in MORE_LENGTHS:
            _measure(model, length, shapes)
    return tuple(_law(path, sizes, windows) for path, sizes in _by_path(shapes))


def _measure(model: Any, length: int, shapes: dict[int, Shapes]) -> None:
    with suppress(ProbeTooLong):
        shapes[length] = cache_shapes(cache_after(model, length))


def _by_path(shapes: Mapping[int, Shapes]) -> Iterator[tuple[str, dict[int, Size | None]]]:
    for path in dict.fromkeys(path for by_path in shapes.values() for path in by_path):
        yield path, {length: by_path.get(path) for length, by_path in shapes.items()}


def _law(path: str, sizes: Mapping[int, Size | None], windows: Mapping[int, int]) -> CachedTensor:
    """The law of one tensor from its sizes at several lengths; None where it was not there yet."""
    known = {length: size for length, size in sizes.items() if size is not None}
    shape, element_bytes, is_float = next(reversed(known.values()))
    # `.layers[3].conv_states.0` is conv_states of layer 3.
    match = re.search(r"\[(\d+)\]|\.(\d+)(?=\.|\[|$)", path)
    layer, name = 0, path.strip(".")
    if match is not None:
        name = path[match.end() :] or path[: match.start()]
        layer, name = int(match[1] or match[2]), re.sub(r"\.\d+|\[\d+\]", "", name).strip(".")
    axis = _token_axis(path, [size[0] for size in known.values()], always=len(known) == len(sizes))
    if axis is None:
        return CachedTensor(
            name, layer, prod(shape), 1, element_bytes, "constant", is_float=is_float
        )
    lengths = {n: 0 if size is None else size[0][axis] for n, size in sizes.items()}
    law, window, stride = _growth(path, lengths, windows.get(layer))
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


def _growth(path: str, lengths: Mapping[int, int], declared: int | None) -> tuple[Law, int, int]:
    """Law, window and stride of a tensor that held so many entries at each length."""
    most = max(lengths.values())
    if all(entries == min(length, most) for length, entries in lengths.items()):
        window = most if most < max(lengths) else (declared or 0)
        return "growing", window, 1
    for stride in range(2, max(lengths) + 1):
        if all(entries == length // stride for length, entries in lengths.items()):
            return "growing", 0, stride
        if all(entries == length % stride for length, entries in lengths.items()):
            return "remainder", 0, stride
    raise BadInput(f"the cache's {path} holds {dict(lengths)} entries: no law that is known")


def _declared_windows(cache: Any) -> dict[int, int]:
    """Entries at which each windowed cache layer stops to grow, as its own `update` says."""
    windows = {}
    for index, layer in enumerate(getattr(cache, "layers", ())):
        limit, keys = getattr(layer, "sliding_window", None), getattr(layer, "keys", None)
        if isinstance(limit, int) and isinstance(keys, torch.Tensor) and keys.dim() == 4:
            grown = copy.deepcopy(layer)
            try:
                grown.update(_longer(keys, 2 * limit), _longer(layer.values, 2 * limit))
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


class Key(NamedTuple):
    """One step of a place: the attribute of that name, or the item of a list or dict."""

    name: Any
    is_attribute: bool


Place = tuple[Key, ...]
"""Path to a part of an object: attributes and items, from the outside in."""


def walk(
    value: Any, steps: Place = (), within: frozenset[int] = frozenset()
) -> Iterator[tuple[Place, torch.Tensor | int]]:
    """Every tensor and integer (booleans too) that an object reaches through attributes, lists and dicts;
    `within` are the ids of the objects around it, which it may refer back to."""
    if isinstance(value, torch.Tensor | int):
        yield steps, value
        return
    if id(value) in within:
        return
    is_attribute, items = False, ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list | tuple):
        items = enumerate(value)
    elif is_attribute := is_holder(value):
        items = vars(value).items()
    for name, part in items:
        yield from walk(part, (*steps, Key(name, is_attribute)), within | {id(value)})


def is_holder(value: Any) -> bool:
    """True if it is a cache or a layer of one: a plain object, and no module, class, function or config."""
    is_torchs = type(value).__module__.partition(".")[0] == "torch"
    if callable(value) or isinstance(value, torch.Tensor) or is_torchs:
        return False
    return hasattr(value, "__dict__") and not hasattr(value, "to_diff_dict")
