"""Recording proxy: passes every request and stream through, and writes a trace of them without their text.

aiohttp carries the bytes. What is parsed is parsed behind the end of a request, in a thread: the prompt
into salted block hashes, the answer into its token counts. A line of the trace is one write, so that a
process that is killed loses the requests in flight and nothing else.
"""

from __future__ import annotations

import asyncio
import json
import os
import queue
import secrets
import signal
import socket
import sys
import threading
import time
import zlib
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from ...quant.base.errors import BadInput
from ..workloads.trace_rows import (
    BLOCK_BYTES,
    BLOCK_IDS,
    RECORDING,
    block_hashes,
    message_text,
)
from .exchange import events

if TYPE_CHECKING:
    from aiohttp import ClientResponse, web

# Of one connection each (RFC 9110, 7.6.1); aiohttp writes its own.
HOP_BY_HOP = {
    "connection",
    "host",
    "keep-alive",
    "proxy-authenticate",
    "proxy-authorization",
    "proxy-connection",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
}
SESSION_HEADERS = ("session_id", "session-id", "x-session-id", "x-claude-code-session-id")
SESSION_FIELDS = ("prompt_cache_key", "conversation", "conversation_id", "session_id", "user")
MAX_BODY_BYTES = 1 << 30
CONNECT_SECONDS = 10.0
IDLE_SECONDS = 3.0
"""A connection to the upstream is not used again after this: common servers close it after 5 s."""
PROBE_SECONDS = 30
"""Idle connections are probed, so that a peer that vanished without a word is noticed."""
KNOWN_PROMPTS = 1 << 16
TOKEN_BYTES = 4
"""Bytes of a token where a server does not count: an estimate, and named one."""


@dataclass(slots=True)
class Passed:
    """One request that passed through. Times are seconds, `arrival` since the epoch.

    Attributes:
        ended: `whole`, `cancelled` by the client, broken by the `upstream`, or `stopped` with the proxy.
    """

    arrival: float
    path: str
    client: str
    headers: Mapping[str, str]
    body: bytes
    status: int = 0
    encoding: str = ""
    chunks: list[bytes] = field(default_factory=list)
    first: float | None = None
    seconds: float = 0.0
    ended: str = "whole"


def prompt_of(body: Mapping[str, Any]) -> bytes | list[int] | None:
    """The prompt of a request as its token ids, or as text with whatever comes before it in a chat template;
    None where there is no prompt."""
    parts = [body[key] for key in ("tools", "system", "instructions") if body.get(key)]
    said = next((body[key] for key in ("messages", "input", "prompt") if key in body), None)
    if said is None:
        return None
    if isinstance(said, list) and said and all(type(token) is int for token in said):
        return said
    turns = said if isinstance(said, list) else [said]
    return message_text([*parts, *turns]).encode("utf-8", "replace")


def usage_of(data: bytes) -> tuple[dict[str, int], int]:
    """(token counts by `prompt`, `output` and `cached`, number of events) of an answer: a JSON document, JSON
    lines, or server-sent events of any of the known APIs."""
    counts: dict[str, int] = {}
    documents = _documents(data)
    for document in documents:
        # Most events of a stream are a piece of text alone.
        if b'"usage"' not in document and b"eval_count" not in document:
            continue
        with suppress(ValueError):
            said = json.loads(document)
            for holder in (said, said.get("response"), said.get("message")):
                if isinstance(holder, dict):
                    counts |= _counts(holder.get("usage") or holder)
    return counts, len(documents)


def _documents(data: bytes) -> list[bytes]:
    if data.lstrip()[:1] == b"{":
        lines = data.split(b"\n")
        return lines if len(lines) > 1 and lines[0].rstrip().endswith(b"}") else [data]
    return [event for _, event in events([(0.0, data)])]


def _counts(usage: Mapping[str, Any]) -> dict[str, int]:
    def first(*names: str) -> int | None:
        return next((usage[name] for name in names if type(usage.get(name)) is int), None)

    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    prompt = first("prompt_tokens", "input_tokens", "prompt_eval_count")
    # Anthropic counts what was read from or written to its cache apart.
    apart = first("cache_read_input_tokens"), first("cache_creation_input_tokens")
    if prompt is not None:
        prompt += sum(count or 0 for count in apart)
    found = {
        "prompt": prompt,
        "output": first("completion_tokens", "output_tokens", "eval_count"),
        "cached": cached if apart[0] is None else apart[0],
    }
    return {name: count for name, count in found.items() if type(count) is int}


