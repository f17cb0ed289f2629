"""KV-cache and state sizing: bytes of a token by dtype, quantization scales included, exact for vectors of
several widths; blocks of the engine's KV cache, slots of sequences' constant states.

The engine calls it with measured free memory, the planner with expected memory: one computation, so that a
run can be compared with its plan.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Protocol

from ...base.errors import BadInput, DoesNotFit
from ...base.option import offer
from ...quant.families.shapes import ModelShape
from ..base.units import format_gib
from .probed_shape import ElementBytes, ProbedShape


@dataclass(frozen=True, slots=True)
class KvDtype:
    """A KV-cache dtype. `block` elements of a head take `block_bytes`, block scales included; `scale_bytes`
    are added once per vector (a key or a value of one head, or a latent)."""

    name: str
    block: int
    block_bytes: int
    scale_bytes: int = 0
    description: str = ""

    def bytes_per_element(self, shape: ModelShape) -> Fraction:
        """Exact bytes per element, with scales amortized over their elements. Raises BadInput: the model's
        vectors do not divide into the dtype's blocks."""
        if isinstance(shape, ProbedShape):
            return self._of_layers(shape)
        vector = shape.latent.cached_elements if shape.latent else shape.head_dim
        return self.vector_bytes(vector) / vector

    def _of_layers(self, shape: ProbedShape) -> Fraction:
        """The mean over a token's vectors, and the bytes of each width; a latent's RoPE part has no scale."""
        by_width: dict[int, Fraction] = {}
        latent = shape.latent
        for t in shape.growing:
            if latent and t.heads == 1 and t.width == latent.kv_rank:
                rope = self.rope_bytes(latent.rope_dim)
                by_width[t.width] = self.vector_bytes(latent.cached_elements) - rope
            elif latent and t.heads == 1 and t.width == latent.rope_dim:
                by_width[t.width] = self.rope_bytes(t.width)
            elif t.is_float:
                by_width[t.width] = self.vector_bytes(t.width)
        vectors = [(Fraction(t.heads, t.stride), t.width) for t in shape.growing if t.is_float]
        elements = sum(count * width for count, width in vectors)
        if not elements:
            return Fraction(self.block_bytes, self.block)
        total = sum(count * by_width[width] for count, width in vectors)
        return ElementBytes(Fraction(total) / elements, by_width)

    def rope_bytes(self, width: int) -> Fraction:
        """Bytes of the RoPE part of a latent, whose scale is counted with the latent."""
        return Fraction(self.block_bytes * width, self.block)

    def vector_bytes(self, width: int) -> Fraction:
        """Bytes of one vector: a key or a value of one head, a latent, or an indexer's key. Raises BadInput:
        the width does not divide into the dtype's blocks."""
        if width % self.block:
            raise BadInput(
                f"--kv-dtype {self.name} stores blocks of {self.block} elements, which do not divide "
                f"the model's vectors of {width}: choose another"
            )
        return Fraction(self.block_bytes * width, self.block) + self.scale_bytes


class LatentKvDtype(KvDtype):
    """vLLM's fp8_ds_mla: 512 elements of a latent in fp8 with 4 float32 scales, 64 of RoPE in bfloat16; an
    indexer's key in fp8 with a float32 scale per 128 (vllm/v1/attention/backends/mla)."""

    __slots__ = ()

    def bytes_per_element(self, shape: ModelShape) -> Fraction:
        """Exact bytes per element of a model with such latents. Raises BadInput: the model caches no latent
        of 512 + 64."""
        if shape.latent is None or shape.latent.cached_elements != 576:
            raise BadInput(
                f"--kv-dtype {self.name} holds latents of 512 + 64 elements, which this model does not "
                "cache: choose another"
            )
        return super().bytes_per_element(shape)

    def rope_bytes(self, width: int) -> Fraction:
        return Fraction(2 * width)

    def vector_bytes(self, width: int) -> Fraction:
        if width == 576:
            return Fraction(656)
        if width == 128:
            return Fraction(132)
        raise BadInput(
            f"--kv-dtype {self.name} holds latents of 512 + 64 elements, and this model's vectors have "
            f"{width}: choose another"
        )


def has_sparse_latents(shape: ModelShape) -> bool:
    """True if attention reads latents that an indexer chooses (DeepSeek-V3.2, GLM-5)."""
    is_sparse = isinstance(shape, ProbedShape) and shape.indexer_elements > 0
    return is_sparse and shape.latent is not None and shape.latent.cached_elements == 576


