"""The scheduler: continuous batching with chunked prefill, prefix caching and preemption."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from .block_pool import NULL_BLOCK, BlockPool, PrefixCache, evict_blocks
from .decode_schedule import DecodeSchedule, is_decode_batch
from .extensions import SchedulerExtension, SwapSpace
from .kv_eviction import Compactor
from .request import Request, RequestStatus, Token
from .scheduler_config import (
    SchedulerConfig,
    StepPace,
    WaitingQueue,
    check_length,
    check_queues,
    rank_of,
    uncut,
)
from .state_pool import StatePool
from .step_plan import BlockCopies, DecodeRows, ScheduledRow, StepPlan, scheduled_row


class Scheduler:
    """Continuous batching without separate prefill and decode phases.

    A sequence has `num_tokens` and `num_computed_tokens`; a step computes some of the difference.
    Chunked prefill, prefix hits, decode and recomputation after a preemption are this one rule.

    * Running sequences come first, each with at least one token (but for an image that waits to be computed
      whole, which comes before those after it); waiting ones share the rest of the budget,
      in the order of their ranks, and the head of the queue is never overtaken.
    * A waiting sequence is admitted only if blocks for all its known tokens are free, and takes them all;
      behind a window as many as it will ever hold.
    * When a running sequence cannot grow or be compacted, the last in rank is preempted: it keeps tokens and
      place in the queue, and is recomputed later, or swapped in from the swap space.
    * Where the model has constant state, a running sequence has a state slot beside its blocks, and goes on
      from a cached prefix where a checkpoint of the state is.

    State slots, a KV budget and swap space are extensions: what is not configured is not called.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        pool: BlockPool,
        cache: PrefixCache,
        swap: SwapSpace | None = None,
        states: StatePool | None = None,
    ) -> None:
        self.config = config
        self.pool = pool
        self.cache = cache
        self.swap = SwapSpace() if swap is None else swap
        self.states = StatePool() if states is None else states
        self.running: list[Request] = []
        self.waiting = WaitingQueue()
        self.pace: StepPace | None = None
        self._requests: dict[str, Request] = {}
        self.compactor: Compactor | None = None
        if config.eviction is not None:
            self.compactor = Compactor(config.eviction, pool, cache)
        self._extensions: list[SchedulerExtension] = [
            *([self.states] if self.states.num_slots else []),
            *([] if self.compactor is None else [self.compactor]),
            *([self.swap] if self.swap.num_blocks else []),
        ]
        self._copies: dict[int, int] = {}  # destination block → source block
        self._decode: DecodeSchedule | None = None
        rules = (config.window, config.drafting, config.eviction, self.states.num_slots or None)
        self._goes_on = all(rule is None for rule in rules)
        self._watermark_blocks = int(config.watermark * pool.num_usable)
        self.num_preemptions = 0

    @property
    def longest_sequence(self) -> int:
        return self.config.longest(self.pool.num_usable)

    def has_unfinished(self) -> bool:
        return bool(self._requests)

    def requests(self) -> Collection[Request]:
        return self._requests.values()

    def add(self, request: Request) -> None:
        """Queue a sequence; BadInput if it can never fit, or the policy ignores its priority."""
        request.rank = rank_of(request, self.config.policy)
        check_length(request, self.config, self.pool.num_usable)
        self._requests[request.sequence_id] = request
        self._enqueue(request)

    def abort(self, sequence_id: str, reason: str = "abort") -> Request | None:
        """End a sequence now. An unknown or finished id is no error: the client may be late."""
        if (request := self._requests.get(sequence_id)) is not None:
            self.finish(request, reason)
        return request

    def schedule(self, now: float = 0.0) -> StepPlan:
        """Plan the next step and allocate the blocks that it writes."""
        for request in self.waiting.newly_held(self.running):
            self._preempt(request)
        if self._decode is not None and (decoded := self._decode.next_rows()) is not None:
            admitted = tuple(self._admit_waiting(len(decoded), now))
            if not admitted:
                return StepPlan(decoded)
            rows = (*decoded, *admitted)
        else:
            budget = self.config.budget(self.pace, self.running)
            self._decode, scheduled = None, self._schedule_running(budget)
            num_tokens = sum(row.num_tokens + row.num_draft_tokens for row in scheduled)
            rows = self._begin_decode((*scheduled, *self._admit_waiting(num_tokens, now, budget)))
        within = tuple((source, destination) for destination, source in self._copies.items())
        self._copies.clear()
        plan = StepPlan(rows, BlockCopies(within))
        for extension in self._extensions:
            if not rows:  # the plan is not executed
                extension.skip_step(self.waiting)
            plan = extension.complete(plan)
        return plan

    def _schedule_running(self, budget: int) -> tuple[ScheduledRow, ...]:
        """The rows of the running sequences, of which some may be preempted."""
        scheduled: dict[str, tuple[Request, int]] = {}
        drafts: dict[str, int] = {}
        active = [request for request in self.running if not request.is_complete]
        num_after = len(active)
        for request in active:
            num_after -= 1
            if request.status is not RequestStatus.RUNNING:
                continue  # preempted for one of a smaller rank
            if not (num_new := self._chunk(request, budget - num_after, budget)):
                continue  # it needs more of a step, for an image
            while not self._grow(request, num_new):
                victim = max(self.running, key=lambda candidate: candidate.rank)
                budget += scheduled.pop(victim.sequence_id, (victim, 0))[1]
                budget += drafts.pop(victim.sequence_id, 0)
                self._preempt(victim)
                if victim is request:
                    break
            else:
                scheduled[request.sequence_id] = (request, num_new)
                budget -= num_new
                if count := self._num_draft_tokens(request, num_new, budget - num_after):
                    drafts[request.sequence_id] = count
                    budget -= count
        return tuple(
            self._row(request, num_new, drafts.get(sequence_id, 0))
            for sequence_id, (request, num_new) in scheduled.items()
        )

    def _admit_waiting(self, used: int, now: float, budget: int = 0) -> Iterator[ScheduledRow]:
        """The rows of waiting sequences that are admitted beside the `used` tokens of the running ones."""
        if self.waiting.head is None:
            return
        budget = (budget or self.config.budget(self.pace, self.running)) - used
        while budget > 0 and len(self.running) < self.config.max_num_seqs:
            if (request := self.waiting.head) is None or not self._admit(request, now):
                return
            self.waiting.pop()
            if num_new := self._chunk(request, budget, budget):
                yield self._row(request, num_new, 0)
                budget -= num_new

    def _begin_decode(
        self, rows: tuple[ScheduledRow, ...]
    ) -> tuple[ScheduledRow, ...] | DecodeRows:
        """The rows of a step; if later steps can go on from it, as the first rows of a decode batch."""
        whole = bool(rows) and len(rows) == len(self.running)
        if not (self._goes_on and whole and is_decode_batch(rows)):
            return rows
        requests = [self._requests[row.sequence_id] for row in rows]
        self._decode = DecodeSchedule(requests, rows, self.pool, self.cache, self.config.block_size)
        return self._decode.first_rows

    def update(
        self,
        plan: StepPlan,
        sampled: Mapping[str, Sequence[int]],
        eos: frozenset[int],
        now: float = 0.0,
        draft_depths: Mapping[str, int] | None = None,
    ) -> list[Token]:
        """Process the sampled tokens of a step, `num_samples` for each row that samples.

        A row of one sample may have several tokens: accepted drafts, at the positions `draft_depths`, and the
        bonus token. Returns the tokens in row order; a sequence whose token was its last is finished.

        Plans are processed in their order. One more may have been scheduled since, unless this one
        `blocks_next_step`: steps run in order, so a block freed here is read before its next owner writes.
        """
        if self._decode is not None and self._decode.has(plan.rows):
            tokens, may_end = self._decode.append(plan.rows, sampled, eos, now)
            for token in may_end:
                self._end(token.request, token.token_id, eos)
            return tokens
        # Compactions come before copies: none may write to a block that a fork or an end here frees.
        for row in plan.rows:
            request = self.request_of(row)
            if request is not None and request.status is RequestStatus.RUNNING:  # else preempted
                self._keep(request, row)
            for extension in self._extensions:
                extension.end_row(request, row)
        tokens = []
        for index, row in enumerate(plan.rows):
            if (request := self.request_of(row)) is None:
                continue
            if not row.num_samples:
                if request.pooling is not None and row.end == request.num_prompt_tokens:
                    request.times.first_token = request.times.last_token = now
                    self.finish(request, "stop")
                continue
            token_ids = sampled[row.sequence_id]
            if draft_depths and (reached := draft_depths.get(row.sequence_id)):
                request.acceptance.record(reached, len(token_ids) - 1)
            if row.num_samples == 1:
                tokens += self._append_accepted(request, index, token_ids, eos, now)
                continue
            request.num_completions = 1
            others = range(request.index + 1, request.index + len(token_ids))
            family = (request, *[self._fork(request, index) for index in others])
            for sample, (member, token_id) in enumerate(zip(family, token_ids, strict=True)):
                tokens.append(Token(member, token_id, index, sample))
                self._append(member, token_id, eos, now)
        return tokens

    def _keep(self, request: Request, row: ScheduledRow) -> None:
        """Put a step's blocks into the prefix cache; evict what window or budget have no place for."""
        if not request.num_evicted_tokens:  # else each head has other tokens in them
            self.cache.insert(request, row.start, min(row.end, request.num_computed_tokens))
        self._evict_behind_window(request)
        while self.compactor is not None and row.compacts and request.block_ids:
            if self.compactor.compact(request):
                break
            self._preempt(max(self.running, key=lambda running: running.rank))

    def request_of(self, row: ScheduledRow) -> Request | None:
        request = self._requests.get(row.sequence_id)
        return request if request is not None and request.token_ids is row.tokens.booked else None

    def _append_accepted(
        self, request: Request, row: int, token_ids: Sequence[int], eos: frozenset[int], now: float
    ) -> list[Token]:
        """Append tokens of which all but the last are accepted drafts, up to one that ends the sequence."""
        tokens: list[Token] = []
        for sample, token_id in enumerate(token_ids):
            if sample:
                # The draft token before this one is accepted: its keys and values are in the cache.
                before, end = request.num_computed_tokens, request.num_tokens
                request.num_computed_tokens = end
                self.cache.insert(request, before, end)
            tokens.append(Token(request, token_id, row, sample))
            self._append(request, token_id, eos, now)
            if request.status is RequestStatus.FINISHED:
                return tokens
        self._evict_behind_window(request)
        return tokens

    def reset_in_flight(self) -> None:
        """Drop the in-flight steps, because one failed: sequences keep their known tokens and wait again."""
        for request in self._requests.values():
            # A new list: a view of the old one may have been resolved with a token that is now sampled again.
            request.token_ids = request.token_ids.copy()
            request.num_output_placeholders = 0
        for extension in self._extensions:
            for request in self.waiting:
                extension.forget(request)
        for request in list(self.running):
            self._requeue(request)
        self._copies.clear()
        for extension in self._extensions:
            extension.reset_in_flight()

    def stop_at(self, request: Request, num_tokens: int, stop_string: str) -> None:
        """End a sequence after `num_tokens`, at a stop string, even if a token limit was reached there."""
        self.finish(request, "stop")
        request.finish_reason, request.stop_reason = "stop", stop_string
        request.token_ids = request.token_ids[:num_tokens]

    def check_integrity(self) -> None:
        check_queues(self.running, list(self.waiting), self._requests.values(), self.config)
        self.swap.check_integrity(self.waiting)
        self.states.check_integrity(self.running)
        self.pool.check_integrity(request.held_block_ids for request in self.running)
        self.cache.check_integrity()

    def _chunk(self, request: Request, share: int, budget: int) -> int:
        """Tokens that `request` may compute now: at least one, but for an image that exceeds the budget."""
        limit = self.config.prefill_chunk_size or share
        num_new = max(1, min(request.num_tokens - request.num_computed_tokens, share, limit))
        for extension in self._extensions:
            num_new = extension.chunk(request, num_new)
        if request.bidirectional_images:
            return uncut(request, num_new, budget)
        return min(num_new, budget)  # 0 where an image before it took the rest

    def _grow(self, request: Request, num_new: int) -> bool:
        needed = self.config.num_blocks(request.num_slots + num_new) - len(request.block_ids)
        if needed > self.pool.num_free:
            return False
        if needed > 0:
            request.block_ids.extend(self.pool.allocate(needed))
        return True

    def _num_draft_tokens(self, request: Request, num_new: int, budget: int) -> int:
        known = request.num_computed_tokens + num_new == request.num_tokens
        decoding = request.num_tokens > request.num_prompt_tokens
        drafting = self.config.drafting
        if drafting is None or not known or not decoding:
            return 0
        end = request.num_computed_tokens + num_new
        left = request.max_tokens - (request.num_tokens - request.num_prompt_tokens) - 1
        positions = min(left, drafting.best(request.acceptance.rate))
        count = max(0, min(budget, positions * drafting.width))
        needed = self.config.num_blocks(end + count) - len(request.block_ids)
        if needed > self.pool.num_free - len(self.running):
            count = min(count, len(request.block_ids) * self.config.block_size - end)
        self._grow(request, num_new + count)
        return count

    def _admit(self, request: Request, now: float) -> bool:
        """Move a waiting sequence to the running ones, if blocks for all its tokens and a slot are free."""
        if request.is_complete or not all(extension.has_free for extension in self._extensions):
            return False
        table = self.cache.match(request)
        num_hits, num_tokens = len(table), request.num_tokens
        for extension in self._extensions:
            num_hits = extension.num_reusable(request, num_hits)
            num_tokens = extension.num_admitted(request, num_tokens)
        del table[num_hits:]
        num_computed = num_hits * self.config.block_size
        for extension in self._extensions:
            num_computed = extension.num_restored(request, num_computed)
        evicted = self.config.evicted(num_computed)
        evict_blocks(table, range(0), evicted)
        hits = [*table[: evicted.start], *table[evicted.stop :]]
        revived = sum(1 for block_id in hits if self.pool.ref_count(block_id) == 0)
        end = self.config.admitted_tokens(num_computed, num_tokens)
        places = range(num_hits, self.config.num_blocks(end))
        needed = [index for index in places if index not in evicted]
        reserve = self._watermark_blocks if self.running else 0
        if len(needed) + revived + reserve > self.pool.num_free:
            return False
        self.pool.share(hits)
        new = dict(zip(needed, self.pool.allocate(len(needed)), strict=True))
        request.block_ids = [*table, *(new.get(index, NULL_BLOCK) for index in places)]
        request.evicted = evicted
        for extension in self._extensions:
            extension.admit(request, num_hits, new)
        request.num_computed_tokens = num_computed
        if request.times.first_scheduled is None:
            self.cache.count(request, num_hits)
            request.times.first_scheduled = now
            request.num_cached_tokens = request.num_computed_tokens
        self._run(request)
        return True

    def _row(self, request: Request, num_new: int, num_draft_tokens: int) -> ScheduledRow:
        """The row of a sequence, whose tokens count as computed from now on."""
        row = scheduled_row(request, num_new, num_draft_tokens)
        for extension in self._extensions:
            row = extension.mark(request, row)
        request.num_computed_tokens = row.end
        if row.samples_one:
            request.num_output_placeholders += 1
        return row

    def _enqueue(self, request: Request) -> None:
        request.status = RequestStatus.WAITING
        self.waiting.push(request)

    def _preempt(self, request: Request) -> None:
        request.num_preemptions += 1
        self.num_preemptions += 1
        for extension in self._extensions:
            extension.preempt(request)
        self._requeue(request)

    def _requeue(self, request: Request) -> None:
        """Free a running sequence's blocks and queue it again; it keeps its tokens and its rank."""
        self._leave(request)
        request.num_computed_tokens = 0
        self._enqueue(request)

    def _append(self, request: Request, token_id: int, eos: frozenset[int], now: float) -> None:
        request.token_ids.append(token_id)
        if request.num_output_placeholders:
            request.num_output_placeholders -= 1
        request.times.last_token = now
        if request.times.first_token is None:
            request.times.first_token = now
        self._end(request, token_id, eos)

    def _end(self, request: Request, token_id: int, eos: frozenset[int]) -> None:
        if token_id in request.end_tokens(eos):
            self.finish(request, "stop", None if token_id in eos else token_id)
        elif request.num_output_tokens >= request.max_tokens:
            self.finish(request, "length")

    def _fork(self, parent: Request, index: int) -> Request:
        """Split completion `index` off one whose prompt has just been computed. It shares its full blocks and
        copies the partial one, to which parent and child append. Where no block is free for a copy, the child
        waits and recomputes its prompt, most of it a prefix hit."""
        child = parent.fork(index)
        child.rank = rank_of(child, self.config.policy)
        self._requests[child.sequence_id] = child
        num_full, partial = divmod(parent.num_slots, self.config.block_size)
        has_room = len(self.running) < self.config.max_num_seqs
        has_room &= parent.status is RequestStatus.RUNNING
        has_room &= all(extension.has_free for extension in self._extensions)
        if not has_room or self.pool.num_free < bool(partial):
            self._enqueue(child)
            return child
        child.block_ids = parent.block_ids[:num_full]
        child.evicted, child.num_evicted_tokens = parent.evicted, parent.num_evicted_tokens
        self.pool.share(child.held_block_ids)
        if partial:
            copy = self.pool.allocate(1)
            self._copies[copy[0]] = parent.block_ids[num_full]
            child.block_ids += copy
        for extension in self._extensions:
            extension.fork(parent, child)
        child.num_computed_tokens = parent.num_computed_tokens
        self._run(child)
        return child

    def finish(self, request: Request, reason: str, stop_reason: int | str | None = None) -> None:
        """End a sequence, unless it has ended."""
        if request.status is RequestStatus.FINISHED:
            return
        if request.status is RequestStatus.RUNNING:
            self._leave(request)
        else:
            self.waiting.remove(request)
            for extension in self._extensions:
                extension.forget(request)
        del self._requests[request.sequence_id]
        request.num_output_placeholders = 0
        request.status = RequestStatus.FINISHED
        request.finish_reason, request.stop_reason = reason, stop_reason

    def _run(self, request: Request) -> None:
        request.status = RequestStatus.RUNNING
        self.running.append(request)
        self._decode = None

    def _leave(self, request: Request) -> None:
        """Take a sequence out of the running ones, and free its blocks and its state slot, all of them here.
        A pending copy may write to one of them. It does no harm: compactions were planned before, copies come
        before the step writes, and the next owner of the block writes each slot before reading it."""
        self.running.remove(request)
        self._decode = None
        self.pool.free(request.held_block_ids)
        for extension in self._extensions:
            extension.leave(request)
        request.block_ids = []
        request.evicted, request.num_evicted_tokens = range(0), 0

    def _evict_behind_window(self, request: Request) -> None:
        """Free the blocks behind the window; the null block takes their place in the table."""
        if self.config.window is None:
            return
        evicted = self.config.evicted(request.num_computed_tokens)
        self.pool.free(evict_blocks(request.block_ids, request.evicted, evicted))
        request.evicted = evicted