class Lineage:
    """Finds the request that a prompt came from: the longest earlier prompt that it begins with, else the one
    before in its session."""

    def __init__(self) -> None:
        self._prompts: OrderedDict[int | str, tuple[str, float]] = OrderedDict()

    def parent(
        self, blocks: Sequence[int], session: str | None, arrival: float
    ) -> tuple[str, float, bool] | None:
        """(id, when it ended, whether the prompt extends its prompt) of the parent, which had ended at
        `arrival`."""
        keys: list[int | str] = [*reversed(blocks), *([session] if session else [])]
        for key in keys:
            name, ended = self._prompts.get(key, ("", arrival))
            if name and ended <= arrival:
                return name, ended, key != session
        return None

    def note(self, name: str, last_block: int | None, session: str | None, ended: float) -> None:
        """Remember a request by the last whole block of its prompt and by its session."""
        for key in (last_block, session):
            if key is not None:
                self._prompts[key] = name, ended
                self._prompts.move_to_end(key)
        while len(self._prompts) > KNOWN_PROMPTS:
            self._prompts.popitem(last=False)


class TraceWriter:
    """Appends a line for each request to the trace, in a thread. `close` writes what is left.

    Attributes:
        totals: requests by how they ended, tokens, and blocks.
    """

    def __init__(self, path: Path, *, salt: bytes, keep_text: bool) -> None:
        self._salt, self._keep_text = blake2b(salt).digest(), keep_text
        try:
            self._file = os.open(path, os.O_APPEND | os.O_CREAT | os.O_RDWR, 0o600)
        except OSError as error:
            raise BadInput(f"cannot write {path}: {error.strerror}") from error
        self.totals: Counter[str] = Counter()
        self._lineage, self._seen = Lineage(), set[int]()
        self._prefix = secrets.token_hex(4)
        self._waiting: queue.SimpleQueue[Passed | None] = queue.SimpleQueue()
        size = os.fstat(self._file).st_size
        is_cut = size > 0 and os.pread(self._file, 1, size - 1) != b"\n"
        blocks = {"bytes": BLOCK_BYTES, "token_ids": BLOCK_IDS}
        head = {RECORDING: 1, "began": time.time(), "block": blocks, "keeps_text": keep_text}
        os.write(self._file, b"\n" * is_cut + _line(head))
        self._thread = threading.Thread(target=self._write, daemon=True)
        self._thread.start()

    def add(self, passed: Passed) -> None:
        """Queue a request that ended."""
        self._waiting.put(passed)

    def close(self) -> None:
        """Write what is queued, and end the thread."""
        self._waiting.put(None)
        self._thread.join()
        os.close(self._file)

    def _write(self) -> None:
        while (passed := self._waiting.get()) is not None:
            if (row := self.row(passed)) is not None:
                os.write(self._file, _line(row))

    def row(self, passed: Passed) -> dict[str, Any] | None:
        """The line of a request; None where it has no prompt."""
        try:
            body = json.loads(passed.body)
            prompt = prompt_of(body) if isinstance(body, dict) else None
        except ValueError:
            prompt = None
        if prompt is None:
            return None
        answer = _decoded(b"".join(passed.chunks), passed.encoding)
        counts, num_events = usage_of(answer)
        is_text = isinstance(prompt, bytes)
        size, block = len(prompt), BLOCK_BYTES if is_text else BLOCK_IDS
        estimate = -(-size // TOKEN_BYTES) if is_text else size
        streamed = bool(body.get("stream", "/api/" in passed.path))
        output = num_events if streamed else -(-len(answer) // TOKEN_BYTES)
        blocks = block_hashes(prompt, self._salt)
        session = self._session(passed, body)
        name = f"{self._prefix}-{self.totals['requests']}"
        parent = self._lineage.parent(blocks, session, passed.arrival)
        ended = passed.arrival + passed.seconds
        last = blocks[size // block - 1] if size >= block else None
        if passed.status == 200:
            self._lineage.note(name, last, session, ended)
        row = {
            "id": name,
            "arrival": round(passed.arrival, 6),
            "path": passed.path,
            "model": body.get("model"),
            "status": passed.status,
            "stream": streamed,
            "ended": passed.ended,
            "ttft": passed.first,
            "seconds": round(passed.seconds, 6),
            "prompt_tokens": counts.get("prompt", estimate),
            "output_tokens": counts.get("output", output),
            "cached_tokens": counts.get("cached"),
            "tokens_by": "usage" if {"prompt", "output"} <= counts.keys() else "estimate",
            "max_tokens": _most_tokens(body),
            "client": self._hidden(passed.client),
            "session": session,
            "parent": parent and parent[0],
            "extends": parent is not None and parent[2],
            "gap": parent and round(passed.arrival - parent[1], 6),
            "hash_ids": blocks,
        }
        if self._keep_text:
            row |= {"request": body, "response": answer.decode("utf-8", "replace")}
        self._count(row)
        return row

    def _session(self, passed: Passed, body: Mapping[str, Any]) -> str | None:
        named = [passed.headers.get(name) for name in SESSION_HEADERS]
        metadata = body.get("metadata")
        named.append(metadata.get("user_id") if isinstance(metadata, dict) else None)
        named += [body.get(name) for name in SESSION_FIELDS]
        said = next((name for name in named if name), None)
        return None if said is None else self._hidden(json.dumps(said))

    def _hidden(self, text: str) -> str:
        return blake2b(text.encode(), digest_size=6, key=self._salt).hexdigest()

    def _count(self, row: Mapping[str, Any]) -> None:
        known = sum(block in self._seen for block in row["hash_ids"])
        self._seen.update(row["hash_ids"])
        self.totals.update(
            {
                "requests": 1,
                row["ended"]: 1,
                "refused": int(row["ended"] == "whole" and row["status"] != 200),
                "prompt_tokens": row["prompt_tokens"],
                "output_tokens": row["output_tokens"],
                "estimated": int(row["tokens_by"] == "estimate"),
                "blocks": len(row["hash_ids"]),
                "known_blocks": known,
            }
        )


def _line(row: Mapping[str, Any]) -> bytes:
    return json.dumps(row, separators=(",", ":")).encode() + b"\n"


def _decoded(data: bytes, encoding: str) -> bytes:
    """An answer without its content encoding; of one that cannot be read here, nothing."""
    if encoding not in ("gzip", "deflate"):
        return data if encoding in ("", "identity") else b""
    with suppress(zlib.error):
        return zlib.decompressobj(zlib.MAX_WBITS | 32).decompress(data)
    return b""


def _most_tokens(body: Mapping[str, Any]) -> int | None:
    options = body.get("options") if isinstance(body.get("options"), dict) else {}
    names = ("max_tokens", "max_completion_tokens", "max_output_tokens")
    found = [body.get(name) for name in names] + [(options or {}).get("num_predict")]
    return next((count for count in found if type(count) is int and count > 0), None)


class Proxy:
    """Passes requests to the upstream, and hands each to the writer when it has ended."""

    def __init__(self, upstream: str, writer: TraceWriter, say: Callable[[str], None]) -> None:
        self._upstream, self._writer, self._say = upstream.rstrip("/"), writer, say
        self._is_stopping = False

    async def serve(self, host: str, port: int) -> None:
        """Serve until SIGINT or SIGTERM; a port of 0 is a free one.

        Raises:
            BadInput: the address cannot be listened on.
        """
        import aiohttp
        from aiohttp import web

        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop.set)
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        app.router.add_route("*", "/{path:.*}", self._pass)
        runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0)
        connector = aiohttp.TCPConnector(
            limit=0, keepalive_timeout=IDLE_SECONDS, socket_factory=_probed_socket
        )
        self._session = aiohttp.ClientSession(
            connector=connector,
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS),
        )
        await runner.setup()
        try:
            site = web.TCPSite(runner, host, port, backlog=1024)
            await site.start()
            where = runner.addresses[0]
            self._say(f"recording http://{where[0]}:{where[1]} -> {self._upstream}, until Ctrl-C")
            await stop.wait()
        except OSError as error:
            raise BadInput(f"cannot listen on {host}:{port}: {error.strerror}") from error
        finally:
            self._is_stopping = True
            await runner.cleanup()
            await self._session.close()

    async def _pass(self, request: web.Request) -> web.StreamResponse:
        """One request to the upstream, and its answer back, chunk by chunk as they come."""
        import aiohttp
        from aiohttp import web

        began, arrival = time.perf_counter(), time.time()
        key = request.headers.get("Authorization") or request.headers.get("x-api-key")
        passed = Passed(
            arrival, request.path, key or str(request.remote), request.headers, await request.read()
        )
        response = None
        try:
            async with self._sent(request, passed.body) as answer:
                passed.status = answer.status
                passed.encoding = answer.headers.get("Content-Encoding", "").lower()
                response = _begun(answer)
                await response.prepare(request)
                async for chunk in answer.content.iter_any():
                    if passed.first is None:
                        passed.first = round(time.perf_counter() - began, 6)
                    await response.write(chunk)
                    passed.chunks.append(chunk)
                await response.write_eof()
        except (asyncio.CancelledError, ConnectionResetError):
            passed.ended = "stopped" if self._is_stopping else "cancelled"
            raise
        except (aiohttp.ClientError, TimeoutError) as error:
            passed.ended = "upstream"
            reason = f"{self._upstream}: {error or type(error).__name__}"
            self._say(f"{request.method} {request.path}: {reason}")
            if (
                response is not None
            ):  # the client sees what the upstream did: an end within the answer
                if request.transport is not None:
                    request.transport.abort()
                return response
            passed.status = 502
            return web.json_response(
                {"error": {"message": f"llmopt record: {reason}", "type": "bad_gateway"}},
                status=502,
            )
        finally:
            passed.seconds = time.perf_counter() - began
            if request.method == "POST":
                self._writer.add(passed)
        return response

    def _sent(self, request: web.Request, body: bytes) -> Any:
        from yarl import URL

        headers = [pair for pair in request.headers.items() if pair[0].lower() not in HOP_BY_HOP]
        return self._session.request(
            request.method,
            URL(self._upstream + request.raw_path, encoded=True),
            headers=headers,
            data=body or None,
            allow_redirects=False,
            skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
        )


