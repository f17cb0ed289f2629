"""Prompts on their way to the engine, and what it makes of them on its way back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass

from ...base.sampling_params import SamplingParams
from ...scheduling.outputs import RequestOutput
from ..protocol.errors import ApiError, TimedOut


@dataclass(frozen=True, slots=True)
class Job:
    """One prompt for the engine. `arrival_seconds` is on the clock of `time.perf_counter`."""

    request_id: str
    token_ids: Sequence[int]
    params: SamplingParams
    arrival_seconds: float
    lora: str | None = None
    priority: int = 0


class OutputStream:
    """What the engine makes of some jobs, as it makes it: `async for output in stream`.

    Ends when every completion of every job has a finish reason. Raises `Unavailable` where the engine
    fails or stops first, and `TimedOut` after `timeout_seconds`. `close` must be called in the end; it
    aborts what is unfinished.
    """

    def __init__(
        self,
        jobs: Sequence[Job],
        timeout_seconds: float,
        on_close: Callable[[OutputStream], None],
    ) -> None:
        self.jobs = jobs
        self._on_close = on_close
        self._outputs: asyncio.Queue[RequestOutput | ApiError] = asyncio.Queue()
        self._num_unfinished = sum(job.params.n for job in jobs)
        self._deadline = asyncio.get_running_loop().call_later(
            timeout_seconds, self.push, TimedOut(timeout_seconds)
        )

    async def __aiter__(self) -> AsyncIterator[RequestOutput]:
        while not self.is_finished:
            output = await self._outputs.get()
            if isinstance(output, ApiError):
                raise output
            self._num_unfinished -= output.finish_reason is not None
            yield output

    @property
    def is_finished(self) -> bool:
        return self._num_unfinished == 0

    def push(self, output: RequestOutput | ApiError) -> None:
        self._outputs.put_nowait(output)

    def close(self) -> None:
        self._deadline.cancel()
        self._on_close(self)
