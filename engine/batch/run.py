"""Run of a batch: the server's application called in this process, without a socket.

As many requests are in flight as keep the engine's batch full; the endpoints validate, tokenize and answer
them as they do for any client.
"""

from __future__ import annotations

import asyncio
import math
import sys
from collections.abc import Iterator
from typing import Any

import httpx
from fastapi import FastAPI

from ...quant.base.errors import Failure
from ...quant.base.progress import Progress
from ..server.protocol.server_options import ServerOptions
from .answers import Answer, AnswerJournal
from .batch_file import BatchFile, BatchRequest

FLIGHTS_PER_SEQUENCE = 2
"""Requests in flight for each sequence of a step: while some are tokenized or written, others wait."""
MAX_BUSY = 100
"""How often a request is sent again that the engine has no room for at the moment."""

OPTIONS = ServerOptions(
    max_body_bytes=sys.maxsize, max_waiting=sys.maxsize, request_timeout_seconds=math.inf
)
"""Of a server whose only client is the batch."""


class BatchRun:
    """Answers the requests of a batch that have no answer yet."""

    def __init__(
        self, app: FastAPI, batch: BatchFile, answers: AnswerJournal, progress: Progress
    ) -> None:
        """`app` is an application of `create_app` with `OPTIONS`, which has not been started."""
        self.num_tokens = 0
        self._app = app
        self._created = int(batch.path.stat().st_mtime)
        self._left = (pair for pair in batch.bodies() if pair[0] not in answers)
        self._answers = answers
        self._progress = progress
        self._alone = asyncio.Lock()

    def run(self, num_sequences: int) -> None:
        """Answer them all; `num_sequences` is how many the engine runs in a step.

        Raises:
            Failure: the engine cannot go on. What was answered is in the journal.
            BadInput: the disk is full.
        """
        try:
            asyncio.run(self._run(num_sequences * FLIGHTS_PER_SEQUENCE))
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def _run(self, num_flights: int) -> None:
        transport = httpx.ASGITransport(self._app)
        async with (
            self._app.router.lifespan_context(self._app),
            httpx.AsyncClient(transport=transport, base_url="http://localhost") as client,
            asyncio.TaskGroup() as group,
        ):
            left = self._left
            for _ in range(num_flights):
                group.create_task(self._answer_all(client, left))

    async def _answer_all(
        self, client: httpx.AsyncClient, left: Iterator[tuple[BatchRequest, bytes]]
    ) -> None:
        for request, body in left:
            answer = await self._answer(client, request, body)
            self.num_tokens += _num_tokens(answer.body)
            self._answers.append(request, answer)
            self._progress.advance()

    async def _answer(
        self, client: httpx.AsyncClient, request: BatchRequest, body: bytes
    ) -> Answer:
        """Send a request; again where it is not to blame for its failure."""
        answer = await self._sent(client, request, body)
        for _ in range(MAX_BUSY):
            if answer.status != 429:
                break
            await asyncio.sleep(1)
            answer = await self._sent(client, request, body)
        if answer.status == 500:
            # A step fails with all its requests. By one at a time, the one that made it fail is found.
            async with self._alone:
                answer = await self._sent(client, request, body)
        return answer

    async def _sent(self, client: httpx.AsyncClient, request: BatchRequest, body: bytes) -> Answer:
        headers = {"Content-Type": "application/json", "X-Request-Id": request.id}
        response = await client.post(request.url, content=body, headers=headers)
        if response.status_code == 503:
            raise Failure(f"{response.json()['error']['message']}; the same command goes on")
        return Answer(response.status_code, reproducible(response.json(), self._created))


_TIMES = ("created", "created_at", "completed_at")
_CACHED = ("prompt_tokens_details", "input_tokens_details")


def reproducible(body: dict[str, Any], created: int) -> dict[str, Any]:
    """A body without what the next run would measure anew: `created` in place of times, and no tokens found
    in the prefix cache. So the bytes of a resumed run are those of one that was not interrupted."""
    times = {name: created for name in _TIMES if body.get(name) is not None}
    body = {**body, **times}
    if isinstance(usage := body.get("usage"), dict):
        none = {name: dict.fromkeys(usage[name], 0) for name in _CACHED if usage.get(name)}
        body["usage"] = {name: v for name, v in (usage | none).items() if name != "seconds"}
    return body


def _num_tokens(body: dict[str, Any]) -> int:
    """Tokens of prompt and output."""
    return int((body.get("usage") or {}).get("total_tokens", 0))
