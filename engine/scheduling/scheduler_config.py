"""Rules of the scheduler: limits, order of the queue, what can never fit, the size of a step, invariants.

The sequence of the smallest rank is admitted first and preempted last. The rank is assigned once, when a
sequence is added, so that a preempted one keeps its place in the queue.
"""

from __future__ import annotations

import heapq
import statistics
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ...base.errors import BadInput, ContextOverflow
from .block_pool import Window
from .draft_length import DraftLength
from .kv_eviction import KvEviction
from .request import Rank, Request, RequestStatus
from .step_plan import ScheduledRow


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of the scheduler.

    Attributes:
        prefill_chunk_size: tokens of one sequence per step; None: as many as the token budget allows.
        watermark: fraction of the blocks that admission leaves free, for running sequences to grow.
        window: the largest attention window of any layer; None: some layer has full attention. Blocks behind
            it are freed.
        drafting: the rule for the number of draft tokens of a sequence; None: no speculative decoding.
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

    def budget(self, pace: StepPace | None, running: Sequence[Request]) -> int:
        """Tokens of the next step, at the decoders' pace; all, if there are none, or for an uncut image."""
        decoding = 0
        if pace is not None:
            decoding = sum(
                request.num_computed_tokens >= request.num_prompt_tokens for request in running
            )
        if pace is None or not decoding or any(request.bidirectional_images for request in running):
            return self.max_num_batched_tokens
        drafts = 0 if self.drafting is None else self.drafting.longest * self.drafting.width
        return min(self.max_num_batched_tokens, decoding * (1 + drafts) + pace.num_tokens)

    def num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def max_blocks(self, num_tokens: int) -> int:
        """Most blocks that a sequence holds until `num_tokens` are computed, if it is all prompt."""
        whole = self.num_blocks(num_tokens)
        if self.window is None:
            return whole
        return min(whole, self.window.max_blocks(self.chunk, self.block_size))

    def longest(self, num_usable: int, num_prompt_tokens: int | None = None) -> int:
        """Tokens of the longest sequence for the context and `num_usable` blocks, with a prompt of so many
        tokens of which some are evicted and need no slots."""
        # The last token of a sequence is never computed, so it needs no slot.
        longest, capacity = self.max_model_len, num_usable * self.block_size
        if self.max_blocks(longest - 1) > num_usable:
            longest = min(longest, capacity + 1)
        if self.eviction is None or num_prompt_tokens is None or num_prompt_tokens >= longest:
            return longest
        return min(self.max_model_len, self.eviction.longest(num_prompt_tokens, capacity))

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


def check_length(request: Request, config: SchedulerConfig, num_blocks: int) -> None:
    """Refuse a sequence or image longer than the context, a step or `num_blocks` (BadInput)."""
    longest = max(map(len, request.bidirectional_images), default=0)
    if longest > config.chunk:
        raise BadInput(
            f"an image of {longest} tokens, which attend to each other, exceeds the {config.chunk} tokens of "
            "a step: raise max_num_batched_tokens (and prefill_chunk_size), or send a smaller image"
        )
    if longest and config.eviction is not None:
        raise BadInput(
            "a KV budget evicts tokens of an image before the others have seen it: images of this model "
            "need an engine without kv_budget"
        )
    count, capacity = request.num_prompt_tokens, num_blocks * config.block_size
    if request.pooling is not None:  # every token of the prompt needs a slot, and nothing follows
        if count > config.max_model_len:
            raise ContextOverflow(count, 0, config.max_model_len)
        if config.max_blocks(count) > num_blocks:
            raise BadInput(f"{count} prompt tokens can never fit in the KV cache of {capacity}")
        return
    total = count + request.max_tokens
    if total > config.max_model_len:
        raise ContextOverflow(count, request.max_tokens, config.max_model_len)
    if total > config.longest(num_blocks, count):
        raise BadInput(
            f"{count} prompt tokens and {request.max_tokens} new ones can never "
            f"fit in the KV cache of {capacity} tokens: shorten the request or give the cache more memory"
        )


TOKENS_PER_PLACE = 16
"""Prompt tokens that weigh as much as one place in the order of arrival, under shortest-prefill."""


POLICIES: Mapping[str, Callable[[Request], Rank]] = {
    # In the order of arrival, without starvation; between the clients of a server in turns.
    "fcfs": lambda request: (request.turn, request.order),
    # A smaller `priority` first, among equals in order of arrival; a large one starves, as asked for.
    "priority": lambda request: (request.priority, request.order),
    # Short prompts first, which lowers the mean time to the first token. Every place in the order of arrival
    # counts as `TOKENS_PER_PLACE` prompt tokens. So a prompt of P tokens is overtaken by at most P /
    # TOKENS_PER_PLACE of the sequences that come after it, however many they are.
    "shortest-prefill": lambda request: (
        request.num_prompt_tokens + TOKENS_PER_PLACE * request.order,
        request.order,
    ),
}


def rank_of(request: Request, policy: str) -> Rank:
    """The rank of a sequence under a policy; BadInput if that ignores its priority."""
    if request.priority and policy != "priority":
        raise BadInput(
            f"priority = {request.priority}: the scheduling policy is {policy}, which does not look at "
            "it; start the engine with the policy priority"
        )
    return POLICIES[policy](request)


