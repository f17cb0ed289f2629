"""Run of a batch: the server's application called without a socket, and a journal of answers.

As many requests are in flight as keep the engine's batch full; the endpoints validate, tokenize and answer
them as they do for any client. The journal `OUTPUT.partial` is appended to line by line, so that a killed
run has lost no finished line. A line's `id` is a digest of its request and of the model; an answer counts
only where it agrees, so that a request that was changed is answered again. At the end a file in the order
of the requests replaces it.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import httpx
from fastapi import FastAPI

from ...base.atomic_io import atomic_file, no_space_or
from ...base.errors import BadInput, Failure
from ...base.progress import Progress
from .batch_file import BatchFile, BatchRequest
from .protocol.server_options import ServerOptions

PARTIAL_SUFFIX = ".partial"
ID_PREFIX = "batch_req_"


@dataclass(frozen=True, slots=True)
class BatchAnswer:
    """The answer to a request: HTTP status and JSON body."""

    status: int
    body: dict[str, Any]

    @property
    def failed(self) -> bool:
        return self.status != 200

    def line(self, request: BatchRequest) -> bytes:
        """OpenAI's output line. `error` repeats that of a failed request's body, which OpenAI writes only for
        requests that were never sent, so that one look at `error` tells."""
        error = None
        if self.failed:
            told = self.body.get("error") or {}
            code = told.get("code") or told.get("type") or str(self.status)
            error = {"code": code, "message": told.get("message", "")}
        response = {"status_code": self.status, "request_id": request.id, "body": self.body}
        line = {
            "id": ID_PREFIX + request.id,
            "custom_id": request.custom_id,
            "response": response,
            "error": error,
        }
        return json.dumps(line, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"


@dataclass(frozen=True, slots=True)
class _Place:
    file: BinaryIO
    start: int
    size: int
    status: int


class AnswerJournal:
    """The answers so far of the batch that goes into `output`; a context manager that holds the journal open.

    Attributes:
        notes: what the user should know about answers that were there.
    """

    def __init__(self, output: Path, requests: Sequence[BatchRequest], *, restart: bool) -> None:
        """Open or make the journal, and read the answers of an earlier run. Raises `BadInput`: the files
        cannot be written, hold nothing of this batch, or another run holds them."""
        self.output = output
        self.notes: list[str] = []
        self._requests = requests
        self._places: dict[str, _Place] = {}
        self._finished: BinaryIO | None = None
        self.journal = output.with_name(output.name + PARTIAL_SUFFIX)
        is_new = not self.journal.exists()
        try:
            self._file = self.journal.open("a+b")
        except OSError as error:
            raise BadInput(f"--output {output}: {error.strerror}") from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._file.close()
            raise BadInput(f"another process writes {self.journal}: let it finish") from error
        try:
            if restart:
                self._file.truncate(0)
                self._file.seek(0)
            else:
                self._read_all()
        except BaseException:
            self._file.close()
            if is_new:
                self.journal.unlink()
            raise

    def __enter__(self) -> AnswerJournal:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()
        if self._finished is not None:
            self._finished.close()

    def __contains__(self, request: BatchRequest) -> bool:
        return request.id in self._places

    def __len__(self) -> int:
        return len(self._places)

    @property
    def num_failed(self) -> int:
        return sum(place.status != 200 for place in self._places.values())

    def append(self, request: BatchRequest, answer: BatchAnswer) -> None:
        """Write an answer into the journal; from then on it survives a kill."""
        line, start = answer.line(request), self._file.tell()
        try:
            self._file.write(line)
            self._file.flush()
        except OSError as error:
            raise no_space_or(error, self.journal) from error
        self._places[request.id] = _Place(self._file, start, len(line), answer.status)

    def finish(self) -> None:
        """Write the output in the order of the requests, all of which are answered, and drop the journal."""
        with atomic_file(self.output) as out:
            for request in self._requests:
                place = self._places[request.id]
                place.file.seek(place.start)
                out.write(place.file.read(place.size))
        self.journal.unlink()

    def _read_all(self) -> None:
        num_others = self._read(self._file)
        if self.output.exists():
            self._finished = self.output.open("rb")
            num_others += self._read(self._finished)
        if num_others and not self._places:
            raise BadInput(
                f"{self.output} holds answers of another batch, model or options: --restart throws them "
                "away, --output chooses another place"
            )
        if num_others:
            self.notes.append(f"{num_others} earlier answers are to requests that have changed")

    def _read(self, file: BinaryIO) -> int:
        """Take the answers to requests of this batch; returns how many others there are.

        Of the journal, a last line that a kill cut off is removed.
        """
        wanted = {ID_PREFIX + request.id: request.id for request in self._requests}
        num_others = start = 0
        file.seek(0)
        for line in file:
            if not line.endswith(b"\n"):
                break
            try:
                entry = json.loads(line)
                name, status = entry["id"], int(entry["response"]["status_code"])
            except (ValueError, TypeError, KeyError):
                name, status = "", 0
            if name in wanted:
                self._places[wanted[name]] = _Place(file, start, len(line), status)
            else:
                num_others += 1
            start += len(line)
        if file is self._file:
            file.truncate(start)
            file.seek(start)
        return num_others


FLIGHTS_PER_SEQUENCE = 2
"""Requests in flight for each sequence of a step: while some are tokenized or written, others wait."""
MAX_BUSY = 100
"""How often a request is sent again that the engine has no room for at the moment."""

OPTIONS = ServerOptions(
    max_body_bytes=sys.maxsize,
    max_waiting=sys.maxsize,
    request_timeout_seconds=math.inf,
    max_step_seconds=math.inf,
)
"""Options of a server whose only client is the batch."""


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
        """Answer them all; `num_sequences` is how many the engine runs in a step. Raises `Failure`: the
        engine cannot go on. What was answered is in the journal; `BadInput`: the disk is full."""
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
    ) -> BatchAnswer:
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

    async def _sent(
        self, client: httpx.AsyncClient, request: BatchRequest, body: bytes
    ) -> BatchAnswer:
        headers = {"Content-Type": "application/json", "X-Request-Id": request.id}
        response = await client.post(request.url, content=body, headers=headers)
        if response.status_code == 503:
            raise Failure(f"{response.json()['error']['message']}; the same command goes on")
        return BatchAnswer(response.status_code, reproducible(response.json(), self._created))


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
    return int((body.get("usage") or {}).get("total_tokens", 0))
