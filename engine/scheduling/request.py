"""A sequence on its way through the engine, and everything that the policy knows of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from ..base.sampling_params import SamplingParams
from .draft_length import Acceptance
from .token_view import OUTPUT_PLACEHOLDER, TokenView

Rank = tuple[int, int]


class RequestStatus(Enum):
    """Where a sequence is. Preemption sends it back to WAITING."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True)
class RequestTimes:
    """Monotonic seconds of the events of a sequence; None until they happened."""

    arrival: float
    first_scheduled: float | None = None
    first_token: float | None = None
    last_token: float | None = None


@dataclass(slots=True, eq=False)
class Request:
    """One sequence: a prompt and what has been generated after it.

    Only the scheduler writes it, the hashes of its blocks by way of its prefix cache.

    There is no phase. `token_ids` is what is known, `num_computed_tokens` tokens have their keys and values
    in the blocks of `block_ids`, once the in-flight steps are done, and each step computes some of the
    difference. When it is gone, the step samples the next token.

    In-flight steps see `token_ids` through views: it is appended to, and otherwise replaced.

    The blocks in the places `evicted` of `block_ids` have gone back to the pool: no token will see them
    again.

    Behind `token_ids` come `num_output_placeholders` tokens that in-flight steps draw. They count as tokens,
    so that the next step can be scheduled, and become known when those steps are settled.

    A request for n > 1 completions is one sequence until its prompt is computed; then
    `num_completions - 1` sequences fork from it.

    A smaller `rank` is served first and preempted last; the scheduler gives it.
    """

    sequence_id: str
    request_id: str
    index: int
    token_ids: list[int]
    num_prompt_tokens: int
    max_tokens: int
    params: SamplingParams
    seed: int
    order: int
    times: RequestTimes
    priority: int = 0
    num_completions: int = 1
    cache_salt: bytes = b""
    lora: str | None = None

    rank: Rank = (0, 0)
    status: RequestStatus = RequestStatus.WAITING
    num_computed_tokens: int = 0
    num_output_placeholders: int = 0
    num_cached_tokens: int = 0
    block_ids: list[int] = field(default_factory=list)
    evicted: range = range(0)
    block_hashes: list[bytes] = field(default_factory=list)
    num_preemptions: int = 0
    acceptance: Acceptance = field(default_factory=Acceptance)
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids) + self.num_output_placeholders

    @property
    def num_known_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Known ones."""
        return self.num_known_tokens - self.num_prompt_tokens

    @property
    def is_complete(self) -> bool:
        """Whether the last token that it may have is known or being drawn."""
        return self.num_tokens - self.num_prompt_tokens >= self.max_tokens

    @property
    def held_block_ids(self) -> list[int]:
        """The blocks that are still this sequence's."""
        return [*self.block_ids[: self.evicted.start], *self.block_ids[self.evicted.stop :]]

    def view(self) -> TokenView:
        """Its tokens as a step that is scheduled now may see them; at most one is still being drawn."""
        last = OUTPUT_PLACEHOLDER if self.num_output_placeholders else None
        return TokenView(self.token_ids, last=last)

    def fork(self, index: int) -> Request:
        """Completion `index` of the same request, with the tokens so far and no blocks of its own."""
        return Request(
            sequence_id=f"{self.request_id}/{index}",
            request_id=self.request_id,
            index=index,
            token_ids=list(self.token_ids),
            num_prompt_tokens=self.num_prompt_tokens,
            max_tokens=self.max_tokens,
            params=self.params,
            seed=self.seed + index,
            # Just behind its parent's: it was asked for when that was.
            order=self.order + index,
            times=RequestTimes(self.times.arrival, self.times.first_scheduled),
            priority=self.priority,
            cache_salt=self.cache_salt,
            lora=self.lora,
            num_cached_tokens=self.num_cached_tokens,
            block_hashes=list(self.block_hashes),
        )


@dataclass(frozen=True, slots=True)
class Token:
    """A token that a step gave to a sequence, and whether it was the last."""

    request: Request
    token_id: int
    row: int
    sample: int
