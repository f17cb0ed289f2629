"""KV-cache allocation rules per engine: how many bytes each keeps for a sequence.

The rules differ in the handling of sliding windows and in their rounding to token slots:

    llmopt        every layer holds the whole sequence, in blocks; if every layer has a window, the widest
                  window and max_num_batched_tokens
    vllm          a windowed layer holds min(W - 1 + max_num_batched_tokens, S) in blocks, and a block
                  more; a chunked one min(C + max_num_batched_tokens, S). Layers are pooled in groups of
                  one size, so a smaller group is padded. With pipeline stages nothing is freed
    llama.cpp     a windowed layer holds min(W + n_ubatch, S); all layers in steps of 256 tokens, with a
                  separate stream per sequence
    transformers  a windowed layer holds min(W - 1, S); no blocks

Layers of a probed model differ in width, and hold state:

    llmopt        a state once
    vllm          one page size for all: the attention block grows until its page holds a layer's state, and
                  the state is padded to that page; indexer keys in fp8 with a float32 scale per 128; some
                  families' recurrent states in 16 bits, which sglang keeps in float32
    llama.cpp     the state in float32; of a convolution the columns before the present token, as in vLLM
    transformers  as measured, cached positions included

vLLM's rule for states is that of `HybridAttentionMambaModelConfig` (vllm/model_executor/models/config.py)
without prefix caching of states: one page per sequence and state layer.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from math import ceil

from ...base.errors import BadInput
from ...base.option import offer
from ...quant.families.shapes import ModelShape
from ..probe.facts import CachedTensor
from ..scheduling.block_pool import Window
from .probed_shape import ProbedShape, entry_bytes, is_indexer


@dataclass(frozen=True, slots=True)
class CacheKnobs:
    """Parameters of the cache rules besides the model: tokens of a block and of a step (vLLM's
    max_num_batched_tokens), llama.cpp's n_ubatch, and whether vLLM frees blocks out of the window."""

    block_size: int = 16
    step_tokens: int = 8192
    ubatch_tokens: int = 512
    frees_windows: bool = True


