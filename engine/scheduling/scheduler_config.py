"""Scheduler limits: tokens and sequences per step, KV blocks of a sequence, and what can never fit."""

from __future__ import annotations

from dataclasses import dataclass

from ...quant.base.errors import BadInput
from .draft_length import DraftLength
from .kv_eviction import KvEviction
from .request import Request
from .window import Window


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of the scheduler.

    Attributes:
        max_num_batched_tokens: tokens per step.
        max_num_seqs: sequences per step.
        block_size: tokens per KV block.
        max_model_len: tokens per sequence.
        prefill_chunk_size: tokens of one sequence per step; None: as many as the token budget allows.
        watermark: fraction of the blocks that admission leaves free, so that running sequences can grow for
            a while before one of them is preempted.
        window: the largest attention window of any layer; None: some layer has full attention. Blocks behind
            it are freed.
        drafting: the rule for the number of draft tokens of a sequence; None: no speculative decoding.
        policy: name of the scheduling policy.
        eviction: the rule of a KV-cache budget; None: every token stays.
    """

    max_num_batched_tokens: int
    max_num_seqs: int
    block_size: int
    max_model_len: int
    prefill_chunk_size: int | None = None
    watermark: float = 0.01
    window: Window | None = None
    drafting: DraftLength | None = None
    policy: str = "fcfs"
    eviction: KvEviction | None = None

    def __post_init__(self) -> None:
        if self.max_num_seqs < 1 or self.block_size < 1 or self.max_model_len < 1:
            raise BadInput(f"{self}: every limit needs to be 1 or more")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise BadInput(
                f"max_num_batched_tokens = {self.max_num_batched_tokens} is less than max_num_seqs = "
                f"{self.max_num_seqs}: every running sequence needs a token in every step"
            )
        if self.prefill_chunk_size is not None and self.prefill_chunk_size < 1:
            raise BadInput(f"prefill_chunk_size = {self.prefill_chunk_size}: need 1 or more")

    @property
    def chunk(self) -> int:
        """Maximum number of known tokens of one sequence per step."""
        chunk = self.prefill_chunk_size or self.max_num_batched_tokens
        return min(chunk, self.max_num_batched_tokens)

    def num_blocks(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def max_blocks(self, num_tokens: int) -> int:
        """Maximum number of blocks that a sequence holds at once, until `num_tokens` of it are computed.

        All of them may be prompt, so that a KV-cache budget does not change it.
        """
        whole = self.num_blocks(num_tokens)
        if self.window is None:
            return whole
        return min(whole, self.window.max_blocks(self.chunk, self.block_size))

    def admitted_tokens(self, num_computed: int, num_tokens: int) -> int:
        """Tokens, of `num_tokens`, that a sequence admitted with `num_computed` gets blocks for."""
        if self.window is None:
            return num_tokens
        return min(num_tokens, self.window.reach(num_computed, self.chunk))

    def evicted(self, num_computed: int) -> range:
        """Indices of a block table that are behind the window once `num_computed` tokens are computed."""
        if self.window is None:
            return range(0)
        return self.window.evicted(num_computed, self.block_size)


def check_length(request: Request, config: SchedulerConfig, longest: int, num_blocks: int) -> None:
    """Refuse what can never fit: `longest` tokens of a sequence with its prompt do, into `num_blocks` blocks.

    Raises:
        BadInput: it is longer than the model's context, or than the whole KV cache.
    """
    count, capacity = request.num_prompt_tokens, num_blocks * config.block_size
    if request.pooling is not None:  # every token of the prompt needs a slot, and nothing follows
        if count > config.max_model_len:
            raise BadInput(
                f"{count} prompt tokens exceed the context length of {config.max_model_len} tokens"
            )
        if config.max_blocks(count) > num_blocks:
            raise BadInput(f"{count} prompt tokens can never fit in the KV cache of {capacity}")
        return
    total = count + request.max_tokens
    if total > config.max_model_len:
        raise BadInput(
            f"{count} prompt tokens and {request.max_tokens} new ones exceed the "
            f"context length of {config.max_model_len} tokens"
        )
    if total > longest:
        raise BadInput(
            f"{count} prompt tokens and {request.max_tokens} new ones can never "
            f"fit in the KV cache of {capacity} tokens: shorten the request or give the cache more memory"
        )
