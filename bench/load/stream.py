"""Parsing of responses: server-sent events become timed chunks of tokens after the pass has ended.

Servers and gateways fill the same fields differently, so a field counts only as far as the rest of the stream
bears it out: a usage in each chunk may be a running count, the chunk's own tokens, or zero until the end.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from .exchange import Answer

PER_CHUNK = "server, per chunk"
AT_END = "server, at the end"
PER_EVENT = "re-tokenized"
# Exceptions that reading a document of another form raises.
UNREADABLE = (ValueError, LookupError, TypeError, AttributeError)
STOPS = ("eos", "eos_token", "stop_sequence")
"""Together's and TGI's names of `stop`."""
# Least share of the longest prompt that a server must count: tokenizers and templates differ by less. Ollama
# cuts prompts to its context without an error (https://github.com/ollama/ollama/issues/3839).
SHARE_READ = 0.75
FINISHED = ("stop", "length", "tool_calls", "function_call", "content_filter", *STOPS)
"""Finish reasons of OpenAI's API. Engines report a dropped request by another one ("abort", "error")."""
NO_EVENT = (b"", b"null")
"""Data of events that keep a connection open."""
CUMULATIVE_CHUNKS = 4
"""Number of chunks from which a text that each chunk repeats and extends is no chance."""

# Fields that the parser reads, and fields that hold no output; other filled fields are counted as unread.
EVENT_FIELDS, CHOICE_FIELDS, DELTA_FIELDS = (
    frozenset(names.split())
    for names in (
        "choices usage model error type llmopt_times id object created system_fingerprint service_tier "
        "provider timings prompt_filter_results prompt_token_ids kv_transfer_params obfuscation nvext "
        "sla_metrics x_groq citations search_results metadata request_id",
        "delta message text finish_reason error index logprobs stop_reason matched_stop native_finish_reason "
        "token_ids prompt_token_ids prompt_logprobs hidden_states content_filter_results seed "
        "provider_specific_fields",
        "content reasoning_content reasoning reasoning_details tool_calls function_call refusal role name "
        "annotations provider_specific_fields audio thinking_blocks",
    )
)


def events(chunks: Iterable[tuple[float, bytes]]) -> Iterator[tuple[float, bytes, bytes]]:
    """(time, data, name) of each server-sent event; an event that spans reads has the time of its last read.
    Line ends may be LF, CRLF or CR; comments and other fields are skipped; a last event without its blank
    line still counts. llama.cpp's `error:` field is an event of that name."""
    rest, lines, name, time = b"", [], b"", 0.0
    for time, data in chunks:
        buffer = rest + data
        # A CR at the end may be half of a CRLF: keep it for the next read.
        half = b"\r" if buffer.endswith(b"\r") else b""
        buffer = buffer.removesuffix(half)
        if b"\r" in buffer:
            buffer = buffer.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        *whole, rest = buffer.split(b"\n")
        rest += half
        for line in whole:
            if line:
                name = _read_line(line, lines, name)
                continue
            if lines:
                yield time, b"\n".join(lines), name
            lines, name = [], b""
    name = _read_line(rest.strip(), lines, name)
    if lines:
        yield time, b"\n".join(lines), name


def _read_line(line: bytes, lines: list[bytes], name: bytes) -> bytes:
    """Add a line's data to `lines`; returns the event's name so far."""
    field, _, value = line.partition(b":")
    value = value.removeprefix(b" ")
    if field in (b"data", b"error"):
        lines.append(value)
    if field == b"event":
        return value.strip()
    return field if field == b"error" else name


@dataclass(slots=True)
class Chunk:
    """An event with a choice: its usage's `count`, if it `ends` the answer, and `is_delta` (a chat's)."""

    time: float
    reasoning: str
    content: str
    count: int | None
    is_delta: bool
    ends: bool

    @property
    def text(self) -> str:
        return self.reasoning + self.content


