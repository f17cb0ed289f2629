"""Messages between the fleet and its load workers, as picklable values, and the parsing of responses.

Streamed completions (SSE) become timed token chunks after the pass has ended.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

MARK = b"\0"
"""In an encoded body, where the first token (or its text) of a cycle goes. JSON has no such byte."""
PER_CHUNK = "server, per chunk"
AT_END = "server, at the end"
PER_EVENT = "re-tokenized"
# What reading a document of another form raises.
UNREADABLE = (ValueError, LookupError, TypeError, AttributeError)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The server that requests are sent to.

    Attributes:
        host, port: to connect to.
        is_tls: whether to use TLS; `verify_tls`: whether certificates are verified.
        head: the request line and every header but the length, ready to send.
        timeout: seconds for one request from sending to the end of its response.
        is_pooled: responses hold embeddings or scores, not tokens.
    """

    host: str
    port: int
    head: bytes
    is_tls: bool = False
    verify_tls: bool = True
    timeout: float = 600.0
    is_pooled: bool = False


def encoded_message(role: str, content: str) -> bytes:
    """A chat message as JSON."""
    return json.dumps({"role": role, "content": content}, separators=(",", ":")).encode()


def turn_due(think: float, since: float | None, opened: float, ended: float) -> float:
    """When a turn is due: `think` seconds after the answer before `ended`; with `since`, so long after the
    conversation `opened`, or when that answer has ended if it is later."""
    return ended + think if since is None else max(ended, opened + since)


@dataclass(frozen=True, slots=True)
class EncodedTurn:
    """A later turn of a conversation: the body around its messages, and what it appends to them.

    Attributes:
        messages: the new messages as JSON objects, comma-separated.
        think, since: when this turn is due, as `turn_due` takes them.
        answer: the data set's answer to the turn before as a JSON object; None sends back the server's own.
    """

    head: bytes
    messages: bytes
    tail: bytes
    think: float = 0.0
    since: float | None = None
    answer: bytes | None = None


@dataclass(frozen=True, slots=True)
class EncodedRequest:
    """One request or conversation, encoded before the clock starts, due seconds after the origin.

    `body` is that of the first turn, and `messages` are its messages where `turns` follow. The client
    leaves the last turn `cancel` seconds after sending it. `waiting` are (turn, request) of those that begin
    when that turn has ended; their `due` counts from there.
    """

    request_id: str
    body: bytes
    due: float = 0.0
    messages: bytes = b""
    turns: tuple[EncodedTurn, ...] = ()
    cancel: float | None = None
    waiting: tuple[tuple[int, EncodedRequest], ...] = ()

    @property
    def num_requests(self) -> int:
        """Requests of all turns, and of those that wait for them."""
        return 1 + len(self.turns) + sum(each.num_requests for _, each in self.waiting)


@dataclass(frozen=True, slots=True)
class PassWindow:
    """A pass of fixed duration: its seconds, and those from one cycle over the requests to the next."""

    seconds: float
    period: float


@dataclass(frozen=True, slots=True)
class WorkerJob:
    """One pass of one worker.

    Attributes:
        limit: maximum requests in flight over all workers; None is no limit.
        places: (read, write) file descriptors of the permit pipe, which holds a byte per free concurrency
            permit; None without a limit.
        marks: what replaces `MARK` in the bodies of each cycle.
        window: repeat the requests until it closes, and drain what is in flight then; None is one cycle.
        burden: seconds of every 50 ms in which the worker busy-waits, to test that a starved client is
            detected.
    """

    endpoint: Endpoint
    requests: tuple[EncodedRequest, ...]
    limit: int | None
    burden: float = 0.0
    permits: tuple[int, int] | None = None
    marks: tuple[bytes, ...] = (b"",)
    window: PassWindow | None = None


@dataclass(slots=True)
class Answer:
    """One parsed response.

    Attributes:
        times: when each chunk was read, by `time.perf_counter()`.
        texts: the text of each chunk; empty where a token gave no text yet.
        tokens: tokens of each chunk where the server reports usage per chunk, else empty.
        total: output tokens by the usage of the last chunk, or None.
        prompt_tokens, cached_tokens: prompt tokens, and those of them from the prefix cache, by the
            server's usage, or None.
        server_times: when the server had read the request, then when it wrote each chunk; only from the
            known-latency server (`known_server`).
        model: the name that the server signs with.
        num_results: embeddings or scores of a pooling response.
        error: why the response is invalid; empty if it is valid.
    """

    times: list[float] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    total: int | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    server_times: list[float] = field(default_factory=list)
    model: str = ""
    num_results: int = 0
    error: str = ""

    @property
    def text(self) -> str:
        return "".join(self.texts)


