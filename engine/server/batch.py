"""OpenAI's batch files: lines of `custom_id`, `method`, `url` and `body`, answered offline.

The server's application is called without a socket: its endpoints validate, tokenize and answer requests as
they do for any client, and as many are in flight as keep the engine's batch full. The journal
`OUTPUT.partial` is appended to line by line, so that a killed run has lost no finished line. A line's `id` is
a digest of its request and of the model; an answer counts only where it agrees, so that a request that was
changed is answered again. At the end a file in the order of the requests replaces the journal.

Source: https://platform.openai.com/docs/guides/batch and vLLM's `run-batch`.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import json
import math
import re
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import httpx
from fastapi import FastAPI

from ...base.atomic_io import atomic_file, no_space_or
from ...base.errors import BadInput, Failure
from ...base.progress import Progress
from ..config.config import EngineConfig
from .protocol.server_options import ServerOptions

URLS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """A request of a batch file. Its body stays in the file.

    Attributes:
        id: digest of the line and of the model that answers it; 32 hexadecimal digits.
        start, size: place of the line in the file, in bytes.
    """

    id: str
    custom_id: str
    url: str
    start: int
    size: int


@dataclass(frozen=True, slots=True)
class BatchFile:
    """A batch file, read and found to be without fault."""

    path: Path
    requests: tuple[BatchRequest, ...]

    def bodies(self) -> Iterator[tuple[BatchRequest, bytes]]:
        """Each request with its body as JSON, read as they are asked for."""
        with self.path.open("rb") as file:
            for request in self.requests:
                file.seek(request.start)
                line = json.loads(file.read(request.size))
                yield request, json.dumps(line["body"]).encode()


def read_batch(path: Path, models: Collection[str], answered_by: str) -> BatchFile:
    """Read a batch file and check each line. `models` are names that a body may give as its `model`,
    `answered_by` is the digest of the model and of the options that change its answers. Raises `BadInput`: no
    such file, or the first line with a fault."""
    requests: list[BatchRequest] = []
    line_of: dict[str, int] = {}
    start = 0
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    try:
                        custom_id, url = _checked(line, models)
                        if custom_id in line_of:
                            raise BadInput(
                                f"custom_id {custom_id!r} is that of line {line_of[custom_id]} too"
                            )
                    except BadInput as error:
                        raise BadInput(f"{path}, line {number}: {error}") from error
                    line_of[custom_id] = number
                    digest = hashlib.sha256(answered_by.encode() + b"\n" + line.strip())
                    requests.append(
                        BatchRequest(digest.hexdigest()[:32], custom_id, url, start, len(line))
                    )
                start += len(line)
    except OSError as error:
        raise BadInput(f"{path}: {error.strerror}") from error
    if not requests:
        raise BadInput(f"{path} has no request: write a JSON object with custom_id, url and body")
    return BatchFile(path, tuple(requests))


def _checked(line: bytes, models: Collection[str]) -> tuple[str, str]:
    """`custom_id` and `url` of a line; raises `BadInput` where it is not a request."""
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise BadInput(f"not JSON: {error}") from error
    if not isinstance(entry, dict):
        raise BadInput("need an object with custom_id, method, url and body")
    custom_id, url, body = entry.get("custom_id"), entry.get("url"), entry.get("body")
    # No UTF-8 file holds an unpaired surrogate.
    if not isinstance(custom_id, str) or not re.fullmatch("[^\ud800-\udfff]+", custom_id):
        raise BadInput("custom_id: need a text that is not empty")
    if entry.get("method", "POST") != "POST":
        raise BadInput(f"method {entry['method']!r}: only POST")
    if url not in URLS:
        raise BadInput(f"url {url!r}: one of {', '.join(URLS)}")
    if not isinstance(body, dict):
        raise BadInput("body: need an object")
    if body.get("stream"):
        raise BadInput("body.stream: a batch has no streams")
    model = body.get("model")
    if model is not None and model not in models:
        raise BadInput(
            f"body.model {model!r} is not {' or '.join(map(repr, models))}: give another --model, or "
            "the name with --served-model-name"
        )
    return custom_id, url


ANSWER_OPTIONS = (
    "attention_sinks",
    "cpu_activations",
    "dtype",
    "kv_budget",
    "kv_cache_dtype",
    "kv_eviction",
    "max_model_len",
    "seed",
    "window",
)
"""Fields of `EngineConfig` that change answers. The others change speed and memory, so that a run that had
too little of it can be resumed with other ones."""


def digest_of(model: Path, config: EngineConfig, for_app: Mapping[str, Any]) -> str:
    """Digest of a model (a folder or a GGUF file) and of the options that change answers; `for_app` are the
    served name, chat template and parsers. The checkpoint is told by names, sizes and times of its files:
    weights of many GiB are not read for it."""
    options = {name: getattr(config, name) for name in ANSWER_OPTIONS}
    loras = {name: _files(Path(folder)) for name, folder in config.loras.items()}
    facts = {"files": _files(model), "loras": loras, "options": options, **for_app}
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()


def _files(model: Path) -> list[tuple[str, int, int]]:
    """Names, sizes in bytes and times in nanoseconds of a checkpoint's files."""
    paths = sorted(model.iterdir()) if model.is_dir() else [model]
    return [
        (path.name, path.stat().st_size, path.stat().st_mtime_ns)
        for path in paths
        if path.is_file()
    ]