def read_stream(chunks: Iterable[tuple[float, bytes]]) -> Answer:
    """Parse a streamed response of `/v1/completions` or `/v1/chat/completions`."""
    answer = Answer()
    seen: list[Chunk] = []
    ends: dict[int, bool] = {}  # by the index of the choice
    totals: list[int] = []
    is_done = False
    for time, data, name in events(chunks):
        if data.strip() == b"[DONE]":
            is_done = True
            continue
        if data.strip() in NO_EVENT:
            continue
        try:
            event = _parsed(data, name)
            count = _read_usage(event, answer)
            answer.model = answer.model or str(event.get("model") or "")
            if count and not event.get("choices"):
                totals.append(count)
            for choice in event.get("choices") or ():
                chunk = _delivered(choice, time, count, answer)
                index = choice.get("index") or 0
                has_ended = ends.get(index, False)
                ends[index] = has_ended or chunk.ends
                part = choice.get("delta") or choice.get("message") or {}
                is_empty = chunk.is_delta and not chunk.text and not chunk.ends
                if is_empty and (not part or "role" in part):
                    continue  # a chat's chunk that only names the role
                # LiteLLM sends the usage in a choice of its own, after the finish reason.
                if chunk.text or not has_ended:
                    seen.append(chunk)
                    if written := event.get("llmopt_times"):
                        if not answer.server_times:
                            answer.server_times.append(written["received"])
                        answer.server_times.append(written["sent"])
        except BrokenEvent as broken:
            answer.error = str(broken)
            break
        except UNREADABLE:
            answer.error = f"an event has no choice that can be read: {_excerpt(data)}"
            break
    if not answer.error and not is_done and not (ends and all(ends.values())):
        answer.error = "the stream ended without a finish_reason or [DONE]"
    if len(totals) == len(ends) > 1:  # llama.cpp counts the tokens of each choice
        answer.total = sum(totals)
    if not answer.error and _is_cumulative(seen):
        answer.error = "each chunk repeats the text of the chunks before it"
    _set_chunks(seen, answer)
    return answer


def read_document(chunks: Sequence[tuple[float, bytes]]) -> Answer:
    """Parse a response that is not streamed: one JSON document, all tokens timed at its end."""
    body, answer = b"".join(data for _, data in chunks), Answer()
    try:
        document = _checked(json.loads(body), body)
        count = _read_usage(document, answer)
        answer.model = str(document.get("model") or "")
        chunk = _delivered(document["choices"][0], chunks[-1][0], count, answer)
    except BrokenEvent as broken:
        answer.error = str(broken)
    except UNREADABLE:
        answer.error = f"the answer is neither a stream nor a completion: {_excerpt(body)}"
    else:
        _set_chunks([chunk], answer)
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
    body = b"".join(data for _, data in chunks)
    try:
        message = _message(json.loads(body))
    except ValueError:
        message = _excerpt(body)
    return f"HTTP {status}: {message}" if message else f"HTTP {status}"


def chunk_tokens(answer: Answer, recount: int | None) -> tuple[list[int], str]:
    """(tokens of each chunk, source): by chunk usage, else the total or `recount`, spread by text length."""
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


class BrokenEvent(Exception):
    """An event that fails its request; the message says why."""


def _parsed(data: bytes, name: bytes) -> dict[str, Any]:
    """The event of `data`. BrokenEvent: no JSON object, an error, or neither chunk nor usage."""
    try:
        event = json.loads(data)
    except ValueError:
        if name != b"error":
            raise BrokenEvent(f"an event is not JSON: {_excerpt(data)}") from None
        event = data.decode("utf-8", "replace")
    return _checked(event, data, name)


def _checked(event: Any, data: bytes, name: bytes = b"") -> dict[str, Any]:
    """`event`, unless it is broken (`BrokenEvent`)."""
    is_object = isinstance(event, dict)
    kinds = (event.get("object"), event.get("type")) if is_object else ()
    if name == b"error" or "error" in kinds or (is_object and event.get("error")):
        raise BrokenEvent(f"the server says: {_message(event)}")
    if not is_object:
        raise BrokenEvent(f"an event is no object: {_excerpt(data)}")
    choices = event.get("choices")
    is_empty = choices is None and not isinstance(event.get("usage"), dict)
    if is_empty and "ping" not in kinds:
        raise BrokenEvent(f"an event is neither a chunk nor a usage: {_excerpt(data)}")
    if choices is not None and not isinstance(choices, list):
        raise BrokenEvent(f"an event has no choice that can be read: {_excerpt(data)}")
    return event


