"""How soon there will be room again, from how fast things finish."""

from __future__ import annotations

import math
import time

MAX_SECONDS = 60
"""A client is never told to wait longer than this before it asks again."""


class RetryAfter:
    """A moving average of the seconds between two ends."""

    def __init__(self) -> None:
        self._last_end: float | None = None
        self._interval_seconds: float | None = None

    def record_finish(self) -> None:
        """Something has finished now."""
        now = time.perf_counter()
        if self._last_end is not None:
            interval = min(
                now - self._last_end, MAX_SECONDS
            )  # an idle night says nothing about load
            known = interval if self._interval_seconds is None else self._interval_seconds
            self._interval_seconds = 0.8 * known + 0.2 * interval
        self._last_end = now

    def retry_after(self, num_before: int) -> dict[str, str]:
        """The header that tells a client when `num_before` others will have finished."""
        seconds = math.ceil((self._interval_seconds or 0.0) * max(1, num_before))
        return {"Retry-After": str(min(max(seconds, 1), MAX_SECONDS))}