KV_DTYPES = {
    dtype.name: dtype
    for dtype in (
        KvDtype("bf16", 1, 2, description="2 bytes"),
        KvDtype("f16", 1, 2, description="2 bytes"),
        KvDtype("float32", 1, 4, description="4 bytes"),
        KvDtype("fp8", 1, 1, description="1 byte"),
        KvDtype("fp8_per_token_head", 1, 1, 4, "1 byte, and a float32 scale per token and head"),
        KvDtype("int8", 1, 1, 4, "1 byte, and a float32 scale per token and head"),
        LatentKvDtype(
            "fp8_ds_mla",
            1,
            1,
            description="656 bytes per latent of 576: fp8, float32 scales, bf16 RoPE",
        ),
        KvDtype("nvfp4", 16, 9, description="half a byte, and an fp8 scale per 16"),
        KvDtype("q8_0", 32, 34, description="34 bytes per 32"),
        KvDtype("q5_1", 32, 24, description="24 bytes per 32"),
        KvDtype("q4_0", 32, 18, description="18 bytes per 32"),
    )
}

VLLM_NAMES = {
    "bfloat16": "bf16",
    "float16": "f16",
    "fp16": "f16",
    "fp8_e4m3": "fp8",
    "fp8_e5m2": "fp8",
    "int8_per_token_head": "int8",
}
"""vLLM's names of dtypes that have another name here; a name that both share is not listed."""

OF_ENGINE = {
    "bfloat16": "bf16",
    "float32": "float32",
    "fp8": "fp8_per_token_head",
    "int8": "int8",
    "fp8_e4m3": "fp8",
    "fp8_e5m2": "fp8",
}
"""KV dtypes by the names of llmopt's engine. Its fp8 has a scale per token and head; other engines' fp8, its
fp8_e4m3, has one per layer, and e5m2 none."""


def kv_dtype(name: str) -> KvDtype:
    """The KV dtype of that name, or of vLLM's name for it. Raises BadInput: an unknown dtype."""
    key = VLLM_NAMES.get(name.lower(), name.lower())
    if key not in KV_DTYPES:
        raise BadInput(f"no KV dtype {name!r}: {offer(key, KV_DTYPES)}")
    return KV_DTYPES[key]


DEFAULT_BLOCK_SIZE = {"cpu": 32, "cuda": 16, "mps": 32}
DEFAULT_MAX_NUM_SEQS = {"cpu": 16, "cuda": 256, "mps": 16}
DEFAULT_MAX_NUM_BATCHED_TOKENS = {"cpu": 512, "cuda": 8192, "mps": 512}
DEFAULT_UTILIZATION = 0.9
CPU_MEMORY_FRACTION = 0.25
MEMORY_SHARE = 2
"""States take at most one part in so many of the memory that the KV cache could have."""


class CachedShape(Protocol):
    """A model shape that gives the KV-cache bytes per token, such as `shapes.ModelShape`."""

    def kv_bytes_per_token(self, bytes_per_element: float | Fraction) -> int: ...


@dataclass(frozen=True, slots=True)
class KvCacheBudget:
    """KV-cache budget of a device: bytes for the engine in total, bytes of them for other things by name, and
    a change besides `max_model_len` if the budget is too small."""

    budget_bytes: int
    taken: Mapping[str, int] = field(default_factory=dict)
    advice: str = ""

    @classmethod
    def on_cpu(cls, free_bytes: int) -> KvCacheBudget:
        """A fraction of the free memory, because other processes share the machine."""
        return cls(int(free_bytes * CPU_MEMORY_FRACTION))

    @classmethod
    def on_cuda(
        cls,
        total_bytes: int,
        utilization: float,
        weight_bytes: int,
        activation_bytes: int,
        other_bytes: int,
    ) -> KvCacheBudget:
        """`utilization` of the device, less weights, peak activations, runtime and other processes."""
        taken = {
            "weights": weight_bytes,
            "peak activations": activation_bytes,
            "runtime and other processes": other_bytes,
        }
        advice = (
            ", lower max_num_batched_tokens, raise gpu_memory_utilization "
            f"({utilization:g} of {format_gib(total_bytes)}) or store the cache in 8 bits"
        )
        return cls(int(total_bytes * utilization), taken, advice)

    def less(self, name: str, num_bytes: int) -> KvCacheBudget:
        return replace(self, taken={**self.taken, name: num_bytes}) if num_bytes else self

    @property
    def num_bytes(self) -> int:
        return max(0, self.budget_bytes - sum(self.taken.values()))

    def __str__(self) -> str:
        left = format_gib(self.num_bytes)
        if not self.taken:
            return f"{left} is available"
        parts = ", ".join(f"{name} {format_gib(size)}" for name, size in self.taken.items())
        return f"{left} is left of {format_gib(self.budget_bytes)} ({parts})"