def _delivered(choice: dict[str, Any], time: float, count: int | None, answer: Answer) -> Chunk:
    """The chunk of a choice. BrokenEvent: it has an error, or ended for no usual reason."""
    reason = choice.get("finish_reason")
    if error := choice.get("error"):
        raise BrokenEvent(f"the server says: {_message({'error': error})}")
    if reason and reason not in FINISHED:
        raise BrokenEvent(f"the answer ended with finish_reason {reason!r}")
    part = choice.get("delta") or choice.get("message") or {}
    is_delta = "delta" in choice or "message" in choice
    reasoning, content = _texts(part) if is_delta else ("", choice.get("text") or "")
    answer.unread.update(_unread("choices[].", choice, CHOICE_FIELDS))
    answer.unread.update(_unread("choices[].delta.", part, DELTA_FIELDS))
    return Chunk(time, reasoning, content, count, is_delta, bool(reason))


def _texts(part: Mapping[str, Any]) -> tuple[str, str]:
    """(reasoning, content) of a delta or message; calls of tools are content, a summary is no reasoning."""
    content = part.get("content")
    reasoning = part.get("reasoning_content") or part.get("reasoning")  # some servers send both
    details = part.get("reasoning_details") or ()
    if details and all(detail.get("type") == "reasoning.summary" for detail in details):
        reasoning = ""  # OpenRouter's: the tokens of the reasoning itself stay hidden
    if isinstance(content, list):  # parts, as Mistral's API streams them
        thinking = [p.get("thinking") for p in content if p.get("type") == "thinking"]
        reasoning = reasoning or "".join(map(_text_of_parts, thinking))
        content = _text_of_parts([p for p in content if p.get("type") != "thinking"])
    text = (content or "") + (part.get("refusal") or "")
    for field in ("tool_calls", "function_call"):
        if part.get(field):
            text += json.dumps(part[field])
    return reasoning or "", text


def _text_of_parts(parts: Any) -> str:
    return parts if isinstance(parts, str) else "".join(p.get("text") or "" for p in parts or ())


def _is_cumulative(chunks: Sequence[Chunk]) -> bool:
    """Each chunk holds the whole text so far, as in some streams of DashScope."""
    for texts in ([chunk.content for chunk in chunks], [chunk.reasoning for chunk in chunks]):
        pairs = list(pairwise(filter(None, texts)))
        grows = all(len(a) < len(b) and b.startswith(a) for a, b in pairs)
        if len(pairs) + 1 >= CUMULATIVE_CHUNKS and grows:
            return True
    return False


def _unread(prefix: str, fields: Mapping[str, Any], known: frozenset[str]) -> list[str]:
    return [prefix + name for name, value in fields.items() if value and name not in known]


def _read_usage(event: dict[str, Any], answer: Answer) -> int | None:
    """Record the usage of an event; returns its count of output tokens, or None."""
    answer.unread.update(_unread("", event, EVENT_FIELDS))
    usage = event.get("usage")
    if not isinstance(usage, dict):
        return None
    answer.prompt_tokens = usage.get("prompt_tokens") or answer.prompt_tokens
    details = usage.get("prompt_tokens_details")
    if isinstance(details, dict):
        answer.cached_tokens = details.get("cached_tokens", answer.cached_tokens)
    count = usage.get("completion_tokens")
    if not isinstance(count, int):
        return None
    # A gateway may close with a usage of zeros: keep the last count of tokens.
    answer.total = count or answer.total
    answer.hidden_tokens = _reasoning_tokens(usage, count)
    return count