def _begun(answer: ClientResponse) -> web.StreamResponse:
    """The response to the client, with the status and headers of the upstream's."""
    from aiohttp import web

    response = web.StreamResponse(status=answer.status, reason=answer.reason)
    for name, value in answer.headers.items():
        if name.lower() not in HOP_BY_HOP:
            response.headers.add(name, value)
    return response


def _probed_socket(address: tuple[Any, ...]) -> socket.socket:
    """A socket whose peer is probed when it is silent."""
    family, kind, protocol, _, _ = address
    made = socket.socket(family, kind, protocol)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_KEEPIDLE"):
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, PROBE_SECONDS)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, PROBE_SECONDS)
    return made


def record(
    upstream: str,
    output: Path,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    salt: str | None = None,
    keep_text: bool = False,
    say: Callable[[str], None],
) -> dict[str, int]:
    """Record what passes to the `upstream` into a trace, until it is interrupted; returns the totals.

    Args:
        salt: of the hashes; None is one that nobody knows. Recorders with the same one name a block alike.
        keep_text: write prompts and answers too.

    Raises:
        BadInput: no HTTP URL, an address or a file that cannot be used, or aiohttp is not installed.
    """
    parts = urlsplit(upstream)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise BadInput(f"--upstream {upstream}: give a URL such as http://localhost:8000")
    try:
        import aiohttp  # noqa: F401
    except ImportError as error:
        raise BadInput(
            "llmopt record needs the package aiohttp: pip install 'llmopt[record]'"
        ) from error
    # The thread that parses must not hold the streams up.
    sys.setswitchinterval(0.0005)
    secret = salt.encode() if salt else secrets.token_bytes(32)
    writer = TraceWriter(output, salt=secret, keep_text=keep_text)
    try:
        asyncio.run(Proxy(upstream, writer, say).serve(host, port))
    finally:
        writer.close()
    return dict(writer.totals)


def totals_lines(totals: Mapping[str, int]) -> Iterator[str]:
    """The summary of a recording, for people."""
    count = Counter(totals)
    yield (
        f"{count['requests']} requests: {count['whole'] - count['refused']} answered, {count['cancelled']} "
        f"cancelled, {count['refused']} refused, {count['upstream']} without an upstream, "
        f"{count['stopped']} in flight at the end"
    )
    share = count["known_blocks"] / max(1, count["blocks"])
    yield (
        f"{count['prompt_tokens']:,} prompt tokens, {share:.0%} of the blocks seen before; "
        f"{count['output_tokens']:,} output tokens; of {count['estimated']} requests estimated"
    )
