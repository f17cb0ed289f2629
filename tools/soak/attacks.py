"""Attacks on the server of the soak, all at once, with a key of their own; what others notice is measured.

Each is a request or a connection that once silenced the server, filled its memory or took everybody's turn.
"""

from __future__ import annotations

import asyncio
import json
import random
import socket
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import aiohttp

GOOD, HOSTILE = "good-key", "hostile-key"
SILENT_ADDRESS = "127.0.0.3"
NUM_SILENT = 1100
PROBE_SECONDS = 0.25
MAX_PROBE_SECONDS = 0.25
"""Time within which 99 of 100 probes are answered, whatever the attackers do."""


def headers(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


PROBE = f"""
import sys, time, urllib.request
while True:
    began, status = time.monotonic(), "200"
    try:
        with urllib.request.urlopen(sys.argv[1], timeout=30) as response:
            response.read()
    except OSError as error:
        status = str(getattr(error, "code", type(error).__name__))
    print(time.monotonic() - began, status, flush=True)
    time.sleep({PROBE_SECONDS})
"""
IDLE = """
import http.server
class Idle(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def log_message(self, *_):
        pass
server = http.server.HTTPServer(("127.0.0.1", 0), Idle)
print(server.server_port, flush=True)
server.serve_forever()
"""


@dataclass
class Health:
    """Times of `/health` on a new connection each, as a load balancer asks, and from a process of its own.

    Another process asks a server that has nothing else to do, at the same time: what the machine itself
    takes.
    """

    seconds: list[float] = field(default_factory=list)
    idle_seconds: list[float] = field(default_factory=list)
    failed: Counter[str] = field(default_factory=Counter)

    async def probe(self, url: str, ended: asyncio.Event) -> None:
        idle = await self._started(IDLE)
        assert idle.stdout is not None
        port = int(await idle.stdout.readline())
        probes = await self._started(PROBE, f"{url}/health")
        controls = await self._started(PROBE, f"http://127.0.0.1:{port}/")
        reading = asyncio.gather(
            self._read(probes, self.seconds, self.failed),
            self._read(controls, self.idle_seconds, Counter()),
        )
        await ended.wait()
        for process in (probes, controls, idle):
            process.kill()
            await process.wait()
        await reading

    @staticmethod
    async def _started(script: str, *words: str) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-c", script, *words), stdout=asyncio.subprocess.PIPE
        )

    @staticmethod
    async def _read(
        process: asyncio.subprocess.Process, seconds: list[float], failed: Counter[str]
    ) -> None:
        assert process.stdout is not None
        async for line in process.stdout:
            taken, status = line.decode().split()
            seconds.append(float(taken))
            failed.update([] if status == "200" else [status])

    def record(self) -> dict[str, Any]:
        return {
            "probes": len(self.seconds),
            "failed": dict(self.failed),
            "seconds": _spread(self.seconds),
            "seconds_of_an_idle_server": _spread(self.idle_seconds),
        }