@dataclass(slots=True)
class Exchange:
    """One request and its response. Times are `time.perf_counter()`, one clock for all processes.

    Attributes:
        request_id: of the encoded request, the same for all its turns and cycles.
        due: seconds from the origin.
        cancelled: the client left before the end, as it was told.
    """

    request_id: str
    sent: float
    ended: float
    answer: Answer = field(default_factory=Answer)
    due: float = 0.0
    turn: int = 0
    cycle: int = 0
    cancelled: bool = False


@dataclass(slots=True)
class Report:
    """A worker's results at the end of a pass.

    Attributes:
        lag_ms: event-loop lag (wake-up after the requested time), sampled through the pass: mean, p99, max.
        late_connections: connections opened after the clock had started.
    """

    exchanges: list[Exchange]
    lag_ms: Mapping[str, float]
    late_connections: int = 0


def events(chunks: Iterable[tuple[float, bytes]]) -> Iterator[tuple[float, bytes]]:
    """(time, data) of each server-sent event; an event that spans reads has the time of its last read.

    Line ends may be LF, CRLF or CR; comments and other fields are skipped; a last event
    without its blank line still counts.
    """
    rest, lines, time = b"", [], 0.0
    for time, data in chunks:
        buffer = rest + data
        # A CR at the end may be half of a CRLF: keep it for the next read.
        held = b"\r" if buffer.endswith(b"\r") else b""
        *whole, rest = _unix(buffer[: len(buffer) - len(held)]).split(b"\n")
        rest += held
        for line in whole:
            if line.startswith(b"data:"):
                lines.append(line[5:].removeprefix(b" "))
            elif not line and lines:
                yield time, b"\n".join(lines)
                lines = []
    if rest.startswith(b"data:"):
        lines.append(rest[5:].strip())
    if lines:
        yield time, b"\n".join(lines)


def _unix(data: bytes) -> bytes:
    return data.replace(b"\r\n", b"\n").replace(b"\r", b"\n") if b"\r" in data else data


def read_stream(chunks: Iterable[tuple[float, bytes]]) -> Answer:
    """Parse a streamed response of `/v1/completions` or `/v1/chat/completions`.

    A chunk with text carries tokens. A chunk without text does where the server's count says so: by the
    usage in the chunk, or by a final total that exceeds the chunks with text. A chat's first chunk, which
    only names the role, never does.
    """
    answer = Answer()
    seen: list[tuple[float, str, int | None]] = []
    ended = False
    for time, data in events(chunks):
        if data.strip() == b"[DONE]":
            ended = True
            continue
        try:
            event = json.loads(data)
        except ValueError:
            answer.error = f"an event is not JSON: {_excerpt(data)}"
            break
        if not isinstance(event, dict):
            answer.error = f"an event is no object: {_excerpt(data)}"
            break
        if event.get("error"):
            answer.error = f"the server says: {_message(event)}"
            break
        count = _usage(event, answer)
        answer.model = answer.model or str(event.get("model") or "")
        choices = event.get("choices")
        if not choices:
            continue
        try:
            text, is_role_only = _delivered(choices[0])
            ended = ended or choices[0].get("finish_reason") is not None
        except (AttributeError, TypeError, KeyError):
            answer.error = f"an event has no choice that can be read: {_excerpt(data)}"
            break
        if not is_role_only:
            seen.append((time, text, count))
            _server_times(event, answer)
    if not answer.error and not ended:
        answer.error = "the stream ended without a finish_reason or [DONE]"
    _count(seen, answer)
    return answer


def read_document(chunks: Sequence[tuple[float, bytes]]) -> Answer:
    """Parse a response that is not streamed: one JSON document, all tokens timed at its end."""
    body, answer = b"".join(data for _, data in chunks), Answer()
    try:
        document = json.loads(body)
        text = _delivered(document["choices"][0])[0]
    except UNREADABLE:
        answer.error = f"the answer is neither a stream nor a completion: {_excerpt(body)}"
        return answer
    count = _usage(document, answer)
    answer.times, answer.texts = [chunks[-1][0]], [text]
    answer.tokens = [count] if count else []
    return answer