ID_PREFIX = "batch_req_"


@dataclass(frozen=True, slots=True)
class BatchAnswer:
    """The answer to a request: HTTP status and JSON body."""

    status: int
    body: dict[str, Any]

    def line(self, request: BatchRequest) -> bytes:
        """OpenAI's output line. `error` repeats that of a failed request's body, which OpenAI writes only for
        requests that were never sent, so that one look at `error` tells."""
        error = None
        if self.status != 200:
            given = self.body.get("error") or {}
            code = given.get("code") or given.get("type") or str(self.status)
            error = {"code": code, "message": given.get("message", "")}
        response = {"status_code": self.status, "request_id": request.id, "body": self.body}
        line = {"id": ID_PREFIX + request.id, "custom_id": request.custom_id, "response": response}
        line |= {"error": error}
        return json.dumps(line, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"


class AnswerJournal:
    """The answers so far of the batch that goes into `output`; a context manager that holds the journal open.

    Attributes:
        notes: remarks for the user about answers that were there.
    """

    def __init__(self, output: Path, requests: Sequence[BatchRequest], *, restart: bool) -> None:
        """Open or make the journal, and read the answers of an earlier run. Raises `BadInput`: the files
        cannot be written, hold nothing of this batch, or another run holds them."""
        self.output = output
        self.notes: list[str] = []
        self._requests = requests
        # File, begin and size of each answer, in bytes, and its HTTP status.
        self._lines: dict[str, tuple[BinaryIO, int, int, int]] = {}
        self._finished: BinaryIO | None = None
        self.journal = output.with_name(f"{output.name}.partial")
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
                return
            num_others = self._read(self._file)
            if output.exists():
                self._finished = output.open("rb")
                num_others += self._read(self._finished)
            if num_others and not self._lines:
                raise BadInput(
                    f"{output} holds answers of another batch, model or options: --restart throws them "
                    "away, --output chooses another place"
                )
            if num_others:
                self.notes.append(f"{num_others} earlier answers are to requests that have changed")
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
        return request.id in self._lines

    def __len__(self) -> int:
        return len(self._lines)

    @property
    def num_failed(self) -> int:
        return sum(status != 200 for *_, status in self._lines.values())

    def append(self, request: BatchRequest, answer: BatchAnswer) -> None:
        """Write an answer into the journal; from then on it survives a kill."""
        line, start = answer.line(request), self._file.tell()
        try:
            self._file.write(line)
            self._file.flush()
        except OSError as error:
            raise no_space_or(error, self.journal) from error
        self._lines[request.id] = self._file, start, len(line), answer.status

    def finish(self) -> None:
        """Write the output in the order of the requests, all of which are answered, and drop the journal."""
        with atomic_file(self.output) as out:
            for request in self._requests:
                file, start, size, _ = self._lines[request.id]
                file.seek(start)
                out.write(file.read(size))
        self.journal.unlink()

    def _read(self, file: BinaryIO) -> int:
        """Take the answers to requests of this batch; returns how many others there are. A last line of the
        journal that a kill cut off is removed."""
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
                self._lines[wanted[name]] = file, start, len(line), status
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
"""Maximum number of retries of a request that the engine has no room for at the moment."""

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

        async def answer_all() -> None:
            for request, body in self._left:
                answer = await self._answer(client, request, body)
                self.num_tokens += int((answer.body.get("usage") or {}).get("total_tokens", 0))
                self._answers.append(request, answer)
                self._progress.advance()

        async with (
            self._app.router.lifespan_context(self._app),
            httpx.AsyncClient(transport=transport, base_url="http://localhost") as client,
            asyncio.TaskGroup() as group,
        ):
            for _ in range(num_flights):
                group.create_task(answer_all())

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
