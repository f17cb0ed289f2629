"""Engine requests and the asynchronous streams of their outputs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ...base.image_input import NO_IMAGES, Images
from ...base.sampling_params import PoolingParams, SamplingParams
from ...scheduling.outputs import RequestOutput
from ..protocol.errors import ApiError


class Phases(NamedTuple):
    """Times of a request of `time.perf_counter`; a phase that has not begun has the time before it."""

    arrival: float
    begun: float
    first_token: float
    last_token: float

    @classmethod
    def of(cls, outputs: Iterable[RequestOutput]) -> Phases:
        """From the last output of each sequence: the first of all began, the last of all ended."""
        times = [output.times for output in outputs]
        arrival = min(t.arrival for t in times)
        begun = min(t.first_scheduled or arrival for t in times)
        first = min(t.first_token or begun for t in times)
        return cls(arrival, begun, first, max(t.last_token or first for t in times))


@dataclass(frozen=True, slots=True)
class Job:
    """One engine request: a prompt. `arrival_seconds` is a time of `time.perf_counter`, `key` the index of
    the API key that it came with. With `pooling` it generates nothing."""

    request_id: str
    token_ids: Sequence[int]
    params: SamplingParams
    arrival_seconds: float
    lora: str | None = None
    priority: int = 0
    cache_salt: bytes = b""
    key: int = 0
    pooling: PoolingParams | None = None
    images: Images = NO_IMAGES


class OutputStream:
    """Asynchronous stream of the `RequestOutput`s of some jobs: `async for output in stream`.

    Ends when every completion of every job has a finish reason. Raises `Unavailable` if the engine
    fails or stops first, and 504 after `timeout_seconds`. `close` must be called at the end; it
    aborts unfinished requests.

    Attributes:
        last_outputs: the latest output of each sequence, by request id and index.
    """

    def __init__(
        self,
        jobs: Sequence[Job],
        timeout_seconds: float,
        on_close: Callable[[OutputStream], None],
    ) -> None:
        self.jobs = jobs
        self.last_outputs: dict[tuple[str, int], RequestOutput] = {}
        self._on_close = on_close
        self._outputs: asyncio.Queue[RequestOutput | ApiError] = asyncio.Queue()
        self._num_unfinished = sum(job.params.n for job in jobs)
        problem = f"the response was not complete after {timeout_seconds:g} s"
        self._deadline = asyncio.get_running_loop().call_later(
            timeout_seconds, self.push, ApiError(504, problem, code="timeout")
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
        if not isinstance(
            output, ApiError
        ):  # tokens are counted though a client takes none of them
            self.last_outputs[output.request_id, output.index] = output
        self._outputs.put_nowait(output)

    def close(self) -> None:
        self._deadline.cancel()
        self._on_close(self)