def round_up(value: int, step: int) -> int:
    return -(-value // step) * step


LLAMA_CPP_STEP = 256
BLOCK_ALIGNMENT = 16

Element = float | Fraction
Classes = Counter[tuple[Fraction | int, int, int]]


def cache_classes(shape: ModelShape, element: Element, repeats: int = 1) -> Classes:
    """Number of the cached tensors by bytes of an entry, window (0: none), and tokens of an entry. A window
    of W keeps W - 1 tokens before the present one. A table's shape has one tensor a layer."""
    if isinstance(shape, ProbedShape):
        return Counter((entry_bytes(t, element), t.window, t.stride) for t in shape.growing)
    size = repeats * shape.cached_elements * Fraction(element)
    return Counter((size, (window or 1) - 1, 1) for window in shape.windows)


def _total(classes: Classes, num_entries: Callable[[int, int], int]) -> int:
    """Bytes of all classes; `num_entries` are those of a window and a stride."""
    sizes = (
        count * size * num_entries(window, stride)
        for (size, window, stride), count in classes.items()
    )
    return ceil(sum(sizes))


def _states(shape: ProbedShape) -> list[CachedTensor]:
    """Tensors of a sequence's constant state."""
    return [t for t in shape.layer_tensors if t.law != "growing"]


def _llmopt(shape: ModelShape, tokens: int, element: Element, knobs: CacheKnobs) -> int:
    classes, block = cache_classes(shape, element), knobs.block_size
    windows = [window for _, window, _ in classes]
    if windows and all(windows):
        window = Window(max(windows) + 1)
        tokens = min(tokens, window.max_blocks(knobs.step_tokens, block) * block)
    slots = round_up(tokens, block)
    return _total(classes, lambda _, stride: ceil(slots / stride)) + shape.state_bytes


def _llama_cpp(shape: ModelShape, tokens: int, element: Element, knobs: CacheKnobs) -> int:
    def num_entries(window: int, stride: int) -> int:
        kept = min(tokens, window + 1 + knobs.ubatch_tokens) if window else tokens
        return ceil(round_up(kept, LLAMA_CPP_STEP) / stride)

    total = _total(cache_classes(shape, element), num_entries)
    if isinstance(shape, ProbedShape):
        total += sum(4 * shape.served_state_elements(t) for t in _states(shape))
    return total


def _transformers(shape: ModelShape, tokens: int, element: Element, knobs: CacheKnobs) -> int:
    def num_entries(window: int, stride: int) -> int:
        entries = tokens // stride
        return min(entries, window) if window else entries

    total = _total(cache_classes(shape, element, _repeats(shape)), num_entries)
    if isinstance(shape, ProbedShape):
        total += sum(t.num_bytes(tokens) for t in (*_states(shape), *shape.positions))
    return total


def _repeats(shape: ModelShape) -> int:
    """Copies of each KV head: transformers repeats those of the new Falcon layout for all of a head's query
    heads before it caches them."""
    is_copied = shape.family == "falcon" and shape.num_kv_heads > 1
    return shape.num_heads // shape.num_kv_heads if is_copied else 1


def _paged(
    shape: ModelShape, tokens: int, element: Element, knobs: CacheKnobs, *, narrows: bool = True
) -> int:
    """Pages of one sequence in all groups; compressed caches and indexer keys are pools of their own.
    `narrows`: recurrent states take as many bits as in vLLM, not as in transformers."""
    states: dict[int, int] = defaultdict(int)  # bytes of each layer that has a state
    apart: list[CachedTensor] = []
    # Layers by vLLM's page spec: bytes of a token, and the window (0: none).
    paged: Counter[tuple[Fraction | int, int]] = Counter()
    if isinstance(shape, ProbedShape):
        layers: dict[tuple[int, int], Fraction] = defaultdict(Fraction)
        for t in _states(shape):
            width = shape.vllm_state_width(t) if narrows else t.element_bytes
            states[t.layer] += width * shape.served_state_elements(t)
        for t in shape.growing:
            if t.stride > 1 or is_indexer(t):
                apart.append(t)
            else:
                window = t.window if knobs.frees_windows else 0
                layers[t.layer, window] += entry_bytes(t, element)
        paged.update((size, window) for (_, window), size in layers.items())
    else:
        for (size, window, _), count in cache_classes(shape, element).items():
            paged[size, window if knobs.frees_windows else 0] += count
    block = knobs.block_size
    rest = sum(round_up(ceil(tokens / t.stride), block) * _vllm_entry(t, element) for t in apart)
    widest = max((size for size, _ in paged), default=Fraction(0))
    if not widest:
        return ceil(rest) + sum(states.values())
    if states:
        step = BLOCK_ALIGNMENT * widest
        block = max(block, BLOCK_ALIGNMENT * ceil(max(states.values()) / step))
    elif not any(window for _, window in paged):
        whole = sum(size * count for (size, _), count in paged.items())
        return ceil(rest + whole * round_up(tokens, block))
    # Layers of a pool: smaller classes are padded to the largest, unless it is 1.5 times the smallest.
    counts = [size for size in (*paged.values(), len(states)) if size]
    group = max(counts) if max(counts) < 1.5 * min(counts) else min(counts)
    pages = ceil(len(states) / group)
    for (size, window), count in paged.items():
        # A narrower layer keeps more tokens in a page of the same size.
        per_page = max(1, int(block * widest / size))
        # A chunk keeps one token more than a window of its size, and has no spare page.
        kept = min(window + shape.chunked + knobs.step_tokens, tokens) if window else tokens
        spare = window > 0 and not shape.chunked
        pages += ceil(count / group) * (ceil(kept / per_page) + spare)
    return ceil(rest + group * pages * block * widest)


_sglang = partial(_paged, narrows=False)


def _vllm_entry(tensor: CachedTensor, element: Element) -> Fraction | int:
    """Bytes of an entry that is kept apart: indexer keys are fp8 with a float32 scale per 128."""
    if is_indexer(tensor):
        width = tensor.heads * tensor.width
        return width + 4 * ceil(width / 128)
    return entry_bytes(tensor, element)


@dataclass(frozen=True, slots=True)
class EngineRule:
    """The cache rule of an engine: `kv_bytes` are those of one sequence, its constant state included;
    `kv_dtypes` are the dtypes that it can store, and `default_kv_dtype` the one without an option."""

    name: str
    kv_bytes: Callable[[ModelShape, int, Element, CacheKnobs], int]
    kv_dtypes: tuple[str, ...]
    description: str
    default_kv_dtype: str = "bf16"

    def cached_elements(self, shape: ModelShape) -> int:
        """Elements of a token slot."""
        return shape.cached_elements * (_repeats(shape) if self.name == "transformers" else 1)


def resident_tokens(shape: ModelShape, tokens: int, step_tokens: int, block_size: int) -> int:
    """Tokens of a sequence that llmopt's engine keeps; all layers share one block table."""
    windows = [window for window in shape.windows if window is not None]
    if len(windows) < shape.num_layers:
        return tokens
    return min(tokens, Window(max(windows)).max_blocks(step_tokens, block_size) * block_size)


RULES = {
    rule.name: rule
    for rule in (
        EngineRule(
            "llmopt",
            _llmopt,
            ("bf16", "float32", "fp8_per_token_head", "int8"),
            "one block table for all layers; where every layer has a window, the widest and "
            "max_num_batched_tokens are kept",
        ),
        EngineRule(
            "vllm",
            _paged,
            ("bf16", "f16", "float32", "fp8", "fp8_ds_mla", "fp8_per_token_head", "int8", "nvfp4"),
            "a window keeps W - 1 + max_num_batched_tokens and a block; layer groups are padded; a state "
            "takes a page",
        ),
        EngineRule(
            "llama.cpp",
            _llama_cpp,
            ("f16", "bf16", "float32", "q8_0", "q5_1", "q4_0"),
            "a window keeps W + n_ubatch; all in steps of 256 tokens",
            "f16",
        ),
        EngineRule(
            "transformers",
            _transformers,
            ("bf16", "f16", "float32"),
            "a window keeps W - 1; no blocks",
        ),
    )
}


ENGINES = ("vllm", "sglang", "trtllm", "llmopt", "llama.cpp", "transformers")


def engine_rule(name: str) -> EngineRule:
    """The rule of the engine of that name. Raises BadInput: an unknown engine."""
    if name not in ENGINES:
        raise BadInput(f"no engine {name!r}: {offer(name, (*ENGINES, 'all'))}")
    if name == "sglang":  # it and trtllm are paged by vLLM's rule; their speed is their own
        return replace(RULES["vllm"], name=name, kv_bytes=_sglang)
    return replace(RULES["vllm"], name=name) if name == "trtllm" else RULES[name]
