"""The limits of a step, and the blocks that a sequence takes under them."""

from __future__ import annotations

from dataclasses import dataclass

from ...quant.base.errors import BadInput
from .draft_length import DraftLength
from .window import Window


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """The limits of a step.

    Attributes:
        max_num_batched_tokens: tokens in one step.
        max_num_seqs: sequences in one step.
        block_size: tokens in a KV block.
        max_model_len: tokens in a sequence.
        prefill_chunk_size: tokens of one sequence in one step; None leaves it to the budget.
        watermark: share of the blocks that admission leaves free, so that the sequences which run can
            grow a while before one of them must be preempted.
        window: how far the farthest-looking layer sees; None: some layer sees all. Blocks behind it go
            back to the pool.
        drafting: how many draft tokens a sequence gets slots for; None: nobody proposes any.
        policy: name of the order in which sequences are served.
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
        """Known tokens of one sequence in one step, at most."""
        given = self.prefill_chunk_size or self.max_num_batched_tokens
        return min(given, self.max_num_batched_tokens)

    def num_blocks(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def max_blocks(self, num_tokens: int) -> int:
        """Blocks that a sequence holds at once, at most, until `num_tokens` of it are computed."""
        whole = self.num_blocks(num_tokens)
        if self.window is None:
            return whole
        return min(whole, self.window.max_blocks(self.chunk, self.block_size))

    def admitted_tokens(self, num_computed: int, num_tokens: int) -> int:
        """How far into its `num_tokens` a sequence has blocks when it starts with `num_computed`."""
        if self.window is None:
            return num_tokens
        return min(num_tokens, self.window.reach(num_computed, self.chunk))

    def evicted(self, num_computed: int) -> range:
        """Places of a block table that nobody will see once `num_computed` tokens are computed."""
        if self.window is None:
            return range(0)
        return self.window.evicted(num_computed, self.block_size)
