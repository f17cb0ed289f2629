"""How many blocks this project's engine gives its KV cache: the rule that the engine itself follows.

The engine asks it with the memory that it finds free, a plan with the memory that it expects: one
arithmetic, so that a run can be held against its plan.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Protocol

from ....quant.base.errors import BadInput
from ...base.units import format_gib

DEFAULT_BLOCK_SIZE = {"cpu": 32, "cuda": 16}
DEFAULT_MAX_NUM_SEQS = {"cpu": 16, "cuda": 256}
DEFAULT_MAX_NUM_BATCHED_TOKENS = {"cpu": 512, "cuda": 8192}
DEFAULT_UTILIZATION = 0.9
CPU_SHARE = 0.25


class CachedShape(Protocol):
    """Anything that knows what a token takes, as `shapes.ModelShape` does."""

    def kv_bytes_per_token(self, bytes_per_element: float | Fraction) -> int:
        """Bytes that one token of one sequence takes in all layers."""
        ...


@dataclass(frozen=True, slots=True)
class KvCacheBudget:
    """What a cache may take of a device's memory.

    Attributes:
        budget_bytes: what may be used at all.
        taken: bytes of it that other things need, by name.
        advice: what to change where the room is too small, besides `max_model_len`.
    """

    budget_bytes: int
    taken: Mapping[str, int] = field(default_factory=dict)
    advice: str = ""

    @classmethod
    def on_cpu(cls, free_bytes: int) -> KvCacheBudget:
        """A share of what is free, because the machine is there for others too."""
        return cls(int(free_bytes * CPU_SHARE))

    @classmethod
    def on_cuda(
        cls,
        total_bytes: int,
        utilization: float,
        weight_bytes: int,
        activation_bytes: int,
        other_bytes: int,
    ) -> KvCacheBudget:
        """A share of the device, less its weights, the largest step, and what others hold."""
        taken = {
            "weights": weight_bytes,
            "the largest step": activation_bytes,
            "the runtime and others": other_bytes,
        }
        advice = (
            ", lower max_num_batched_tokens, raise gpu_memory_utilization "
            f"({utilization:g} of {format_gib(total_bytes)}) or store the cache in 8 bits"
        )
        return cls(int(total_bytes * utilization), taken, advice)

    @property
    def num_bytes(self) -> int:
        return max(0, self.budget_bytes - sum(self.taken.values()))

    def __str__(self) -> str:
        if not self.taken:
            return f"{format_gib(self.num_bytes)} is there"
        parts = ", ".join(f"{name} {format_gib(size)}" for name, size in self.taken.items())
        left = format_gib(self.num_bytes)
        return f"{left} is left of {format_gib(self.budget_bytes)} ({parts})"


@dataclass(frozen=True, slots=True)
class CacheRequest:
    """What the engine was told of its cache: at most one of the two sizes, and the limits that it
    serves. A block spans all layers; `max_model_len` is what stays in the cache of the longest sequence.
    """

    bytes_per_element: float | Fraction
    block_size: int
    max_model_len: int
    max_num_seqs: int
    memory_bytes: int | None = None
    num_blocks: int | None = None

    @property
    def is_fixed(self) -> bool:
        """Whether the size was given, so that the room does not matter."""
        return self.memory_bytes is not None or self.num_blocks is not None


@dataclass(frozen=True, slots=True)
class CacheSize:
    """Blocks for sequences; the engine holds one more, the null block, which padding reads."""

    num_blocks: int
    block_size: int
    block_bytes: int

    @property
    def num_tokens(self) -> int:
        """Tokens that the cache holds."""
        return self.num_blocks * self.block_size

    @property
    def num_bytes(self) -> int:
        """Bytes of the cache, the null block included."""
        return (self.num_blocks + 1) * self.block_bytes


def num_blocks_for(
    memory_bytes: int, shape: CachedShape, block_size: int, bytes_per_element: float | Fraction
) -> int:
    """KV blocks of `block_size` tokens that fit into `memory_bytes`, where a block spans all layers."""
    return memory_bytes // (block_size * shape.kv_bytes_per_token(bytes_per_element))


def size_cache(shape: CachedShape, request: CacheRequest, budget: KvCacheBudget) -> CacheSize:
    """The cache of an engine: as many blocks as were asked for; else as the memory given holds; else
    enough for `max_num_seqs` sequences of the longest kind, cut to the room that there is.

    Raises:
        BadInput: the memory given does not hold a block, or the room not a single sequence.
    """
    size, element = request.block_size, request.bytes_per_element
    block_bytes = size * shape.kv_bytes_per_token(element)
    if request.num_blocks is not None:
        return CacheSize(request.num_blocks, size, block_bytes)
    if (given := request.memory_bytes) is not None:
        num_blocks = num_blocks_for(given, shape, size, element)
        if num_blocks < 1:
            raise BadInput(
                f"kv_cache_memory_bytes = {given} does not hold one block of {block_bytes} bytes"
            )
        return CacheSize(num_blocks, size, block_bytes)
    per_sequence = -(-request.max_model_len // size)
    affordable = num_blocks_for(budget.num_bytes, shape, size, element)
    if affordable < per_sequence:
        shorter = f" to {affordable * size} or less" if affordable else ""
        raise BadInput(
            f"a sequence of {request.max_model_len} tokens needs "
            f"{format_gib(per_sequence * block_bytes)} of KV cache, but {budget}: "
            f"lower max_model_len{shorter}{budget.advice}"
        )
    return CacheSize(min(affordable, per_sequence * request.max_num_seqs), size, block_bytes)
