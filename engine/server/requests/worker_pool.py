"""Worker threads that clients share."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")


class FairPool:
    """Worker threads of which a client may use `per_key` at a time, so that a large request of one does not
    hold up the others.

    Work that has not begun is dropped when its caller stops waiting.
    """

    def __init__(self, name: str, num_threads: int, per_key: int) -> None:
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix=f"llmopt-{name}")
        self._permits = defaultdict[int, asyncio.Semaphore](lambda: asyncio.Semaphore(per_key))

    async def run(self, key: int, work: Callable[[], T], seconds: float | None = None) -> T:
        """Return the result of `work`, which came with the API key of that index. Raises `TimeoutError`: it
        has begun, or could have, and is not done after `seconds`."""
        loop, permits = asyncio.get_running_loop(), self._permits[key]
        await permits.acquire()
        try:
            working: Future[T] = self._threads.submit(work)
        except RuntimeError:  # the server stops
            permits.release()
            raise

        def leave(_: object) -> None:
            with suppress(RuntimeError):  # the event loop is closed: the server was forced to stop
                loop.call_soon_threadsafe(permits.release)

        # Not when the wait ends: a thread that has begun goes on all the same.
        working.add_done_callback(leave)
        async with asyncio.timeout(seconds):
            return await asyncio.wrap_future(working)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
