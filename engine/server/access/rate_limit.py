"""Rate limits of a key: token buckets for requests and for tokens per minute, with OpenAI's headers."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable

from ..protocol.errors import TooMany

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


def duration(seconds: float) -> str:
    """Seconds as OpenAI's headers write them: `120ms`, `6s`, `1m30s`."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    minutes, rest = divmod(math.ceil(seconds), 60)
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"