def _spread(seconds: list[float]) -> dict[str, float]:
    ranked = sorted(seconds)
    last = len(ranked) - 1
    return {"median": ranked[last // 2], "p99": ranked[int(0.99 * last)], "max": ranked[last]}


def nested_schema(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


def large_schema(seed: int) -> dict[str, Any]:
    names = (f"{seed}_{number}" + "x" * 60 for number in range(1900))
    return {"type": "object", "properties": {name: {"type": "string"} for name in names}}


def by_schema(schema: dict[str, Any]) -> dict[str, Any]:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    return {"prompt": "a", "max_tokens": 4, "response_format": form}


class Attacks:
    """The attackers; `answers` counts what each got by its status."""

    def __init__(self, url: str, ended: asyncio.Event, seed: int) -> None:
        self.answers: Counter[str] = Counter()
        self._url, self._ended, self._random = url, ended, random.Random(seed)

    async def run(self) -> None:
        """All of them, again and again until the end."""
        kinds: Sequence[Callable[[aiohttp.ClientSession], Awaitable[None]]] = (
            self.values, self.bytes, self.logprobs, self.sequences, self.long_prompts,
            self.schemas, self.deep_schemas, self.pages, self.tokens,
        )  # fmt: skip
        connector = aiohttp.TCPConnector(limit=0)
        timeout = aiohttp.ClientTimeout(120)
        async with aiohttp.ClientSession(
            headers=headers(HOSTILE), connector=connector, timeout=timeout
        ) as session:
            await asyncio.gather(
                *(self._again(kind, session) for kind in kinds),
                *(self._again(self.unread, session) for _ in range(8)),
                *(self._again(self.half_a_body, session) for _ in range(8)),
                self._again(self.silent, session),
            )

    async def _again(
        self, kind: Callable[[aiohttp.ClientSession], Awaitable[None]], session: Any
    ) -> None:
        while not self._ended.is_set():
            try:
                await kind(session)
            except (aiohttp.ClientError, OSError, TimeoutError) as error:
                self.answers[f"{kind.__name__} {type(error).__name__}"] += 1
            with suppress(TimeoutError):
                await asyncio.wait_for(self._ended.wait(), self._random.uniform(0.2, 1.0))

    async def _post(
        self, session: aiohttp.ClientSession, name: str, path: str, **sent: Any
    ) -> None:
        async with session.post(self._url + path, **sent) as response:
            await response.read()
            self.answers[f"{name} {response.status}"] += 1

    async def values(self, session: aiohttp.ClientSession) -> None:
        """Millions of values, too many and as many as may be."""
        value = self._random.choice((b"1", b"[1]", b"[[[1]]]", b"{}", b'"a"'))
        for count in (7 << 20) // len(value), 200_000:
            body = b'{"prompt":[' + b",".join([value] * count) + b"]}"
            kind = {"Content-Type": "application/json"}
            await self._post(session, "values", "/v1/completions", data=body, headers=kind)

    async def bytes(self, session: aiohttp.ClientSession) -> None:
        """Texts of 15 MiB, several at a time."""
        body = {"prompt": "word " * (3 << 20)}
        asked = (self._post(session, "bytes", "/v1/completions", json=body) for _ in range(4))
        await asyncio.gather(*asked)

    async def logprobs(self, session: aiohttp.ClientSession) -> None:
        """Ask for as many log-probabilities of prompts as a request may have, several at a time."""
        prompts = [[self._random.randrange(3, 400) for _ in range(380)] for _ in range(16)]
        body = {"prompt": prompts, "max_tokens": 1, "prompt_logprobs": 100}
        asked = (self._post(session, "logprobs", "/v1/completions", json=body) for _ in range(3))
        await asyncio.gather(*asked)

    async def sequences(self, session: aiohttp.ClientSession) -> None:
        """A thousand prompts, and a hundred completions of one."""
        for fields in ({"prompt": ["a"] * 1000}, {"prompt": "a", "n": 100}):
            body = {"max_tokens": 30, "ignore_eos": True, **fields}
            await self._post(session, "sequences", "/v1/completions", json=body)

    async def long_prompts(self, session: aiohttp.ClientSession) -> None:
        """Prompts that fill the context, each another."""
        prompts = [[self._random.randrange(3, 400) for _ in range(500)] for _ in range(8)]
        body = {"prompt": prompts, "max_tokens": 4}
        await self._post(session, "long_prompts", "/v1/completions", json=body)

    async def schemas(self, session: aiohttp.ClientSession) -> None:
        """Six schemas of 190 kB at once."""
        bodies = [by_schema(large_schema(self._random.randrange(1 << 30))) for _ in range(6)]
        asked = (self._post(session, "schemas", "/v1/completions", json=body) for body in bodies)
        await asyncio.gather(*asked)

    async def deep_schemas(self, session: aiohttp.ClientSession) -> None:
        """Schemas that are nested deep."""
        schema = nested_schema(200)
        await self._post(session, "deep_schemas", "/v1/completions", json=by_schema(schema))
        chat = {"model": "stories3M", "messages": [{"role": "user", "content": "a"}]}
        body = {**chat, "format": schema}
        await self._post(session, "deep_schemas", "/api/chat", json=body)

    async def pages(self, session: aiohttp.ClientSession) -> None:
        """A page of another origin that asks without a type."""
        sent = {"data": b'{"prompt": "a"}', "headers": {"Origin": "https://evil.example"}}
        await self._post(session, "pages", "/v1/completions", **sent)

    async def tokens(self, session: aiohttp.ClientSession) -> None:
        """Texts and conversations to tokenize."""
        await self._post(session, "tokens", "/tokenize", json={"prompt": "ab " * 100_000})
        messages = [{"role": "user", "content": [{"type": "text", "text": "a"}] * 4000}] * 40
        await self._post(session, "tokens", "/tokenize", json={"messages": messages})

    async def unread(self, _: Any) -> None:
        """A stream of many log-probabilities, of which nothing is read for a while."""
        body = {"prompt": "a", "max_tokens": 400, "n": 4, "logprobs": 20}
        body |= {"ignore_eos": True, "stream": True}
        _reader, writer = await self._connect(rcvbuf=4096)
        content = json.dumps(body).encode()
        writer.write(self._head(len(content)) + content)
        await writer.drain()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._ended.wait(), self._random.uniform(1, 20))
        writer.transport.abort()
        self.answers["unread left"] += 1

    async def half_a_body(self, _: Any) -> None:
        """A body of 15 MiB of which the last half does not come."""
        reader, writer = await self._connect()
        writer.write(self._head(15 << 20) + b" " * (7 << 20))
        with suppress(TimeoutError):
            answer = await asyncio.wait_for(reader.read(12), 40)
            self.answers[f"half_a_body {answer[9:12].decode()}"] += 1
        writer.transport.abort()

    async def silent(self, _: Any) -> None:
        """More connections than there may be, from one address, that say nothing."""
        parts = urlsplit(self._url)
        opened = await asyncio.gather(
            *(
                asyncio.open_connection(parts.hostname, parts.port, local_addr=(SILENT_ADDRESS, 0))
                for _ in range(NUM_SILENT)
            ),
            return_exceptions=True,
        )
        connections = [one for one in opened if not isinstance(one, BaseException)]
        with suppress(TimeoutError):
            await asyncio.wait_for(self._ended.wait(), 8)
        for _reader, writer in connections:
            writer.transport.abort()
        self.answers["silent connections"] += len(connections)

    def _head(self, length: int) -> bytes:
        lines = ["POST /v1/completions HTTP/1.1", "Host: localhost", f"Content-Length: {length}"]
        lines += [f"Authorization: Bearer {HOSTILE}", "Content-Type: application/json"]
        return "\r\n".join([*lines, "", ""]).encode()

    async def _connect(
        self, rcvbuf: int | None = None
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        parts = urlsplit(self._url)
        plug = socket.socket()
        if rcvbuf is not None:
            plug.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, rcvbuf)
        plug.setblocking(False)
        await asyncio.get_running_loop().sock_connect(plug, (parts.hostname, parts.port))
        return await asyncio.open_connection(sock=plug, limit=1 << 12)
