"""Streams that nobody reads, or whose client has left: the others get their turn, and little is written."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from llmopt.engine.base.sampling_params import SamplingParams
from llmopt.engine.scheduling.outputs import RequestOutput
from llmopt.engine.scheduling.request import RequestTimes
from llmopt.engine.server.endpoints.service import EventStream
from llmopt.engine.server.requests.request_record import SLICE, Job, OutputStream

NUM_OUTPUTS = 2000


def full_stream() -> OutputStream:
    """A stream whose outputs all wait to be read."""
    job = Job("a", [1], SamplingParams(), 0.0)
    stream = OutputStream([job], 600, lambda _: None)
    for number in range(NUM_OUTPUTS):
        reason = "length" if number == NUM_OUTPUTS - 1 else None
        times = RequestTimes(0.0)
        stream.push(
            RequestOutput("a", 0, (5,), "x", None, None, reason, None, 1, 0, number + 1, times)
        )
    return stream


def test_a_full_queue_lets_others_run() -> None:
    async def turns() -> int:
        stream, num_turns = full_stream(), 0

        async def other() -> None:
            nonlocal num_turns
            while True:
                num_turns += 1
                await asyncio.sleep(0)

        task = asyncio.ensure_future(other())
        assert [output.num_output_tokens async for output in stream][-1] == NUM_OUTPUTS
        task.cancel()
        stream.close()
        return num_turns

    assert asyncio.run(turns()) >= NUM_OUTPUTS // SLICE


@pytest.mark.parametrize("leaves", [False, True])
def test_a_stream_ends_where_its_client_leaves(leaves: bool) -> None:
    async def written() -> tuple[int, list[str]]:
        stream, sent, closed = full_stream(), 0, []
        left = asyncio.Event()

        async def events() -> AsyncIterator[bytes]:
            async for output in stream:
                yield output.new_text.encode()

        async def receive() -> dict[str, Any]:
            await left.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:  # as uvicorn's, which waits for nothing then
            nonlocal sent
            sent += message["type"] == "http.response.body"
            if leaves and sent == 100:
                left.set()

        response = EventStream(events(), lambda: closed.append("closed"), "text/event-stream")
        scope = {"type": "http", "asgi": {"spec_version": "2.4"}, "method": "POST", "headers": []}
        await response(scope, receive, send)
        stream.close()
        return sent, closed

    sent, closed = asyncio.run(written())
    assert closed == ["closed"]
    assert sent <= 100 + 8 * SLICE if leaves else sent == NUM_OUTPUTS + 1, sent
