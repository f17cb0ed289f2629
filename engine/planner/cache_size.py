"""How many blocks this project's engine gives its KV cache: the rule that the engine itself follows.

The engine asks it with the memory that it finds free, a plan with the memory that it expects: one
arithmetic, so that a run can be held against its plan.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Protocol

from ...quant.errors import BadInput
from .units import format_gib

DEFAULT_BLOCK_SIZE = {"cpu": 32, "cuda": 16}
DEFAULT_MAX_NUM_SEQS = {"cpu": 16, "cuda": 256}
DEFAULT_MAX_NUM_BATCHED_TOKENS = {"cpu": 512, "cuda": 8192}
MEMORY_SHARE = {"cpu": 0.25, "cuda": 0.9}


class CachedShape(Protocol):
    """Anything that knows what a token takes, as `shapes.ModelShape` does."""

    def kv_bytes_per_token(self, bytes_per_element: float | Fraction) -> int:
        """Bytes that one token of one sequence takes in all layers."""
        ...


@dataclass(frozen=True, slots=True)
class CacheRequest:
    """What the engine was told of its cache: at most one of the two sizes, and the limits that it
    serves. `kind` is the kind of device, cpu or cuda; a block spans all layers; `max_model_len` is what
    stays in the cache of the longest sequence."""

    kind: str
    bytes_per_element: float | Fraction
    block_size: int
    max_model_len: int
    max_num_seqs: int
    memory_bytes: int | None = None
    num_blocks: int | None = None


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


def size_cache(shape: CachedShape, request: CacheRequest, free_bytes: int) -> CacheSize:
    """The cache of an engine: as many blocks as were asked for; else as the memory given holds; else
    enough for `max_num_seqs` sequences of the longest kind, cut to a share of `free_bytes`.

    Raises:
        BadInput: the memory given does not hold a block, or the share not a single sequence.
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
    share = int(free_bytes * MEMORY_SHARE[request.kind])
    affordable = num_blocks_for(share, shape, size, element)
    if affordable < per_sequence:
        raise BadInput(
            f"a sequence of {request.max_model_len} tokens needs "
            f"{format_gib(per_sequence * block_bytes)} of KV cache, but {format_gib(share)} is there: "
            "lower max_model_len"
        )
    return CacheSize(min(affordable, per_sequence * request.max_num_seqs), size, block_bytes)
