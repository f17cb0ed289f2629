"""Concurrent requests of a key, with a bounded queue."""

from __future__ import annotations

import asyncio
from collections import deque

from starlette.types import Receive

from ..loop.retry_after import RetryAfter
from ..protocol.errors import TooMany


class ConcurrencyLimiter:
    """Per-key concurrency limit with a bounded FIFO queue.

    Attributes:
        limit: concurrent requests, None for no limit; may change at any time.
        num_refused: requests for which the queue was full.
    """

    def __init__(self, limit: int | None, max_queue: int) -> None:
        self.limit = limit
        self.num_refused = 0
        self._max_queue = max_queue
        self._num_active = 0
        self._queue: deque[asyncio.Future[None]] = deque()
        self._retry_after = RetryAfter()

    async def acquire(self, receive: Receive) -> bool:
        """Wait for a permit, which `release` returns; False, without one, if the client disconnects first.

        Raises:
            TooMany: the queue is full.
        """
        if self.limit is None or self._num_active < self.limit:
            self._num_active += 1
            return True
        if len(self._queue) >= self._max_queue:
            self.num_refused += 1
            raise TooMany(
                f"this key has {self._num_active} requests running and {len(self._queue)} waiting, its "
                "limit: try again later",
                self._retry_after.retry_after(len(self._queue) + 1),
            )
        permit = asyncio.get_running_loop().create_future()
        self._queue.append(permit)
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
                self._queue.remove(permit)
            elif not is_admitted:
                self._admit_next()

    def release(self) -> None:
        """Return a permit and admit the next waiting request."""
        self._retry_after.record_finish()
        self._admit_next()

    def _admit_next(self) -> None:
        # A limit that was lowered lets requests end without successors first.
        if self._queue and (self.limit is None or self._num_active <= self.limit):
            self._queue.popleft().set_result(None)
        else:
            self._num_active -= 1
