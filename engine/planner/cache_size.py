"""KV-cache and state sizing: blocks of the engine's KV cache, slots of sequences' constant states.

The engine calls it with measured free memory, the planner with expected memory: one computation, so that a
run can be compared with its plan.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Protocol

from ...quant.base.errors import BadInput
from ..base.units import format_gib

DEFAULT_BLOCK_SIZE = {"cpu": 32, "cuda": 16, "mps": 32}
DEFAULT_MAX_NUM_SEQS = {"cpu": 16, "cuda": 256, "mps": 16}
DEFAULT_MAX_NUM_BATCHED_TOKENS = {"cpu": 512, "cuda": 8192, "mps": 512}
DEFAULT_UTILIZATION = 0.9
CPU_MEMORY_FRACTION = 0.25
MEMORY_SHARE = 2
"""States take at most one part in so many of the memory that the KV cache could have."""


class CachedShape(Protocol):
    """A model shape that gives the KV-cache bytes per token, such as `shapes.ModelShape`."""

    def kv_bytes_per_token(self, bytes_per_element: float | Fraction) -> int:
        """Bytes that one token of one sequence takes in all layers."""
        ...


@dataclass(frozen=True, slots=True)
class KvCacheBudget:
    """KV-cache budget of a device.

    Attributes:
        budget_bytes: memory that the engine may use in total.
        taken: bytes of it used by other things than the cache, by name.
        advice: what to change, besides `max_model_len`, if the budget is too small.
    """

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
        """The budget without `num_bytes` for something else."""
        return replace(self, taken={**self.taken, name: num_bytes}) if num_bytes else self

    @property
    def num_bytes(self) -> int:
        """Bytes left for the KV cache."""
        return max(0, self.budget_bytes - sum(self.taken.values()))

    def __str__(self) -> str:
        if not self.taken:
            return f"{format_gib(self.num_bytes)} is available"
        parts = ", ".join(f"{name} {format_gib(size)}" for name, size in self.taken.items())
        left = format_gib(self.num_bytes)
        return f"{left} is left of {format_gib(self.budget_bytes)} ({parts})"


@dataclass(frozen=True, slots=True)
class CacheRequest:
    """Options of the KV cache: at most one of the two explicit sizes, and the engine's limits. A block
    spans all layers; `max_model_len` is the most tokens of a sequence that stay in the cache.
    """

    bytes_per_element: float | Fraction
    block_size: int
    max_model_len: int
    max_num_seqs: int
    memory_bytes: int | None = None
    num_blocks: int | None = None

    @property
    def is_fixed(self) -> bool:
        """Whether the size is explicit, so that free memory does not matter."""
        return self.memory_bytes is not None or self.num_blocks is not None


@dataclass(frozen=True, slots=True)
class CacheSize:
    """KV-cache blocks usable by sequences; the engine allocates one more, the null block for padding."""

    num_blocks: int
    block_size: int
    block_bytes: int

    @property
    def num_tokens(self) -> int:
        """Capacity of the cache in tokens."""
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
    """Size the KV cache: `num_blocks` if set; else what fits into `memory_bytes` if set; else enough for
    `max_num_seqs` sequences of `max_model_len` tokens, at most the budget.

    Raises:
        BadInput: `memory_bytes` does not hold one block, or the budget not one sequence.
    """
    size, element = request.block_size, request.bytes_per_element
    block_bytes = size * shape.kv_bytes_per_token(element)
    if request.num_blocks is not None:
        return CacheSize(request.num_blocks, size, block_bytes)
    if (memory_bytes := request.memory_bytes) is not None:
        num_blocks = num_blocks_for(memory_bytes, shape, size, element)
        if num_blocks < 1:
            raise BadInput(
                f"kv_cache_memory_bytes = {memory_bytes} does not hold one block of {block_bytes} bytes"
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
        """Bytes of all slots, the null slot included."""
        return (self.num_slots + 1) * self.slot_bytes if self.num_slots else 0


def size_states(
    slot_bytes: int, max_num_seqs: int, *, caching: bool, memory_bytes: int | None
) -> StateSlots:
    """A slot for each of `max_num_seqs` sequences and, with prefix `caching`, as many checkpoints.

    Where they would take more than their share of `memory_bytes` (None: any), checkpoints are left out first,
    then slots, but for one.
    """
    if not slot_bytes:
        return StateSlots()
    checkpoints = max_num_seqs if caching else 0
    if memory_bytes is None:
        return StateSlots(max_num_seqs, checkpoints, slot_bytes)
    affordable = memory_bytes // MEMORY_SHARE // slot_bytes - 1  # less the null slot
    sequences = max(1, min(max_num_seqs, affordable))
    return StateSlots(sequences, max(0, min(checkpoints, affordable - sequences)), slot_bytes)
