"""How soon there will be room again, from how fast things finish."""

from __future__ import annotations

import math
import time

MOST_SECONDS = 60
"""A client is never told to wait longer than this before it asks again."""


class Pace:
    """A moving average of the seconds between two ends."""

    def __init__(self) -> None:
        self._last_end: float | None = None
        self._gap_seconds: float | None = None

    def note_end(self) -> None:
        """Something has finished now."""
        now = time.perf_counter()
        if self._last_end is not None:
            gap = min(now - self._last_end, MOST_SECONDS)  # an idle night says nothing about load
            known = gap if self._gap_seconds is None else self._gap_seconds
            self._gap_seconds = 0.8 * known + 0.2 * gap
        self._last_end = now

    def retry_after(self, num_before: int) -> dict[str, str]:
        """The header that tells a client when `num_before` others will have finished."""
        seconds = math.ceil((self._gap_seconds or 0.0) * max(1, num_before))
        return {"Retry-After": str(min(max(seconds, 1), MOST_SECONDS))}
