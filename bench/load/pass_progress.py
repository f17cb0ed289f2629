"""Progress of a pass: finished requests out of all, or seconds of a fixed window."""

from __future__ import annotations

import math

from ...quant.base.progress import Progress


class PassProgress:
    """Reports requests to a `Progress`; with a `window` its seconds, with the number of requests beside."""

    def __init__(
        self, progress: Progress, description: str, num_requests: int, window: float | None
    ) -> None:
        self._progress = progress
        self._window = window
        self._num_ended = self._shown_seconds = 0
        total, unit = (
            (num_requests, "requests") if window is None else (math.ceil(window), "seconds")
        )
        progress.start(description, total, unit)

    def request_ended(self, seconds: float) -> None:
        """A request ended, `seconds` into the pass."""
        self._num_ended += 1
        if self._window is None:
            self._progress.advance()
            return
        passed = int(min(seconds, self._window)) - self._shown_seconds
        if passed > 0:
            self._shown_seconds += passed
            self._progress.status(f"{self._num_ended} requests")
            self._progress.advance(passed)

    def finish(self) -> None:
        """The pass is over."""
        self._progress.finish()