class WaitingQueue:
    """Sequences by rank, and those of held requests, which nobody reads, apart until `resume`."""

    def __init__(self) -> None:
        self._ranked: list[tuple[Rank, Request]] = []
        self._held: dict[str, list[Request]] = {}

    def __len__(self) -> int:
        return len(self._ranked) + self.num_held

    def __iter__(self) -> Iterator[Request]:
        yield from (request for _, request in self._ranked)
        for requests in self._held.values():
            yield from requests

    @property
    def held_ids(self) -> Collection[str]:
        return self._held.keys()

    @property
    def num_held(self) -> int:
        return sum(map(len, self._held.values()))

    @property
    def head(self) -> Request | None:
        return self._ranked[0][1] if self._ranked else None

    def push(self, request: Request) -> None:
        siblings = self._held.get(request.request_id)
        if siblings is None:
            heapq.heappush(self._ranked, (request.rank, request))
        else:
            siblings.append(request)

    def pop(self) -> Request:
        return heapq.heappop(self._ranked)[1]

    def remove(self, request: Request) -> None:
        siblings = self._held.get(request.request_id, [])
        if request in siblings:
            siblings.remove(request)
            return
        self._keep(lambda waiting: waiting is not request)

    def hold(self, request_id: str) -> None:
        """Put the request's sequences aside, the running ones with the next step, and any that fork later."""
        siblings = self._held.setdefault(request_id, [])
        siblings += [request for _, request in self._ranked if request.request_id == request_id]
        self._keep(lambda waiting: waiting.request_id != request_id)

    def _keep(self, is_kept: Callable[[Request], bool]) -> None:
        self._ranked = [entry for entry in self._ranked if is_kept(entry[1])]
        heapq.heapify(self._ranked)

    def newly_held(self, running: Sequence[Request]) -> list[Request]:
        """Those of the `running` sequences that are to wait."""
        if not self._held:
            return []
        return [request for request in running if request.request_id in self._held]

    def resume(self, request_id: str) -> None:
        """Put them back in their places; no error for a request that is not held."""
        for request in self._held.pop(request_id, ()):
            self.push(request)


STEPS_PER_DECODE = 4
"""Length of a step with a part of a prompt, in decode steps, where no seconds are given."""


class StepPace:
    """Tokens of prompts in a step with decodes, by the time of such steps: at most `max_seconds`.

    They change by the ratio of the limit to a step's time, at most twofold, in whole blocks, from `least` to
    `most`; None: `STEPS_PER_DECODE` times the median decode step. Only steps that made use of them count, or
    a short prompt would raise them for the next long one.
    """

    def __init__(self, max_seconds: float | None, least: int, most: int) -> None:
        self._max_seconds, self._least, self._most = max_seconds, least, most
        self._decode_seconds: deque[float] = deque(maxlen=64)
        self.num_tokens = least

    @property
    def limit_seconds(self) -> float | None:
        """Seconds that a step may take; None: no step has decoded yet."""
        if self._max_seconds is not None or not self._decode_seconds:
            return self._max_seconds
        return STEPS_PER_DECODE * statistics.median(self._decode_seconds)

    def note(self, rows: Sequence[ScheduledRow], seconds: float) -> None:
        """Count a step of these rows, which has taken `seconds`."""
        num_prefill = sum(row.num_tokens for row in rows if row.num_tokens > 1)
        is_mixed = any(row.num_tokens == 1 for row in rows)
        # Where prompts never cease, a step with the least of them stands for one that decodes.
        if not num_prefill or (
            is_mixed and not self._decode_seconds and num_prefill <= self._least
        ):
            self._decode_seconds.append(seconds)
        if not num_prefill:
            return
        limit = self.limit_seconds
        if limit is not None and is_mixed and 2 * num_prefill >= self.num_tokens:
            ratio = min(2.0, max(0.5, limit / max(seconds, 1e-9)))
            blocks = int(num_prefill * ratio) // self._least
            self.num_tokens = min(self._most, max(1, blocks) * self._least)


def uncut(request: Request, num_new: int, budget: int) -> int:
    """At most `num_new` tokens, so that the step cuts no image: it ends before one, or with it. An image that
    comes next takes as many of the `budget` as it needs, those reserved for other sequences too: so a
    sequence never waits for those after it. 0: it waits for the next step."""
    start = request.num_computed_tokens
    end = start + num_new
    image = next((i for i in request.bidirectional_images if i.start < end < i.stop), None)
    if image is None:
        return min(num_new, budget)
    if start < image.start:
        return image.start - start
    left = image.stop - start
    return left if left <= budget else 0


def check_queues(
    running: Sequence[Request],
    waiting: Sequence[Request],
    requests: Collection[Request],
    config: SchedulerConfig,
) -> None:
    """Assert that the queues agree with all unfinished `requests`, and tokens with blocks."""
    assert {id(r) for r in requests} == {id(r) for r in [*running, *waiting]}
    assert len(requests) == len(running) + len(waiting)
    assert len(running) <= config.max_num_seqs
    for request in waiting:
        assert request.status is RequestStatus.WAITING
        assert not request.block_ids and request.num_computed_tokens == 0
        assert not request.evicted and not request.num_evicted_tokens
        assert not request.state_slot
    for request in running:
        assert request.status is RequestStatus.RUNNING
        assert request.num_computed_tokens <= request.num_tokens
        assert len(request.block_ids) >= config.num_blocks(request.num_slots)
