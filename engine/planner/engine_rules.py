"""KV-cache allocation rules per engine: how many token slots each keeps for a sequence.

The unit is the token slots of one sequence, summed over the layers; a slot is `cached_elements` of the
model wide. The rules differ in the handling of sliding windows and in their rounding:

    llmopt        every layer holds the whole sequence, in blocks; if every layer has a window, the widest
                  window and max_num_batched_tokens
    vllm          a windowed layer holds min(W - 1 + max_num_batched_tokens, S) in blocks, and a block
                  more; a chunked one min(C + max_num_batched_tokens, S). Layers are pooled in groups of
                  one size, so a smaller group is padded. With pipeline stages nothing is freed
    llama.cpp     a windowed layer holds min(W + n_ubatch, S); all layers in steps of 256 tokens, with a
                  separate stream per sequence
    transformers  a windowed layer holds min(W - 1, S); no blocks

Layers of a probed model differ in width and hold state; the same rules for them count bytes:

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
from collections.abc import Callable, Iterable
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


def _llmopt_probed(shape: ProbedShape, tokens: int, element: Element, knobs: CacheKnobs) -> int:
    kept_tokens = tokens
    windows = [t.window for t in shape.growing]
    if windows and all(windows):
        window = Window(max(windows) + 1)
        kept_tokens = min(
            tokens, window.max_blocks(knobs.step_tokens, knobs.block_size) * knobs.block_size
        )
    slots = round_up(kept_tokens, knobs.block_size)
    return _sum(shape.growing, element, lambda t: ceil(slots / t.stride)) + shape.state_bytes


def _llama_cpp_probed(shape: ProbedShape, tokens: int, element: Element, knobs: CacheKnobs) -> int:
    def num_entries(t: CachedTensor) -> int:
        kept = min(tokens, t.window + 1 + knobs.ubatch_tokens) if t.window else tokens
        return ceil(round_up(kept, LLAMA_CPP_STEP) / t.stride)

    state = sum(
        4 * shape.served_state_elements(t) for t in shape.layer_tensors if t.law != "growing"
    )
    return _sum(shape.growing, element, num_entries) + state


def _transformers_probed(
    shape: ProbedShape, tokens: int, element: Element, knobs: CacheKnobs
) -> int:
    def num_entries(t: CachedTensor) -> int:
        return t.entries(tokens) if shape.frees_windows else tokens // t.stride

    own = [t for t in shape.layer_tensors if t.law != "growing"]
    return _sum(shape.growing, element, num_entries) + sum(
        t.num_bytes(tokens) for t in (*own, *shape.positions)
    )


def _paged_probed(
    shape: ProbedShape, tokens: int, element: Element, knobs: CacheKnobs, *, narrows: bool
) -> int:
    """Pages of one sequence in all groups; compressed caches and indexer keys are pools of their own.
    `narrows`: recurrent states take as many bits as in vLLM, not as in transformers."""
    layers: dict[tuple[int, int], Fraction] = defaultdict(Fraction)
    states: dict[int, int] = defaultdict(int)  # bytes of each layer that has a state
    apart = []
    for t in shape.layer_tensors:
        if t.law != "growing":
            width = shape.vllm_state_width(t) if narrows else t.element_bytes
            states[t.layer] += width * shape.served_state_elements(t)
    for t in shape.growing:
        if t.stride > 1 or is_indexer(t):
            apart.append(t)
        else:
            window = t.window if knobs.frees_windows and shape.frees_windows else 0
            layers[t.layer, window] += entry_bytes(t, element)
    # Layers by vLLM's page spec: bytes of a token, and the window (0: none).
    paged = Counter((size, window) for (_, window), size in layers.items())
    block = knobs.block_size
    rest = _sum(apart, element, lambda t: round_up(ceil(tokens / t.stride), block), _vllm_entry)
    widest = max((size for size, _ in paged), default=Fraction(0))
    if not widest:
        return ceil(rest) + sum(states.values())
    if states:
        step = BLOCK_ALIGNMENT * widest
        block = max(block, BLOCK_ALIGNMENT * ceil(max(states.values()) / step))
    elif not any(window for _, window in paged):
        whole = sum(size * count for (size, _), count in paged.items())
        return ceil(rest + whole * round_up(tokens, block))
    group = _pool_group(size for size in (*paged.values(), len(states)) if size)
    pages = ceil(len(states) / group)
    for (size, window), count in paged.items():
        # A narrower layer keeps more tokens in a page of the same size.
        per_page = max(1, int(block * widest / size))
        kept = min(window + knobs.step_tokens, tokens) if window else tokens
        pages += ceil(count / group) * (ceil(kept / per_page) + bool(window))
    return ceil(rest + group * pages * block * widest)


def _pool_group(counts: Iterable[int]) -> int:
    """Layers of a pool: smaller classes are padded to the largest, unless it is 1.5 times the smallest."""
    sizes = sorted(counts)
    return sizes[-1] if sizes[-1] < 1.5 * sizes[0] else sizes[0]


def _vllm_entry(tensor: CachedTensor, element: Element) -> Fraction | int:
    """Bytes of an entry that is kept apart: indexer keys are fp8 with a float32 scale per 128."""
    if is_indexer(tensor):
        width = tensor.heads * tensor.width
        return width + 4 * ceil(width / 128)
    return entry_bytes(tensor, element)


def _sum(
    tensors: Iterable[CachedTensor],
    element: Element,
    num_entries: Callable[[CachedTensor], int],
    size: Callable[[CachedTensor, Element], Fraction | int] = entry_bytes,
) -> int:
    return ceil(sum(num_entries(t) * size(t, element) for t in tensors))


_PROBED_RULES: dict[str, Callable[[ProbedShape, int, Element, CacheKnobs], int]] = {
    "llmopt": _llmopt_probed,
    "vllm": partial(_paged_probed, narrows=True),
    "sglang": partial(_paged_probed, narrows=False),
    "trtllm": partial(_paged_probed, narrows=True),
    "llama.cpp": _llama_cpp_probed,
    "transformers": _transformers_probed,
}


@dataclass(frozen=True, slots=True)
class EngineRule:
    """The cache rule of an engine: `slots` computes it; `kv_dtypes` are the dtypes that it can store, and
    `default_kv_dtype` the one without an option."""

    name: str
    slots: Callable[[ModelShape, int, CacheKnobs], int]
    kv_dtypes: tuple[str, ...]
    description: str
    default_kv_dtype: str = "bf16"

    def kv_bytes(
        self,
        shape: ModelShape,
        num_tokens: int,
        bytes_per_element: float | Fraction,
        knobs: CacheKnobs,
    ) -> int:
        """KV-cache bytes of one sequence, its constant state included."""
        if isinstance(shape, ProbedShape):
            return _PROBED_RULES[self.name](shape, num_tokens, bytes_per_element, knobs)
        slots = self.slots(shape, num_tokens, knobs)
        return ceil(slots * self.cached_elements(shape) * bytes_per_element)

    def cached_elements(self, shape: ModelShape) -> int:
        """Elements of a slot: the model's, except that transformers caches the new Falcon layout after
        repeating each KV head for all of its query heads."""
        if self.name == "transformers" and shape.family == "falcon":
            per_group = shape.num_heads // shape.num_kv_heads if shape.num_kv_heads > 1 else 1
            return shape.cached_elements * per_group
        return shape.cached_elements


def resident_tokens(shape: ModelShape, tokens: int, step_tokens: int, block_size: int) -> int:
    """Tokens of a sequence that llmopt's engine keeps; all layers share one block table."""
    windows = [window for window in shape.windows if window is not None]
    if len(windows) < shape.num_layers:
        return tokens
    return min(tokens, Window(max(windows)).max_blocks(step_tokens, block_size) * block_size)