def _reasoning_tokens(usage: Mapping[str, Any], count: int) -> int:
    details = usage.get("completion_tokens_details")
    tokens = details.get("reasoning_tokens") if isinstance(details, dict) else None
    if not isinstance(tokens, int) or tokens > count:
        return 0
    # xAI's API counts reasoning outside of completion_tokens; the sum tells.
    is_apart = usage.get("total_tokens") == (usage.get("prompt_tokens") or 0) + count + tokens
    return 0 if is_apart else tokens


def _set_chunks(chunks: Sequence[Chunk], answer: Answer) -> None:
    """Decide which chunks carried tokens, and how many where the server says so."""
    answer.content = "".join(chunk.content for chunk in chunks)
    if any(chunk.reasoning for chunk in chunks):
        answer.hidden_tokens = 0  # the reasoning is part of the stream
    counts = _counts(chunks, answer)
    if answer.total is not None and answer.hidden_tokens:
        visible = max(0, answer.total - answer.hidden_tokens)
        answer.total = None if answer.content and not visible else visible
    if counts is None:
        delivers = _delivering(chunks, answer.total)
    else:
        delivers = [count > 0 for count in counts]
        answer.tokens = [count for count in counts if count > 0]
        # A running count has the hidden reasoning in the first visible chunk.
        answer.tokens[0] = max(1, answer.tokens[0] - answer.hidden_tokens)
    for chunk, is_delivery in zip(chunks, delivers, strict=True):
        if is_delivery:
            answer.times.append(chunk.time)
            answer.texts.append(chunk.text)
        elif answer.texts:
            answer.texts[-1] += chunk.text


def _counts(chunks: Sequence[Chunk], answer: Answer) -> list[int] | None:
    """Tokens of each chunk by the usage in it; None where that usage does not count chunks."""
    counts: list[int] = []
    for chunk in chunks:
        is_end = chunk.ends and not chunk.text and counts
        count = counts[-1] if is_end and chunk.count is None else chunk.count
        counts += [] if count is None else [count]
    texts = [chunk for chunk in chunks if chunk.text]
    if not texts or len(counts) < len(chunks) or not all(chunk.count for chunk in texts):
        return None
    total = answer.total or 0
    steps = [after - before for before, after in pairwise([0, *counts])]
    rises = sum(step > 0 for step in steps)
    if min(steps) >= 0 and counts[-1] == total and 2 * rises > len(texts):
        # A running count: it rises with the chunks and ends at the total. The empty deltas that open a chat
        # are no tokens, so the first text has their counts.
        first = _first(chunks)
        return [0] * first + [sum(steps[: first + 1]), *steps[first + 1 :]]
    own = [0 if chunk.ends and not chunk.text else chunk.count or 0 for chunk in chunks]
    if len(texts) > 1 and (sum(own) == total or max(total, *counts) < len(texts)):
        answer.total = sum(own)
        return own  # of each chunk alone: they add up to the total, or no total was sent
    return None


def _first(chunks: Sequence[Chunk]) -> int:
    """Index of the first chunk that may be a token: a chat's first text, 0 for a completion."""
    return next((i for i, chunk in enumerate(chunks) if chunk.text or not chunk.is_delta), 0)


def _delivering(chunks: Sequence[Chunk], total: int | None) -> list[bool]:
    """Chunks with text; also others, if `total` has one token for each chunk, or none has text."""
    first = _first(chunks)
    begun = [number >= first for number in range(len(chunks))]
    unended = [
        is_begun and bool(chunk.text or not chunk.ends)
        for is_begun, chunk in zip(begun, chunks, strict=True)
    ]
    texts = [bool(chunk.text) for chunk in chunks]
    for delivers in (begun, unended):
        if total == sum(delivers):
            return delivers
    return texts if any(texts) else [number < (total or 0) for number in range(len(chunks))]


def _message(event: Any) -> str:
    error = event.get("error", event) if isinstance(event, dict) else event
    if isinstance(error, dict):
        error = error.get("message") or error.get("detail") or error
    return str(error)[:300]


def _excerpt(data: bytes) -> str:
    return data[:120].decode("utf-8", "replace")
