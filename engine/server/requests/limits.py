"""Limits of a key: token buckets of requests and tokens per minute, concurrent sequences with a queue, a part
of the worker threads, and turns between keys."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

from starlette.types import Receive

from ...base.sampling_params import SamplingParams
from ...scheduling.request import Turn
from ..protocol.errors import RetryAfter, TooMany

SECONDS = 60.0
Clock = Callable[[], float]


class TokenBucket:
    """A bucket of `capacity` that fills within a minute. What was given ahead of its due may leave it below
    zero; it then refuses until that is repaid."""

    def __init__(self, capacity: int, clock: Clock) -> None:
        self.capacity = capacity
        self._clock = clock
        self._level = float(capacity)
        self._updated = clock()

    @property
    def level(self) -> float:
        now = self._clock()
        self._level = min(
            self.capacity, self._level + (now - self._updated) * self.capacity / SECONDS
        )
        self._updated = now
        return self._level

    def resize(self, capacity: int) -> None:
        """Change the capacity; what has been used stays used."""
        self._level = self.level + capacity - self.capacity
        self.capacity = capacity

    def take(self, amount: float) -> None:
        self._level = self.level - amount

    def give_back(self, amount: float) -> None:
        self._level = min(self.capacity, self.level + amount)

    def seconds_until(self, amount: float) -> float:
        """Seconds until the bucket holds `amount`, at most its capacity."""
        return max(0.0, min(amount, self.capacity) - self.level) * SECONDS / self.capacity


class Reservation:
    """Tokens taken from a bucket for a request that may generate fewer."""

    def __init__(self, bucket: TokenBucket | None, amount: float) -> None:
        self._bucket = bucket
        self._amount = amount

    def settle(self, used: int) -> None:
        """The request has ended, and has used so many tokens. Idempotent."""
        if self._bucket is not None:
            self._bucket.give_back(self._amount - used)
        self._bucket = None


class RateLimits:
    """Requests and tokens per minute of one key; None is no limit.

    Attributes:
        refused: refused requests by the limit that refused them.
    """

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._requests: TokenBucket | None = None
        self._tokens: TokenBucket | None = None
        self.refused: Counter[str] = Counter()

    def configure(self, rpm: int | None, tpm: int | None) -> None:
        """Set the limits; what was used under the old ones counts."""
        self._requests = self._resized(self._requests, rpm)
        self._tokens = self._resized(self._tokens, tpm)

    def take_request(self) -> None:
        """Count a request.

        Raises:
            TooMany: no request is left now.
        """
        bucket = self._requests
        if bucket is None:
            return
        if bucket.level < 1:
            raise self._refusal("requests", bucket, 1, "this key's limit")
        bucket.take(1)

    def reserve(self, num_tokens: int, *, at_least: int) -> Reservation:
        """Take the tokens that a request may use: prompt and completion.

        A limit below `num_tokens` is taken whole, and one below `at_least` refuses for good.

        Raises:
            TooMany: they are not there now.
        """
        bucket = self._tokens
        if bucket is None:
            return Reservation(None, 0)
        if at_least > bucket.capacity:
            self.refused["tokens"] += 1
            raise TooMany(
                f"the request asks for {at_least} tokens, more than the {bucket.capacity} per minute of this "
                "key: shorten the prompt or lower max_tokens",
                {"Retry-After": str(int(SECONDS)), "x-should-retry": "false"},
            )
        amount = min(num_tokens, bucket.capacity)
        if bucket.level < amount:
            raise self._refusal("tokens", bucket, amount, f"{amount} are needed now, of the limit")
        bucket.take(amount)
        return Reservation(bucket, amount)

    def headers(self) -> list[tuple[bytes, bytes]]:
        """OpenAI's `x-ratelimit-...` headers; none without a limit."""
        fields: list[tuple[str, str]] = []
        for name, bucket in (("requests", self._requests), ("tokens", self._tokens)):
            if bucket is not None:
                fields += [
                    (f"limit-{name}", str(bucket.capacity)),
                    (f"remaining-{name}", str(max(0, int(bucket.level)))),
                    (f"reset-{name}", duration(bucket.seconds_until(bucket.capacity))),
                ]
        return [(f"x-ratelimit-{name}".encode(), value.encode()) for name, value in fields]

    def _resized(self, bucket: TokenBucket | None, capacity: int | None) -> TokenBucket | None:
        if capacity is None:
            return None
        if bucket is None:
            return TokenBucket(capacity, self._clock)
        bucket.resize(capacity)
        return bucket

    def _refusal(self, name: str, bucket: TokenBucket, amount: float, what: str) -> TooMany:
        self.refused[name] += 1
        seconds = max(1, math.ceil(bucket.seconds_until(amount)))
        return TooMany(
            f"{what} of {bucket.capacity} {name} per minute: try again in {seconds} s",
            {"Retry-After": str(seconds)},
        )


UNKNOWN_TOKENS = 256
"""Tokens that a completion is taken to have where the request bounds none."""


