"""What serving a model takes of a device's memory, and how much is left for the KV cache.

    usable = visible x utilization = weights + activation peak + fixed overhead + KV cache

All bytes are per rank: one GPU of `ranks` that share the model by tensor parallelism.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Self

from .shapes import ModelShape
from .weights import WeightRecipe, weight_bytes_per_rank

GIB = 2**30

# Bytes of temporary memory per row and vocabulary entry while sampling, in float32 copies: fitted to
# seven of eight published vLLM start-ups within 2 %.
SAMPLER_COPIES = 9.70
ACTIVATION_BYTES = 2


def num_blocks_for(
    memory_bytes: int, shape: ModelShape, block_size: int, bytes_per_element: float
) -> int:
    """KV blocks of `block_size` tokens that fit into `memory_bytes`, where a block spans all layers."""
    return memory_bytes // (block_size * shape.kv_bytes_per_token(bytes_per_element))


@dataclass(frozen=True, slots=True)
class Reserve:
    """What is kept free besides weights and cache: stated, because no formula knows it.

    `chunk_tokens` is the most that one step computes, `max_num_seqs` the most sequences that it samples.
    """

    utilization: float = 0.9
    chunk_tokens: int = 8192
    max_num_seqs: int = 1024

    @classmethod
    def for_memory(cls, memory_bytes: int) -> Self:
        """Batch limits as servers commonly choose them: smaller below 70 GiB."""
        if memory_bytes >= 70 * GIB:
            return cls()
        return cls(chunk_tokens=2048, max_num_seqs=256)


@dataclass(frozen=True, slots=True)
class Deployment:
    """A model in its weight and cache formats, on `ranks` devices.

    The engine keeps one block table for all layers and frees nothing behind a sliding window, so every
    layer is charged the whole sequence.

    Raises:
        BadInput: the heads do not divide over the ranks.
    """

    shape: ModelShape
    recipe: WeightRecipe
    kv_bytes_per_element: float = 2
    block_size: int = 16
    ranks: int = 1

    def __post_init__(self) -> None:
        self.shape.kv_heads_per_rank(self.ranks)

    @property
    def cache(self) -> ModelShape:
        """The shape of one rank's cache in this engine."""
        return self.shape.without_windows().cache_on_rank(self.ranks)

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights on one rank."""
        return weight_bytes_per_rank(self.shape, self.recipe, self.ranks)

    def kv_bytes(self, context: int) -> int:
        """Bytes of one sequence's cache on one rank, in whole blocks."""
        return self.cache.kv_bytes(context, self.kv_bytes_per_element, self.block_size)

    def activation_bytes(self, reserve: Reserve) -> int:
        """Peak of temporary memory: the larger of a prefill chunk's and the sampler's.

        Prefill: T·2·(3·I/tp + 3·H): gate and up, the product, about three hidden-size tensors; routed
        tokens are copied per expert (that part is unverified). Sampling: rows × vocabulary × 4 × 9.7.
        """
        shape, ranks = self.shape, self.ranks
        width = 3 * shape.intermediate_size / ranks
        if (experts := shape.experts) is not None:
            routed = experts.per_token * (3 * experts.width / ranks + shape.hidden_size)
            routed += 3 * experts.shared_width / ranks
            width = max(routed, width) if experts.dense_layers else routed
        prefill = reserve.chunk_tokens * ACTIVATION_BYTES * (width + 3 * shape.hidden_size)
        sampler = SAMPLER_COPIES * reserve.max_num_seqs * shape.vocab_size * 4
        return ceil(max(prefill, sampler))

    def overhead_bytes(self) -> int:
        """The runtime's own memory: 0.13 GiB alone, 0.55 GiB with communication between two ranks and
        0.60 GiB between more (published vLLM start-ups; NCCL takes 50 MiB more for four)."""
        return int({1: 0.13, 2: 0.55}.get(self.ranks, 0.60) * GIB)

    def kv_budget(self, memory_bytes: int, reserve: Reserve) -> int:
        """Bytes left for the cache on one rank; negative if the weights alone do not fit."""
        used = self.weight_bytes + self.activation_bytes(reserve) + self.overhead_bytes()
        return int(memory_bytes * reserve.utilization) - used

    def num_blocks(self, memory_bytes: int, reserve: Reserve) -> int:
        """Blocks in each rank's pool."""
        budget = max(0, self.kv_budget(memory_bytes, reserve))
        return num_blocks_for(budget, self.cache, self.block_size, self.kv_bytes_per_element)

    def max_sequences(self, memory_bytes: int, reserve: Reserve, context: int) -> int:
        """Sequences of `context` tokens whose caches fit at once."""
        blocks = self.num_blocks(memory_bytes, reserve) // ceil(context / self.block_size)
        return min(blocks, reserve.max_num_seqs)

    def max_context(self, memory_bytes: int, reserve: Reserve, sequences: int) -> int:
        """The longest context that `sequences` sequences can have at once, within the model's own."""
        blocks = self.num_blocks(memory_bytes, reserve) // sequences
        return min(blocks * self.block_size, self.shape.max_context)
