"""A server under load on a virtual clock: the engine's own scheduler and block pool, timed by a step model.

Nothing is computed: every sampled token is 0. Decode steps in which no sequence arrives, ends or waits for a
block are taken in one jump, which leaves what stepping through them leaves.
"""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from math import ceil, inf
from typing import NamedTuple

from ..base.sampling_params import SamplingParams
from ..scheduling.block_pool import BlockPool, PrefixCache
from ..scheduling.request import Request, RequestTimes
from ..scheduling.scheduler import Scheduler
from ..scheduling.scheduler_config import SchedulerConfig
from ..scheduling.step_plan import DecodeRows, ScheduledRow, StepPlan
from .load import Lengths, Load, LoadResult, RequestTiming
from .step_model import StepWork, TimesSteps

TOKEN = 0
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


class StepClock:
    """Seconds of steps; decode steps are interpolated in their context."""

    def __init__(self, model: TimesSteps, ranks: int = 1) -> None:
        self._model, self._ranks = model, ranks
        self._known: dict[tuple[int, int], float] = {}

    def decode(self, sequences: int, context_tokens: int) -> float:
        """Seconds of a step of `sequences` tokens that attend to `context_tokens` in all."""
        cell = sequences * CELL_TOKENS
        index, rest = divmod(context_tokens, cell)
        low = self._corner(sequences, index)
        return low + (self._corner(sequences, index + 1) - low) * (rest / cell)

    def _corner(self, sequences: int, index: int) -> float:
        key = (sequences, index)
        if key not in self._known:
            context = sequences * max(1, index * CELL_TOKENS)
            work = StepWork(sequences * self._ranks, context * self._ranks, 0, 0, 0)
            self._known[key] = self._model.seconds(work)
        return self._known[key]

    def seconds(self, plan: StepPlan) -> float:
        if isinstance(plan.rows, DecodeRows):
            return self.decode(*_decoded(plan.rows))
        work = work_of(plan.rows, self._ranks)
        if not work.prefill_tokens:
            tokens = int(work.decode_context_tokens) // self._ranks
            return self.decode(work.decode_sequences // self._ranks, tokens)
        return self._model.seconds(work)


def _decoded(rows: DecodeRows) -> tuple[int, int]:
    count = len(rows)
    return count, sum(rows.batch.starts) + count * (rows.step + 1)


def work_of(rows: Iterable[ScheduledRow], ranks: int = 1) -> StepWork:
    """Sum the work of `ranks` ranks that have these rows each; a row of one token decodes."""
    decode = context = prompt = attended = prompts = 0
    for row in rows:
        start, end = row.start, row.end
        if end - start == 1:
            decode += 1
            context += end
        else:
            prompts += 1
            prompt += end - start
            attended += (end * (end + 1) - start * (start + 1)) // 2
    counts = (decode, context, prompt, attended, prompts)
    return StepWork(*(ranks * count for count in counts))


class _Ended(NamedTuple):
    """An ended request: its position in the order of arrival, its timing, and its end."""

    order: int
    timing: RequestTiming
    end: float


class _Scheduler(Scheduler):
    """The engine's scheduler, with its ended requests, and jumps over decode steps."""

    def __init__(self, server: SimulatedServer) -> None:
        pool, limits = BlockPool(server.num_blocks), server.limits
        cache = PrefixCache(pool, limits.block_size, enabled=server.caches_prefixes)
        super().__init__(limits, pool, cache)
        self.ended: list[_Ended] = []

    def finish(self, request: Request, reason: str, stop_reason: int | str | None = None) -> None:
        super().finish(request, reason, stop_reason)
        times = request.times
        first, last = times.first_token, times.last_token
        assert first is not None and last is not None
        timing = RequestTiming(first - times.arrival, last - times.arrival, request.max_tokens)
        self.ended.append(_Ended(request.order, timing, last))

    def can_jump(self, plan: StepPlan) -> bool:
        """True if decode steps can follow this last plan: the first step of its batch is processed."""
        rows = plan.rows
        return self._decode is not None and self._decode.has(rows) and rows.step > 0

    def jump(self, goes_on: Callable[[], bool]) -> DecodeRows:
        """The rows of the last of the steps that `goes_on` allows."""
        assert self._decode is not None
        return self._decode.jump(goes_on, TOKEN)


class _Launched(NamedTuple):
    """A scheduled step, and when it is computed."""

    plan: StepPlan
    end: float


class _Tokens(dict[str, tuple[int]]):
    """One sampled token for any sequence."""

    def __missing__(self, key: str) -> tuple[int]:
        return (TOKEN,)


def prompt_tokens(order: int, length: int, prefix_share: float) -> list[int]:
    """Tokens of a request's prompt: all prompts share the prefix, and nothing after it."""
    tokens = [TOKEN] * length
    tokens[min(length - 1, round(prefix_share * length))] = order + 1
    return tokens


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
        self.scheduler = _Scheduler(server)
        self._server, self._clock = server, StepClock(model, server.ranks)
        self._lengths, self._due = deque(lengths), deque(arrivals)
        self._prefix_share, self._params = prefix_share, SamplingParams(ignore_eos=True)
        self._now = self._computed = 0.0
        self._in_flight: _Launched | None = None
        self._last = StepPlan(())
        self._num_arrived = self.num_steps = self.most_running = self.most_waiting = 0

    def run(self, counted: range | None = None) -> None:
        """Step until every request has ended, or each of the `counted` ones in order of arrival."""
        scheduler, num_ended = self.scheduler, 0
        left = inf if counted is None else len(counted)
        while left and (self._due or scheduler.has_unfinished()):
            if not self._arrive() and scheduler.can_jump(self._last):
                self._jump()
                self._arrive()
            self._step()
            new = scheduler.ended[num_ended:]
            num_ended += len(new)
            # A client's next request comes when its last one ends.
            for _ in range(min(len(new), len(self._lengths) - len(self._due))):
                self._due.append(self._now)
            left -= sum(counted is not None and ended.order in counted for ended in new)

    def _step(self) -> None:
        """Schedule a step; process it, or with async scheduling the one before."""
        plan = self.scheduler.schedule(self._now)
        launched = self._launch(plan) if plan.rows else None
        if self._server.overlapped:
            self._in_flight, launched = launched, self._in_flight
        if launched is not None:
            self._now = launched.end
            self.scheduler.update(launched.plan, _Tokens(), frozenset(), self._now)
        elif self._in_flight is None:
            self._now = max(self._now, self._due[0])

    def _launch(self, plan: StepPlan) -> _Launched:
        self._last = plan
        self._computed = max(self._now, self._computed) + self._clock.seconds(plan)
        self.num_steps += 1
        self.most_running = max(self.most_running, len(self.scheduler.running))
        self.most_waiting = max(self.most_waiting, self.scheduler.num_waiting)
        return _Launched(plan, self._computed)

    def _jump(self) -> None:
        """Take the decode steps up to the next arrival, or to one that the scheduler has to look at."""
        assert isinstance(self._last.rows, DecodeRows)
        sequences, context = _decoded(self._last.rows)
        seconds, due = self._clock.decode, self._due[0] if self._due else inf
        overlapped = self._server.overlapped

        def goes_on() -> bool:
            nonlocal context
            if due <= self._now:
                return False
            context += sequences
            before = self._computed
            self._computed += seconds(sequences, context)
            self._now = before if overlapped else self._computed
            self.num_steps += 1
            return True

        plan = StepPlan(self.scheduler.jump(goes_on))
        self._last = plan
        if overlapped:
            self._in_flight = _Launched(plan, self._computed)

    def _arrive(self) -> bool:
        """Queue the requests that are due; return whether there are any."""
        before = self._num_arrived
        while self._due and self._due[0] <= self._now and self._lengths:
            self._add(self._due.popleft(), *self._lengths.popleft())
        return self._num_arrived > before

    def _add(self, arrival: float, prompt: int, output: int) -> None:
        order = self._num_arrived
        self._num_arrived += 1
        request = Request(
            sequence_id=f"{order}/0",
            request_id=str(order),
            index=0,
            token_ids=prompt_tokens(order, prompt, self._prefix_share),
            num_prompt_tokens=prompt,
            max_tokens=output,
            params=self._params,
            seed=0,
            order=order,
            times=RequestTimes(arrival),
        )
        self.scheduler.add(request)


def simulate(
    server: SimulatedServer, model: TimesSteps, load: Load, counted: int = COUNTED
) -> LoadResult:
    """The steady state of a server under a load: `counted` requests of it, evenly over its batches.

    In a closed loop the clients have one request each before those that count, and go on until the last of
    them has ended.

    Raises:
        BadInput: a request can never fit.
    """
    if load.rate is not None:
        share = replace(load, rate=load.rate / server.batches)
    else:
        share = replace(load, concurrency=ceil((load.concurrency or 0) / server.batches))
    around = share.concurrency or 0
    places = range(around, around + max(1, ceil(counted / server.batches)))
    total = places.stop + around
    run = Simulation(server, model, share.requests(total), share.arrivals(total), load.prefix_share)
    # A simulation makes no cycles, but rows by the hundred thousand, which the collector would look at.
    was_on = gc.isenabled()
    gc.disable()
    try:
        run.run(places)
    finally:
        if was_on:
            gc.enable()
    ended = sorted(request for request in run.scheduler.ended if request.order in places)
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
        preemptions=run.scheduler.num_preemptions,
        most_running=run.most_running,
        most_waiting=run.most_waiting,
    )
