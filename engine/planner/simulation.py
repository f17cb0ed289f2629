"""A server under load on a virtual clock: continuous batching with chunked prefill, timed by a step model.

Steps that change nothing but lengths are taken together: a decode batch goes on until a sequence of it ends,
a request arrives, or the cache is full, and the time of its steps is Simpson's rule over their contexts. So
the work depends on the number of requests, not of tokens. Requests are admitted in order of arrival, prompts
take what decoding leaves of a step, and where the cache is full the last request is computed again later.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from math import ceil, inf
from typing import NamedTuple

from ...base.errors import BadInput
from ..scheduling.scheduler_config import SchedulerConfig
from .load import Lengths, Load, LoadResult, RequestTiming
from .step_model import StepWork, TimesSteps

CELL_TOKENS = 64
"""Mean context between two times that the step model gives; between them times are interpolated."""
COUNTED = 1000


@dataclass(frozen=True, slots=True)
class SimulatedServer:
    """Limits and KV cache of a server, or of one of its `ranks` attention-data-parallel ranks, which step
    together: the step model is asked for the work of all. `num_blocks` includes the null block. Each of the
    pipeline's `stages` has a batch of its own, and the batches share the blocks evenly. `overlapped` is async
    scheduling: a step is scheduled while the one before is computed."""

    limits: SchedulerConfig
    num_blocks: int
    ranks: int = 1
    stages: int = 1
    caches_prefixes: bool = False
    overlapped: bool = True

    @property
    def batches(self) -> int:
        return self.ranks * self.stages

    @property
    def num_tokens(self) -> int:
        return (self.num_blocks - 1) * self.limits.block_size


class StepClock:
    """Seconds of steps; decode steps are interpolated in their context."""

    def __init__(self, model: TimesSteps, ranks: int = 1) -> None:
        self._model, self._ranks = model, ranks
        self._known: dict[tuple[int, int], float] = {}

    def decode(self, sequences: int, context_tokens: float) -> float:
        """Seconds of a step of `sequences` tokens that attend to `context_tokens` in all."""
        cell = sequences * CELL_TOKENS
        index, rest = divmod(context_tokens, cell)
        low = self._corner(sequences, int(index))
        return low + (self._corner(sequences, int(index) + 1) - low) * (rest / cell)

    def decodes(self, sequences: int, context_tokens: int, count: int) -> float:
        """Seconds of `count` steps, of which each adds a token to each sequence."""
        last = context_tokens + (count - 1) * sequences
        ends = self.decode(sequences, context_tokens) + self.decode(sequences, last)
        middle = self.decode(sequences, (context_tokens + last) / 2)
        return count * (ends + 4 * middle) / 6

    def _corner(self, sequences: int, index: int) -> float:
        key = (sequences, index)
        if key not in self._known:
            context = sequences * max(1, index * CELL_TOKENS)
            self._known[key] = self.seconds(StepWork(sequences, context))
        return self._known[key]

    def seconds(self, work: StepWork) -> float:
        return self._model.seconds(work.times(self._ranks))


class Ended(NamedTuple):
    """An ended request: its position in the order of arrival, its timing, and its end."""

    order: int
    timing: RequestTiming
    end: float


@dataclass(slots=True)
class _Sequence:
    """A request as it is served. `length` and `generated` count its tokens when it was last looked at,
    `computed` those of a prompt in the cache, of which `shared` are others' too. It decodes until the step
    `last`; `run` counts how often it was admitted."""

    order: int
    arrival: float
    length: int
    output: int
    generated: int = 0
    computed: int = 0
    shared: int = 0
    last: int = 0
    run: int = 0
    first_token: float = 0.0


class Simulation:
    """One run of a server under a load. Requests come at `arrivals`; in a closed loop the other requests
    come one by one, when another ends."""

    def __init__(
        self,
        server: SimulatedServer,
        model: TimesSteps,
        lengths: Iterable[Lengths],
        arrivals: Iterable[float],
        prefix_share: float = 0.0,
    ) -> None:
        self._server, self._clock = server, StepClock(model, server.ranks)
        self._lengths, self._due = deque(lengths), deque(arrivals)
        self._prefix_share, self._has_prefix = prefix_share, False
        self._waiting: deque[_Sequence] = deque()
        self._running: dict[int, _Sequence] = {}
        self._prefilling: dict[int, _Sequence] = {}
        self._newest: list[int] = []  # a heap of negated orders; ended sequences are skipped later
        self._ends: list[tuple[int, int, int]] = []
        self._num_decoding = self._context = self._held = self._released = 0
        self._now = self._before = 0.0
        self._num_arrived = 0
        self.ended: list[Ended] = []
        self.num_steps = self.num_looked_at = self.num_preemptions = 0
        self.most_running = self.most_waiting = 0

    def run(self, counted: range | None = None) -> None:
        """Step until every request has ended, or each of the `counted` ones in order of arrival."""
        left = inf if counted is None else len(counted)
        while left and (self._due or self._waiting or self._running):
            before = len(self.ended)
            self._admit()
            if self._prefilling:
                self._prefill()
            elif self._running:
                self._decode()
            elif not self._waiting:
                self._now = self._before = max(self._now, self._due[0])
            new = self.ended[before:]
            # A client's next request comes when its last one ends.
            for _ in range(min(len(new), len(self._lengths) - len(self._due))):
                self._due.append(self._now)
            left -= sum(counted is not None and ended.order in counted for ended in new)

    def _admit(self) -> None:
        """Queue the requests that are due for the next step, and begin those that there is room for."""
        known = self._before if self._server.overlapped and self._running else self._now
        while self._due and self._due[0] <= known and self._lengths:
            self._waiting.append(self._arrived(self._due.popleft(), *self._lengths.popleft()))
        limits, released = self._server.limits, self._released
        self._released = 0
        while self._waiting:
            sequence = self._waiting[0]
            shared = self._shared(sequence)
            taken = sequence.length - shared + limits.block_size // 2
            kept = int(limits.watermark * self._server.num_tokens) if self._running else 0
            is_full = len(self._running) + released >= limits.max_num_seqs
            if is_full or (self._running and self._held + taken + kept > self._server.num_tokens):
                break
            self._waiting.popleft()
            sequence.computed = sequence.shared = shared
            sequence.run += 1
            self._held += taken
            self._running[sequence.order] = sequence
            self._prefilling[sequence.order] = sequence
            heappush(self._newest, -sequence.order)
        self.most_running = max(self.most_running, len(self._running))
        self.most_waiting = max(self.most_waiting, len(self._waiting))

    def _arrived(self, arrival: float, prompt: int, output: int) -> _Sequence:
        if prompt + output > self._server.num_tokens:
            raise BadInput(
                f"a request of {prompt + output:,} tokens can never fit into a KV cache of "
                f"{self._server.num_tokens:,} tokens"
            )
        self._num_arrived += 1
        return _Sequence(self._num_arrived - 1, arrival, prompt, output)

    def _shared(self, sequence: _Sequence) -> int:
        """Tokens of its prefix in the cache, in whole blocks; one token at least is computed."""
        if not (self._has_prefix and self._server.caches_prefixes):
            return 0
        prompt, size = sequence.length - sequence.generated, self._server.limits.block_size
        return min(prompt - 1, round(self._prefix_share * prompt)) // size * size

    def _make_room(self) -> None:
        """Take the cache of the last requests until every decoding one has room for a token."""
        while self._held + self._num_decoding > self._server.num_tokens and len(self._running) > 1:
            sequence = self._running.pop(-heappop(self._newest), None)
            if sequence is None:
                continue
            if self._prefilling.pop(sequence.order, None) is None:
                self._leave(sequence)
            self._held -= sequence.length - sequence.shared + self._server.limits.block_size // 2
            self._waiting.appendleft(sequence)
            self.num_preemptions += 1

    def _leave(self, sequence: _Sequence) -> None:
        """Count a decoding sequence's tokens so far, and take it out of the batch."""
        generated = sequence.output - (sequence.last - self.num_steps)
        sequence.length += generated - sequence.generated
        sequence.generated = generated
        self._num_decoding -= 1
        self._context -= sequence.length

    def _prefill(self) -> None:
        self._make_room()
        limits = self._server.limits
        budget = limits.max_num_batched_tokens - self._num_decoding
        decode, context = self._num_decoding, self._context
        prompt = attended = prompts = 0
        complete = []
        for sequence in self._prefilling.values():
            if not (count := min(sequence.length - sequence.computed, budget)):
                break
            if limits.prefill_chunk_size is not None:
                count = min(count, limits.prefill_chunk_size)
            start, end = sequence.computed, sequence.computed + count
            budget -= count
            sequence.computed = end
            if count == 1:
                decode, context = decode + 1, context + end
            else:
                prompts, prompt = prompts + 1, prompt + count
                attended += (end * (end + 1) - start * (start + 1)) // 2
            if end == sequence.length:
                complete.append(sequence)
        if prompts:
            seconds = self._clock.seconds(StepWork(decode, context, prompt, attended, prompts))
        else:
            seconds = self._clock.decode(decode, context) if decode else 0.0
        self._pass(1, seconds)
        for sequence in complete:
            del self._prefilling[sequence.order]
            self._begin(sequence)

    def _begin(self, sequence: _Sequence) -> None:
        """The prompt is computed: the first token, or after a preemption the next one."""
        self._has_prefix = True
        if not sequence.generated:
            sequence.first_token = self._now
        sequence.generated += 1
        sequence.length += 1
        self._held += 1
        if sequence.generated == sequence.output:
            self._end(sequence)
            return
        sequence.last = self.num_steps + sequence.output - sequence.generated
        self._num_decoding += 1
        self._context += sequence.length
        heappush(self._ends, (sequence.last, sequence.order, sequence.run))

    def _decode(self) -> None:
        """Decode steps up to the next that ends a sequence, may admit one, or finds the cache full."""
        self._make_room()
        count = self._next_end() - self.num_steps
        room = self._server.num_tokens - self._held
        count = max(1, min(count, room // self._num_decoding))
        has_place = len(self._running) < self._server.limits.max_num_seqs
        if self._released or (self._waiting and has_place):
            count = 1
        elif self._due and self._lengths and has_place:
            step = self._clock.decode(self._num_decoding, self._context)
            count = min(count, 1 + max(0, int((self._due[0] - self._now) / step)))
        self._pass(count, self._clock.decodes(self._num_decoding, self._context, count))

    def _next_end(self) -> int:
        while True:
            last, order, run = self._ends[0]
            sequence = self._running.get(order)
            if sequence is not None and sequence.run == run and sequence.last == last:
                return last
            heappop(self._ends)

    def _pass(self, count: int, seconds: float) -> None:
        """Let `count` steps pass that take so long, and end the sequences whose last it was."""
        self._before = self._now + seconds * (count - 1) / count
        self._now += seconds
        self.num_steps += count
        self.num_looked_at += 1
        self._context += count * self._num_decoding
        self._held += count * self._num_decoding
        while self._num_decoding and self._next_end() == self.num_steps:
            sequence = self._running[heappop(self._ends)[1]]
            self._leave(sequence)
            self._end(sequence)

    def _end(self, sequence: _Sequence) -> None:
        del self._running[sequence.order]
        self._held -= sequence.length - sequence.shared + self._server.limits.block_size // 2
        self._released += self._server.overlapped
        first, arrival = sequence.first_token, sequence.arrival
        timing = RequestTiming(first - arrival, self._now - arrival, sequence.output)
        self.ended.append(Ended(sequence.order, timing, self._now))


def simulate(
    server: SimulatedServer, model: TimesSteps, load: Load, counted: int = COUNTED
) -> LoadResult:
    """The steady state of a server under a load: `counted` requests of it, evenly over its batches.

    In a closed loop the clients have one request each before those that count, and go on until the last of
    them has ended. Raises BadInput: a request can never fit."""
    if load.rate is not None:
        share = replace(load, rate=load.rate / server.batches)
    else:
        share = replace(load, concurrency=ceil((load.concurrency or 0) / server.batches))
    around = share.concurrency or 0
    places = range(around, around + max(1, ceil(counted / server.batches)))
    total = places.stop + around
    run = Simulation(server, model, share.requests(total), share.arrivals(total), load.prefix_share)
    run.run(places)
    ended = sorted(request for request in run.ended if request.order in places)
    requests = tuple(request.timing for request in ended)
    tokens = sum(request.output_tokens for request in requests)
    if share.concurrency is None:
        rate = len(ended) / max(request.end for request in ended)
    else:  # Little's law: so many requests are in flight, each for so long
        rate = share.concurrency * len(ended) / sum(request.e2e for request in requests)
    return LoadResult(
        requests,
        output_tokens_per_second=server.batches * rate * tokens / len(requests),
        requests_per_second=server.batches * rate,
        steps=run.num_steps,
        preemptions=run.num_preemptions,
        most_running=run.most_running,
        most_waiting=run.most_waiting,
    )
