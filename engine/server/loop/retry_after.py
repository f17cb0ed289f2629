"""`Retry-After` estimates from the rate at which requests finish."""

from __future__ import annotations

import math
import time

MAX_SECONDS = 60
"""Upper bound of `Retry-After`."""


class RetryAfter:
    """Exponential moving average of the seconds between two finished requests."""

    def __init__(self) -> None:
        self._last_end: float | None = None
        self._interval_seconds: float | None = None

    def record_finish(self) -> None:
        """Record that a request has finished now."""
        now = time.perf_counter()
        if self._last_end is not None:
            # Capped: an idle night says nothing about load.
            interval = min(now - self._last_end, MAX_SECONDS)
            average = interval if self._interval_seconds is None else self._interval_seconds
            self._interval_seconds = 0.8 * average + 0.2 * interval
        self._last_end = now

    def retry_after(self, num_before: int) -> dict[str, str]:
        """The `Retry-After` header for a client behind `num_before` other requests."""
        seconds = math.ceil((self._interval_seconds or 0.0) * max(1, num_before))
        return {"Retry-After": str(min(max(seconds, 1), MAX_SECONDS))}
