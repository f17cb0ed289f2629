"""Requests: the scheduler's state of each sequence, views of its tokens, and its M-RoPE positions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import islice
from typing import NamedTuple, overload

from ..base.image_input import NO_IMAGES, Images
from ..base.sampling_params import PoolingParams, SamplingParams
from .draft_length import Acceptance

OUTPUT_PLACEHOLDER = -1
"""Token id that stands for the token which the previous, in-flight step samples."""


class TokenView(Sequence[int]):
    """The first `length` tokens of `booked`, followed by `last`, if given, without a copy. `booked` is a
    Request's list, which identifies it: the scheduler only appends to it, or replaces it. So a view is
    constant, for any thread."""

    __slots__ = ("_last", "_length", "booked")

    def __init__(
        self, booked: Sequence[int], length: int | None = None, last: int | None = None
    ) -> None:
        self.booked = booked
        self._length = len(booked) if length is None else length
        self._last = last

    @property
    def has_placeholder(self) -> bool:
        return self._last == OUTPUT_PLACEHOLDER

    def resolved(self, token_id: int) -> TokenView:
        assert self.has_placeholder
        return TokenView(self.booked, self._length, token_id)

    def first(self, count: int) -> TokenView:
        if count == len(self):
            return self
        assert count <= self._length
        return TokenView(self.booked, count)

    def __len__(self) -> int:
        return self._length if self._last is None else self._length + 1

    def __iter__(self) -> Iterator[int]:
        yield from islice(self.booked, self._length)
        if self._last is not None:
            yield self._last

    def __repr__(self) -> str:
        return f"TokenView({list(self)})"

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[int]: ...
    def __getitem__(self, index: int | slice) -> int | Sequence[int]:
        length, last = self._length, self._last
        if isinstance(index, slice):
            start, stop, stride = index.indices(len(self))
            if stride != 1:
                return list(self)[index]
            booked = self.booked[start : min(stop, length)]
            if last is None or not start <= length < stop:
                return booked
            return [*booked, last]
        position = range(len(self))[index]
        return self.booked[position] if last is None or position < length else last


Axes = tuple[Sequence[int], Sequence[int], Sequence[int]]
"""Temporal, height and width positions of the same tokens."""


@dataclass(frozen=True, slots=True)
class RopePositions:
    """Positions of a sequence's tokens, which differ from their indices from its first image on.

    The tokens of an image have its grid of positions, and text goes on behind the largest of them. A slot of
    the KV cache is found by a token's index, as ever.

    Attributes:
        axes: positions of the prompt's tokens, a row per axis.
        delta: position less index of every token behind the prompt, on all three axes.

    Source: Wang et al., "Qwen2-VL" (arXiv:2409.12191), section 2.1.
    """

    axes: Axes
    delta: int

    def of(self, indices: Sequence[int]) -> Axes:
        count, delta = len(self.axes[0]), self.delta
        temporal, height, width = (
            [axis[i] if i < count else i + delta for i in indices] for axis in self.axes
        )
        return temporal, height, width


Rank = tuple[int, int]

NULL_SLOT = 0
"""The null state slot, which no sequence owns: of models without state, and of padding."""


class RequestStatus(Enum):
    """State of a sequence. A preempted one is WAITING again."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True)
class RequestTimes:
    """Times of a sequence's events, monotonic seconds; None until they happened."""

    arrival: float
    first_scheduled: float | None = None
    first_token: float | None = None
    last_token: float | None = None


@dataclass(slots=True, eq=False)
class Request:
    """One sequence: a prompt and the tokens generated after it, written by the scheduler alone.

    There is no prefill or decode phase. Keys and values of `num_computed_tokens` of the known `token_ids` are
    in `block_ids` once the in-flight steps are done; the step that computes the last one samples the next.
    In-flight steps read `token_ids` through views: it is only appended to, or replaced.

    The blocks at the indices `evicted` are freed, out of every later token's window; `num_evicted_tokens`
    left the cache by compaction to a budget. `num_output_placeholders` counts tokens that in-flight steps
    will sample; they count as tokens. `num_completions - 1` sequences fork after the prompt. With `pooling`
    nothing is sampled.

    `rope_positions` are those of a prompt with images (M-RoPE), None: indices. Tokens of each of
    `bidirectional_images` attend to each other, in one step. A smaller `rank` is served first.
    `turn` is the place between the clients of a server.
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
    turn: int = 0
    num_completions: int = 1
    cache_salt: bytes = b""
    lora: str | None = None
    pooling: PoolingParams | None = None
    images: Images = NO_IMAGES
    rope_positions: RopePositions | None = None
    bidirectional_images: tuple[range, ...] = ()

    rank: Rank = (0, 0)
    status: RequestStatus = RequestStatus.WAITING
    num_computed_tokens: int = 0
    num_output_placeholders: int = 0
    num_cached_tokens: int = 0
    block_ids: list[int] = field(default_factory=list)
    state_slot: int = NULL_SLOT
    evicted: range = range(0)
    num_evicted_tokens: int = 0
    block_hashes: list[bytes] = field(default_factory=list)
    num_preemptions: int = 0
    acceptance: Acceptance = field(default_factory=Acceptance)
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids) + self.num_output_placeholders

    @property
    def num_slots(self) -> int:
        return self.num_computed_tokens - self.num_evicted_tokens

    @property
    def num_known_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return self.num_known_tokens - self.num_prompt_tokens

    @property
    def is_complete(self) -> bool:
        """True if `max_tokens` is reached, placeholders included, or a pooled prompt is computed."""
        if self.pooling is not None:
            return self.num_computed_tokens == self.num_tokens
        return self.num_tokens - self.num_prompt_tokens >= self.max_tokens

    @property
    def held_block_ids(self) -> list[int]:
        return [*self.block_ids[: self.evicted.start], *self.block_ids[self.evicted.stop :]]

    def end_tokens(self, eos: frozenset[int]) -> frozenset[int]:
        """The tokens that end it; the sampler suppresses them before `min_tokens`."""
        ends = frozenset(self.params.stop_token_ids)
        return ends if self.params.ignore_eos else ends | eos

    def view(self) -> TokenView:
        """View of its tokens for a step that is scheduled now, with at most one output placeholder."""
        last = OUTPUT_PLACEHOLDER if self.num_output_placeholders else None
        return TokenView(self.token_ids, last=last)

    def fork(self, index: int) -> Request:
        """Completion `index` of the same request, with the tokens so far and no blocks."""
        return Request(
            sequence_id=f"{self.request_id}/{index}",
            request_id=self.request_id,
            index=index,
            token_ids=list(self.token_ids),
            num_prompt_tokens=self.num_prompt_tokens,
            max_tokens=self.max_tokens,
            params=self.params,
            seed=self.seed + index,
            # Directly after its parent: they arrived together.
            order=self.order + index,
            times=RequestTimes(self.times.arrival, self.times.first_scheduled),
            priority=self.priority,
            turn=self.turn,
            cache_salt=self.cache_salt,
            lora=self.lora,
            images=self.images,
            rope_positions=self.rope_positions,
            bidirectional_images=self.bidirectional_images,
            num_cached_tokens=self.num_cached_tokens,
            block_hashes=list(self.block_hashes),
        )


class Token(NamedTuple):
    """A token that a step appended to a sequence, with its row in the plan and its sample of that row."""

    request: Request
    token_id: int
    row: int
    sample: int