class FairTurns:
    """Turns between keys by start-time fair queueing (Goyal, Vin and Cheng, 1996), in tokens.

    A key's next request begins where its last one ended, or now, if that is later: one that has asked for
    little is never behind the thousands that another has waiting. Now is the turn that is served.
    """

    def __init__(self) -> None:
        self._now = 0
        self._ends: dict[int, int] = {}

    def take(
        self, key: int, jobs: Iterable[tuple[int, SamplingParams]], first_waiting: int | None
    ) -> list[Turn]:
        """Turns of prompts of a key, each with its tokens and parameters.

        Args:
            first_waiting: the least turn of those that wait; None: nobody does.
        """
        end = self._ends.get(key, 0)
        self._now = max(self._now, end if first_waiting is None else first_waiting)
        end = max(self._now, end)
        turns = []
        for num_prompt_tokens, params in jobs:
            step = params.max_tokens or UNKNOWN_TOKENS
            turns.append(Turn(end, step))
            end += num_prompt_tokens + params.num_sequences * step
        self._ends[key] = end
        return turns

    def give_back(self, key: int, turns: Sequence[Turn]) -> None:
        """Return the turns that a key has just taken: they would stand before all that it asks later."""
        self._ends[key] = turns[0].start


def duration(seconds: float) -> str:
    """Seconds as OpenAI's headers write them: `120ms`, `6s`, `1m30s`."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    minutes, rest = divmod(math.ceil(seconds), 60)
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"


@dataclass(slots=True, eq=False)
class Places:
    """The places of one request among the concurrent sequences of its key."""

    count: int = 0


class ConcurrencyLimiter:
    """Per-key limit of concurrent sequences with a bounded FIFO queue of requests.

    A request has one place from its beginning, and as many as it has sequences once that is known.

    Attributes:
        limit: concurrent sequences, None for no limit; may change at any time.
        num_refused: requests for which the queue was full, or that have more sequences than the limit.
    """

    def __init__(self, limit: int | None, max_queue: int) -> None:
        self.limit = limit
        self.num_refused = 0
        self._max_queue = max_queue
        self._num_active = 0
        self._queue: deque[tuple[Places, int, asyncio.Future[None]]] = deque()
        self._retry_after = RetryAfter()

    async def acquire(self, receive: Receive, places: Places, count: int = 1) -> bool:
        """Wait until a request has `count` places, which `release` returns; while it waits it has none.

        False, without any, if the client disconnects first.

        Raises:
            TooMany: the queue is full, or there are never as many; those that it had are left to it.
        """
        if self.limit is not None and count > self.limit:
            self.num_refused += 1
            raise TooMany(
                f"the request has {count} sequences (prompts x n), and this key's limit is {self.limit} at a "
                "time: send fewer prompts at once, or lower n",
                {"Retry-After": str(int(SECONDS)), "x-should-retry": "false"},
            )
        more = count - places.count
        if more <= 0 or (self._fits(more) and not self._queue):
            self._take(places, count)
            return True
        if len(self._queue) >= self._max_queue:
            self.num_refused += 1
            raise TooMany(
                f"this key has {self._num_active} sequences running and {len(self._queue)} requests waiting, "
                "its limit: try again later",
                self._retry_after.retry_after(len(self._queue) + 1),
            )
        self._take(places, 0)
        permit = asyncio.get_running_loop().create_future()
        self._queue.append(entry := (places, count, permit))
        self._admit()
        # The body has been read, so the only message left to receive is the disconnect.
        disconnected = asyncio.ensure_future(receive())
        is_admitted = False
        try:
            await asyncio.wait({permit, disconnected}, return_when=asyncio.FIRST_COMPLETED)
            is_admitted = permit.done() and not disconnected.done()
            return is_admitted
        finally:
            disconnected.cancel()
            if not permit.done():
                self._queue.remove(entry)
            if not is_admitted:
                self._take(places, 0)
                self._admit()

    def release(self, places: Places) -> None:
        """Return the places of a request that has ended, and admit those that wait."""
        self._retry_after.record_finish()
        self._take(places, 0)
        self._admit()

    def _fits(self, count: int) -> bool:
        # One that is larger than a limit that was lowered since runs alone.
        return self.limit is None or not self._num_active or self._num_active + count <= self.limit

    def _take(self, places: Places, count: int) -> None:
        self._num_active += count - places.count
        places.count = count

    def _admit(self) -> None:
        while self._queue and self._fits(self._queue[0][1]):
            places, count, permit = self._queue.popleft()
            self._take(places, count)
            permit.set_result(None)


T = TypeVar("T")


class FairPool:
    """Worker threads of which a key has a part alone, so that what one sends does not hold up the others.

    Work that has not begun is dropped with the one who waits for it.
    """

    def __init__(self, name: str, num_threads: int, per_key: int) -> None:
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix=f"llmopt-{name}")
        self._places = defaultdict[int, asyncio.Semaphore](lambda: asyncio.Semaphore(per_key))

    async def run(self, key: int, work: Callable[[], T], seconds: float | None = None) -> T:
        """Return the result of `work`, which came with the API key of that index.

        Raises:
            TimeoutError: it has begun, or could have, and is not done after `seconds`.
        """
        loop, places = asyncio.get_running_loop(), self._places[key]
        await places.acquire()
        try:
            working: Future[T] = self._threads.submit(work)
        except RuntimeError:  # the server stops
            places.release()
            raise

        def leave(_: object) -> None:
            with suppress(RuntimeError):  # the event loop is closed: the server was forced to stop
                loop.call_soon_threadsafe(places.release)

        # Not when the wait ends: a thread that has begun goes on all the same.
        working.add_done_callback(leave)
        async with asyncio.timeout(seconds):
            return await asyncio.wrap_future(working)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