def _llmopt(shape: ModelShape, tokens: int, knobs: CacheKnobs) -> int:
    resident = resident_tokens(shape, tokens, knobs.step_tokens, knobs.block_size)
    return shape.num_layers * round_up(resident, knobs.block_size)


def _vllm(shape: ModelShape, tokens: int, knobs: CacheKnobs) -> int:
    whole = round_up(tokens, knobs.block_size)
    classes = Counter(shape.windows)
    if not knobs.frees_windows or set(classes) == {None}:
        return shape.num_layers * whole
    group = _pool_group(classes.values())
    return group * sum(
        ceil(count / group) * _vllm_held(shape, window, tokens, knobs)
        for window, count in classes.items()
    )


def _vllm_held(shape: ModelShape, window: int | None, tokens: int, knobs: CacheKnobs) -> int:
    if window is None:
        return round_up(tokens, knobs.block_size)
    if shape.chunked:
        return round_up(min(window + knobs.step_tokens, tokens), knobs.block_size)
    reach = min(window - 1 + knobs.step_tokens, tokens)
    return round_up(reach, knobs.block_size) + knobs.block_size


def _llama_cpp(shape: ModelShape, tokens: int, knobs: CacheKnobs) -> int:
    kept_tokens = (
        tokens if window is None else min(tokens, window + knobs.ubatch_tokens)
        for window in shape.windows
    )
    return sum(round_up(count, LLAMA_CPP_STEP) for count in kept_tokens)


def _transformers(shape: ModelShape, tokens: int, knobs: CacheKnobs) -> int:
    return sum(
        tokens if window is None else min(tokens, max(1, window - 1)) for window in shape.windows
    )


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
            _vllm,
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


PAGED_LIKE_VLLM = ("sglang", "trtllm")
"""Servers with paged caches, which are planned by vLLM's rule; their speed is their own."""
ENGINES = ("vllm", "sglang", "trtllm", "llmopt", "llama.cpp", "transformers")


def engine_rule(name: str) -> EngineRule:
    """The rule of the engine of that name. Raises BadInput: an unknown engine."""
    if name not in ENGINES:
        raise BadInput(f"no engine {name!r}: {offer(name, (*ENGINES, 'all'))}")
    return replace(RULES["vllm"], name=name) if name in PAGED_LIKE_VLLM else RULES[name]
