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

Layers of a probed model differ in width and hold state: `probed_rules` has the same rules for them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from math import ceil

from ....quant.base.errors import BadInput
from ....quant.families.shapes import ModelShape
from ...scheduling.block_pool import Window
from .cache_knobs import CacheKnobs, round_up
from .probed_rules import LLAMA_CPP_STEP, PROBED_RULES
from .probed_shape import ProbedShape


@dataclass(frozen=True, slots=True)
class EngineRule:
    """The cache rule of an engine: `slots` computes it; `kv_dtypes` are the dtypes that it can store."""

    name: str
    slots: Callable[[ModelShape, int, CacheKnobs], int]
    kv_dtypes: tuple[str, ...]
    description: str

    def kv_bytes(
        self,
        shape: ModelShape,
        num_tokens: int,
        bytes_per_element: float | Fraction,
        knobs: CacheKnobs,
    ) -> int:
        """KV-cache bytes of one sequence, its constant state included."""
        if isinstance(shape, ProbedShape):
            return PROBED_RULES[self.name](shape, num_tokens, bytes_per_element, knobs)
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
    sizes = sorted(classes.values())
    group = sizes[-1] if sizes[-1] < 1.5 * sizes[0] else sizes[0]
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
    return sum(
        round_up(
            tokens if window is None else min(tokens, window + knobs.ubatch_tokens), LLAMA_CPP_STEP
        )
        for window in shape.windows
    )


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
            ("bf16", "float32", "fp8", "fp8_ds_mla", "fp8_per_token_head", "int8", "nvfp4"),
            "a window keeps W - 1 + max_num_batched_tokens and a block; layer groups are padded; a state "
            "takes a page",
        ),
        EngineRule(
            "llama.cpp",
            _llama_cpp,
            ("bf16", "float32", "q8_0", "q5_1", "q4_0"),
            "a window keeps W + n_ubatch; all in steps of 256 tokens",
        ),
        EngineRule(
            "transformers", _transformers, ("bf16", "float32"), "a window keeps W - 1; no blocks"
        ),
    )
}


def engine_rule(name: str) -> EngineRule:
    """The rule of the engine of that name.

    Raises:
        BadInput: an unknown engine.
    """
    if name not in RULES:
        raise BadInput(f"no engine {name!r}: choose {', '.join(RULES)} or all")
    return RULES[name]