@dataclass(frozen=True, slots=True)
class CacheRequest:
    """Options of the KV cache: at most one of the two explicit sizes, and the engine's limits. A block spans
    all layers; `max_model_len` is the most tokens of a sequence that stay in the cache."""

    bytes_per_element: float | Fraction
    block_size: int
    max_model_len: int
    max_num_seqs: int
    memory_bytes: int | None = None
    num_blocks: int | None = None

    @property
    def is_fixed(self) -> bool:
        return self.memory_bytes is not None or self.num_blocks is not None


@dataclass(frozen=True, slots=True)
class CacheSize:
    """KV-cache blocks usable by sequences; the engine allocates one more, the null block for padding."""

    num_blocks: int
    block_size: int
    block_bytes: int

    @property
    def num_tokens(self) -> int:
        return self.num_blocks * self.block_size

    @property
    def num_bytes(self) -> int:
        return (self.num_blocks + 1) * self.block_bytes


def num_blocks_for(
    memory_bytes: int, shape: CachedShape, block_size: int, bytes_per_element: float | Fraction
) -> int:
    """KV blocks of `block_size` tokens that fit into `memory_bytes`, where a block spans all layers."""
    return memory_bytes // (block_size * shape.kv_bytes_per_token(bytes_per_element))


def size_cache(shape: CachedShape, request: CacheRequest, budget: KvCacheBudget) -> CacheSize:
    """Size the KV cache: `num_blocks` if set; else what fits into `memory_bytes` if set; else enough for
    `max_num_seqs` sequences of `max_model_len` tokens, at most the budget. Raises BadInput: `memory_bytes`
    does not hold one block, or the budget not one sequence."""
    size = request.block_size
    block_bytes = size * shape.kv_bytes_per_token(request.bytes_per_element)
    if request.num_blocks is not None:
        return CacheSize(request.num_blocks, size, block_bytes)
    if (memory_bytes := request.memory_bytes) is not None:
        num_blocks = num_blocks_for(memory_bytes, shape, size, request.bytes_per_element)
        if num_blocks < 1:
            raise BadInput(
                f"kv_cache_memory_bytes = {memory_bytes} does not hold one block of {block_bytes} bytes"
            )
        return CacheSize(num_blocks, size, block_bytes)
    per_sequence = -(-request.max_model_len // size)
    affordable = num_blocks_for(budget.num_bytes, shape, size, request.bytes_per_element)
    if affordable < per_sequence:
        shorter = f" to {affordable * size} or less" if affordable else ""
        # Where a shorter context fits, that is the caller's choice, and no other device's.
        raise (BadInput if affordable > 0 else DoesNotFit)(
            f"a sequence of {request.max_model_len} tokens needs "
            f"{format_gib(per_sequence * block_bytes)} of KV cache, but {budget}: "
            f"lower max_model_len{shorter}{budget.advice}"
        )
    return CacheSize(min(affordable, per_sequence * request.max_num_seqs), size, block_bytes)


@dataclass(frozen=True, slots=True)
class StateSlots:
    """Slots of constant state, of `slot_bytes` each: one per running sequence, and checkpoints for the prefix
    cache. The engine has one more, the null slot."""

    num_sequences: int = 0
    num_checkpoints: int = 0
    slot_bytes: int = 0

    @property
    def num_slots(self) -> int:
        return self.num_sequences + self.num_checkpoints

    @property
    def num_bytes(self) -> int:
        return (self.num_slots + 1) * self.slot_bytes if self.num_slots else 0


def size_states(
    slot_bytes: int, max_num_seqs: int, *, caching: bool, memory_bytes: int | None
) -> StateSlots:
    """A slot for each of `max_num_seqs` sequences and, with prefix `caching`, as many checkpoints. Where they
    would take more than their share of `memory_bytes` (None: no limit), checkpoints are left out first, then
    slots, but for one."""
    if not slot_bytes:
        return StateSlots()
    checkpoints = max_num_seqs if caching else 0
    if memory_bytes is None:
        return StateSlots(max_num_seqs, checkpoints, slot_bytes)
    affordable = memory_bytes // MEMORY_SHARE // slot_bytes - 1  # less the null slot
    sequences = max(1, min(max_num_seqs, affordable))
    return StateSlots(sequences, max(0, min(checkpoints, affordable - sequences)), slot_bytes)