def read_pooled(chunks: Sequence[tuple[float, bytes]]) -> Answer:
    """Parse a response with embeddings, scores or pooled states; it has no tokens."""
    body, answer = b"".join(data for _, data in chunks), Answer()
    try:
        document = json.loads(body)
        results = document["results"] if "results" in document else document["data"]
        answer.num_results = len(results)
        usage = document.get("usage") or {}
    except UNREADABLE:
        answer.error = f"the answer has neither data nor results: {_excerpt(body)}"
        return answer
    answer.prompt_tokens = usage.get("prompt_tokens") or usage.get("total_tokens")
    answer.times, answer.texts, answer.tokens = [chunks[-1][0]], [""], [0]
    return answer


def refusal(status: int, chunks: Sequence[tuple[float, bytes]]) -> str:
    """The error message of a response with an error status."""
    body = b"".join(data for _, data in chunks)
    try:
        said = _message(json.loads(body))
    except ValueError:
        said = _excerpt(body)
    return f"HTTP {status}: {said}" if said else f"HTTP {status}"


def chunk_tokens(answer: Answer, recount: int | None) -> tuple[list[int], str]:
    """(tokens of each chunk, source of the counts).

    Without per-chunk usage, the server's total, or else `recount` (the text tokenized again), is
    distributed: one token per chunk, the remainder by text length.
    """
    if answer.tokens:
        return answer.tokens, PER_CHUNK
    total, source = (answer.total, AT_END) if answer.total is not None else (recount, PER_EVENT)
    deliveries = len(answer.times)
    if total is None or not deliveries:
        return [1] * deliveries, source
    if total <= deliveries:
        return [1] * total + [0] * (deliveries - total), source
    weights = [len(text) for text in answer.texts]
    if not any(weights):
        weights = [1] * deliveries
    left, whole = total - deliveries, sum(weights)
    shares = [left * weight / whole for weight in weights]
    counts = [1 + int(share) for share in shares]
    by_rest = sorted(range(deliveries), key=lambda i: int(shares[i]) - shares[i])
    for i in by_rest[: total - sum(counts)]:
        counts[i] += 1
    return counts, source


def _delivered(choice: dict[str, Any]) -> tuple[str, bool]:
    """(text of a choice, whether it only names the role)."""
    part = choice.get("delta") or choice.get("message")
    if part is None:
        if "delta" in choice:
            return "", choice.get("finish_reason") is None
        return choice.get("text") or "", False
    # Reasoning tokens are output tokens too.
    fields = ("reasoning_content", "reasoning", "content")
    text = "".join(part[name] for name in fields if isinstance(part.get(name), str))
    if part.get("tool_calls"):
        text += json.dumps(part["tool_calls"])
    return text, not text and "role" in part and choice.get("finish_reason") is None


def _usage(event: dict[str, Any], answer: Answer) -> int | None:
    """Record the usage of an event; returns its running count of output tokens, or None."""
    usage = event.get("usage")
    if not isinstance(usage, dict):
        return None
    answer.prompt_tokens = usage.get("prompt_tokens") or answer.prompt_tokens
    details = usage.get("prompt_tokens_details")
    if isinstance(details, dict):
        answer.cached_tokens = details.get("cached_tokens", answer.cached_tokens)
    count = usage.get("completion_tokens")
    if isinstance(count, int):
        answer.total = max(count, answer.total or 0)
        return count
    return None


def _server_times(event: dict[str, Any], answer: Answer) -> None:
    if times := event.get("llmopt_times"):
        if not answer.server_times:
            answer.server_times.append(times["received"])
        answer.server_times.append(times["sent"])


def _count(seen: Sequence[tuple[float, str, int | None]], answer: Answer) -> None:
    """Decide which chunks carried tokens, and how many where that is known."""
    # Continuous usage: every chunk has a count, and the counts are not all equal.
    if seen and all(count is not None for _, _, count in seen):
        before = 0
        for time, text, count in seen:
            new, before = (count or 0) - before, max(count or 0, before)
            if new > 0:
                answer.times.append(time)
                answer.texts.append(text)
                answer.tokens.append(new)
            elif answer.texts:
                answer.texts[-1] += text
        return
    missing = (answer.total or 0) - sum(bool(text) for _, text, _ in seen)
    for time, text, _ in seen:
        if not text:
            missing -= 1
            if missing < 0:
                continue
        answer.times.append(time)
        answer.texts.append(text)


def _message(event: Any) -> str:
    error = event.get("error", event) if isinstance(event, dict) else event
    if isinstance(error, dict):
        error = error.get("message") or error.get("detail") or error
    return str(error)[:300]


def _excerpt(data: bytes) -> str:
    return data[:120].decode("utf-8", "replace")
