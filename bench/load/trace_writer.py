"""Trace of requests that passed a proxy: salted block hashes, token counts, parents, cancellation, no text.

A request is parsed behind its end, in a thread. A line is one write, so that a process that is killed loses
the requests in flight and nothing else.
"""

from __future__ import annotations

import json
import os
import queue
import secrets
import threading
import time
import zlib
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

from ...quant.base.errors import BadInput
from ..workloads.trace_rows import (
    BLOCK_BYTES,
    BLOCK_IDS,
    RECORDING,
    block_hashes,
    filled_blocks,
    message_text,
)
from .stream import events

SESSION_HEADERS = ("session_id", "session-id", "x-session-id", "x-claude-code-session-id")
SESSION_FIELDS = ("prompt_cache_key", "conversation", "conversation_id", "session_id", "user")
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
        except ValueError:
            return None
        if not isinstance(body, dict) or (prompt := prompt_of(body)) is None:
            return None
        answer = _decoded(b"".join(passed.chunks), passed.encoding)
        counts, num_events = usage_of(answer)
        is_text = isinstance(prompt, bytes)
        filled = filled_blocks(prompt)
        estimate = -(-len(prompt) // TOKEN_BYTES) if is_text else len(prompt)
        streamed = bool(body.get("stream", "/api/" in passed.path))
        output = num_events if streamed else -(-len(answer) // TOKEN_BYTES)
        blocks = block_hashes(prompt, self._salt)
        session = self._session(passed, body)
        name = f"{self._prefix}-{self.totals['requests']}"
        parent = self._lineage.parent(blocks, session, passed.arrival)
        ended = passed.arrival + passed.seconds
        last = blocks[int(filled) - 1] if filled >= 1 else None
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
            "filled": round(filled, 3),
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
