"""KV-cache allocation rules per engine for a probed cache: tensors of several widths, and state.

    llmopt        every layer holds the whole sequence in blocks; where every one has a window, the widest
                  and max_num_batched_tokens. A state once
    vllm          one page size for all: the attention block grows until its page holds a layer's state,
                  and the state is padded to that page; layers in groups of one size, a smaller one padded;
                  indexer keys in fp8 with a float32 scale per 128
    llama.cpp     windows and steps as for other models; the state in float32
    transformers  what was measured, cached positions included

vLLM's rule is that of `HybridAttentionMambaModelConfig` (vllm/model_executor/models/config.py) without
prefix caching of states: one page per sequence and state layer.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fractions import Fraction
from math import ceil

from ...scheduling.block_pool import Window
from ..probe.facts import CachedTensor
from .cache_knobs import CacheKnobs, round_up
from .probed_shape import ProbedShape, entry_bytes, is_indexer

LLAMA_CPP_STEP = 256
BLOCK_ALIGNMENT = 16

Element = float | Fraction


@dataclass(frozen=True, slots=True)
class _Page:
    """vLLM's spec of one layer: bytes of a token, and the window (0: none)."""

    token_bytes: Fraction
    window: int

    def blocks(self, num_tokens: int, block_size: int, step_tokens: int) -> int:
        """Blocks of one sequence."""
        if not self.window:
            return ceil(num_tokens / block_size)
        return ceil(min(self.window + step_tokens, num_tokens) / block_size) + 1


def _llmopt(shape: ProbedShape, tokens: int, element: Element, knobs: CacheKnobs) -> int:
    held = tokens
    windows = [t.window for t in shape.growing]
    if windows and all(windows):
        window = Window(max(windows) + 1)
        held = min(
            tokens, window.max_blocks(knobs.step_tokens, knobs.block_size) * knobs.block_size
        )
    slots = round_up(held, knobs.block_size)
    return _sum(shape.growing, element, lambda t: ceil(slots / t.stride)) + shape.state_bytes


def _llama_cpp(shape: ProbedShape, tokens: int, element: Element, knobs: CacheKnobs) -> int:
    def held(t: CachedTensor) -> int:
        kept = min(tokens, t.window + 1 + knobs.ubatch_tokens) if t.window else tokens
        return ceil(round_up(kept, LLAMA_CPP_STEP) / t.stride)

    state = sum(4 * shape.state_elements(t) for t in shape.layer_tensors if t.law != "growing")
    return _sum(shape.growing, element, held) + state


def _transformers(shape: ProbedShape, tokens: int, element: Element, knobs: CacheKnobs) -> int:
    state = sum(t.num_bytes(tokens) for t in shape.layer_tensors if t.law != "growing")

    def held(t: CachedTensor) -> int:
        return t.entries(tokens) if shape.frees_windows else tokens // t.stride

    positions = sum(t.num_bytes(tokens) for t in shape.positions)
    return _sum(shape.growing, element, held) + state + positions


def _vllm(shape: ProbedShape, tokens: int, element: Element, knobs: CacheKnobs) -> int:
    """Pages of one sequence in all groups; compressed caches and indexer keys are pools of their own."""
    paged, apart = _by_layer(shape, element, knobs)
    states = _state_layers(shape)
    block = knobs.block_size
    rest = _sum(apart, element, lambda t: round_up(ceil(tokens / t.stride), block), _vllm_entry)
    widest = max((page.token_bytes for page in paged), default=Fraction(0))
    if not widest:
        return ceil(rest) + sum(states.values())
    if states:
        step = BLOCK_ALIGNMENT * widest
        block = max(block, BLOCK_ALIGNMENT * ceil(max(states.values()) / step))
    elif all(not page.window for page in paged):
        whole = sum(page.token_bytes * count for page, count in paged.items())
        return ceil(rest + whole * round_up(tokens, block))
    sizes = sorted(size for size in (*paged.values(), len(states)) if size)
    group = sizes[-1] if sizes[-1] < 1.5 * sizes[0] else sizes[0]
    pages = ceil(len(states) / group)
    for page, count in paged.items():
        # A narrower layer keeps more tokens in a page of the same size.
        per_page = max(1, int(block * widest / page.token_bytes))
        pages += ceil(count / group) * page.blocks(tokens, per_page, knobs.step_tokens)
    return ceil(rest + group * pages * block * widest)


def _by_layer(
    shape: ProbedShape, element: Element, knobs: CacheKnobs
) -> tuple[Counter[_Page], list[CachedTensor]]:
    """Layers by page spec, and the tensors that are kept apart from the attention's pages."""
    layers: dict[tuple[int, int], Fraction] = defaultdict(Fraction)
    apart = []
    for t in shape.growing:
        if t.stride > 1 or is_indexer(t):
            apart.append(t)
        else:
            window = t.window if knobs.frees_windows and shape.frees_windows else 0
            layers[t.layer, window] += entry_bytes(t, element)
    return Counter(_Page(size, window) for (_, window), size in layers.items()), apart


def _state_layers(shape: ProbedShape) -> dict[int, int]:
    """State bytes of each layer that has a state."""
    states: dict[int, int] = defaultdict(int)
    for t in shape.layer_tensors:
        if t.law != "growing":
            states[t.layer] += t.element_bytes * shape.state_elements(t)
    return states


def _vllm_entry(tensor: CachedTensor, element: Element) -> Fraction:
    """Bytes of an entry that is kept apart: indexer keys are fp8 with a float32 scale per 128."""
    if is_indexer(tensor):
        width = tensor.heads * tensor.width
        return Fraction(width + 4 * ceil(width / 128))
    return entry_bytes(tensor, element)


def _sum(
    tensors: Iterable[CachedTensor],
    element: Element,
    held: Callable[[CachedTensor], int],
    size: Callable[[CachedTensor, Element], Fraction] = entry_bytes,
) -> int:
    return ceil(sum(held(t) * size(t, element) for t in tensors))


PROBED_RULES: dict[str, Callable[[ProbedShape, int, Element, CacheKnobs], int]] = {
    "llmopt": _llmopt,
    "vllm": _vllm,
    "llama.cpp": _llama_cpp,
    "transformers": _transformers,
}
