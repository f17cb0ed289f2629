"""Sessions of agents as traces: model calls with tool gaps, sub-agents, compaction and shared prefixes.

Read are WEKA's agentic traces, AIPerf's conversation graphs, OpenTelemetry's GenAI spans (OTLP in JSON, or as
the SDK's console exporter writes them), and session files of Claude Code and Codex. Where a file has text, it
becomes block hashes; where it has none, no prefix is assumed. A folder is read as one trace, on one clock.
"""

from __future__ import annotations

import json
import zlib
from collections import defaultdict
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from ...quant.base.errors import BadInput
from .trace_rows import TraceRow, block_hashes, filled_blocks, message_text

TOKEN_BYTES = 4
"""Bytes of a token, where a file has text and no count."""
HIDDEN = b"instructions and tools that are not in the file; "
INTERRUPTED = "[Request interrupted by user"
CALL_SECONDS = 0.001
INHERITS = {"forks": True, "spawns": False}
"""Ways to begin a conversation in AIPerf's graphs: whether with the text so far."""


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a model by an agent.

    Attributes:
        agent: whose calls follow each other.
        spawner: the agent that started this one; empty for a main agent.
        start, end: seconds on the clock of the trace.
        filled: number of `blocks` that the prompt fills.
        is_alone: nothing ties it to the agent's call before, as behind a compaction of the context.
    """

    name: str
    agent: str
    spawner: str
    start: float
    end: float
    prompt_len: int
    output_len: int
    blocks: tuple[int, ...] = ()
    filled: float = 0.0
    block_tokens: int = 0
    is_alone: bool = False
    is_cancelled: bool = False


def read_agents(paths: Sequence[Path]) -> list[TraceRow] | None:
    """The calls in session files, linked; None where a file is of none of the known forms.

    Raises:
        BadInput: a file of a known form that lacks what it should have.
    """
    calls: list[Call] = []
    for path in paths:
        objects = _objects(path.read_text(encoding="utf-8"))
        reader = next((reader for knows, reader in _FORMS if any(map(knows, objects[:50]))), None)
        if reader is None:
            return None
        try:
            calls += reader(objects, path)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            what = f"{type(error).__name__}: {error}"
            raise BadInput(f"trace {path}: {reader.__name__.strip('_')} without {what}") from error
    return linked(calls)


def _objects(text: str) -> list[dict[str, Any]]:
    """The objects of JSON lines, or of one document: an object, or a list of them."""
    try:
        document = json.loads(text)
        found = document if isinstance(document, list) else [document]
    except json.JSONDecodeError:
        found = []
        for line in text.splitlines():
            try:
                found.append(json.loads(line))
            except json.JSONDecodeError:  # an agent that was ended within a line
                continue
    return [entry for entry in found if isinstance(entry, dict)]


def linked(calls: Iterable[Call]) -> list[TraceRow]:
    """Rows of a trace. A call waits for the last that ended before it of: its agent's call before, the call
    of the spawner that started its agent, and agents that its own agent had started and that are done."""
    by_agent: dict[str, list[Call]] = defaultdict(list)
    for call in sorted(calls, key=lambda call: (call.start, call.end)):
        by_agent[call.agent].append(call)
    spawned: dict[str, list[Call]] = defaultdict(list)
    for own in by_agent.values():
        last = max(own, key=lambda call: call.end)
        spawned[last.spawner].append(last)
    rows = []
    for own in by_agent.values():
        for number, call in enumerate(own):
            before = own[number - 1] if number and own[number - 1].end <= call.start else None
            above = [] if before else by_agent.get(call.spawner, [])
            since = before.end if before else call.start
            done = [last for last in spawned.get(call.agent, ()) if last.end > since]
            known = [one for one in (before, *above, *done) if one and one.end <= call.start]
            parent = max(known, key=lambda one: one.end, default=None)
            rows.append(
                TraceRow(
                    call.start,
                    call.prompt_len,
                    call.output_len + call.is_cancelled,
                    call.blocks,
                    call.filled,
                    call.block_tokens,
                    call.name,
                    parent.name if parent else "",
                    before is not None and parent is before and _extends(before, call),
                    call.start - parent.end if parent else 0.0,
                    call.end - call.start if call.is_cancelled else None,
                )
            )
    return rows


def _extends(before: Call, call: Call) -> bool:
    """Whether the prompt begins with the one before; without blocks nobody knows."""
    shared = before.blocks[: int(before.filled)]
    return bool(shared) and not call.is_alone and call.blocks[: len(shared)] == shared


def _seconds(text: Any) -> float:
    return datetime.fromisoformat(str(text).replace("Z", "+00:00")).timestamp()


def _text_blocks(text: bytes) -> dict[str, Any]:
    return {"blocks": block_hashes(text), "filled": filled_blocks(text)}


def _hidden(prompt_len: int, text: bytes) -> bytes:
    """Fill in the text that the prompt had beside `text`: instructions and definitions of tools."""
    size = max(0, prompt_len * TOKEN_BYTES - len(text))
    return (HIDDEN * (size // len(HIDDEN) + 1))[:size]


def _weka(traces: Sequence[dict[str, Any]], path: Path) -> Iterator[Call]:
    """WEKA's kv-cache-tester: a document for each conversation; sub-agents lie nested in it."""
    for trace in traces:
        name, size = str(trace["id"]), int(trace["block_size"])
        is_local = trace.get("hash_id_scope", "local") == "local"
        scope = zlib.crc32(name.encode()) << 32 if is_local else 0
        yield from _weka_calls(trace["requests"], name, "", 0.0, size, scope)


def _weka_calls(
    entries: Sequence[dict[str, Any]], agent: str, spawner: str, since: float, size: int, scope: int
) -> Iterator[Call]:
    for number, entry in enumerate(entries):
        start = since + float(entry["t"])
        if entry["type"] == "subagent":
            inner = entry["requests"]
            # Published traces have times of the whole conversation, raw ones those since the marker.
            is_relative = min((one["t"] for one in inner), default=0) < entry["t"]
            name = f"{agent}/{entry['agent_id']}"
            yield from _weka_calls(inner, name, agent, start if is_relative else since, size, scope)
            continue
        prompt_len = int(entry["in"])
        yield Call(
            f"{agent}#{number}",
            agent,
            spawner,
            start,
            start + float(entry.get("api_time") or 0.0),
            prompt_len,
            int(entry["out"]),
            tuple(scope + int(block) for block in entry.get("hash_ids", ())),
            prompt_len / size,
            size,
        )


def _claude(entries: Sequence[dict[str, Any]], path: Path) -> Iterator[Call]:
    """Claude Code: an entry for each message or part of one, linked by parentUuid."""
    by_id = {entry["uuid"]: entry for entry in entries if "uuid" in entry}
    answers: dict[str, list[dict[str, Any]]] = defaultdict(list)
    interrupted = set()
    for entry in by_id.values():
        message = entry.get("message") or {}
        if entry.get("type") == "assistant" and message.get("usage"):
            answers[str(message.get("id"))].append(entry)
        elif INTERRUPTED in json.dumps(message.get("content")):
            interrupted.add(entry.get("parentUuid"))
    hidden: dict[str, bytes] = {}
    for name, parts in answers.items():
        first, last = parts[0], parts[-1]
        usage = last["message"]["usage"]
        kinds = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
        prompt_len = sum(int(usage.get(kind) or 0) for kind in kinds)
        before = _claude_history(first, by_id)
        if not before or not prompt_len:
            continue
        text = b"".join(_claude_text(entry) for entry in before)
        session = str(first.get("sessionId"))
        is_side = bool(first.get("isSidechain"))
        agent = f"{session}/{first.get('agentId') or before[0]['uuid']}" if is_side else session
        prefix = hidden.setdefault(agent, _hidden(prompt_len, text))
        asked = next((one for one in reversed(before) if one["type"] != "assistant"), before[-1])
        yield Call(
            f"{session}:{name}",
            agent,
            session if is_side else "",
            _seconds(asked["timestamp"]),
            _seconds(last["timestamp"]),
            prompt_len,
            int(usage["output_tokens"]),
            is_cancelled=any(part["uuid"] in interrupted for part in parts),
            **_text_blocks(prefix + text),
        )


def _claude_history(
    entry: Mapping[str, Any], by_id: Mapping[str, dict[str, Any]]
) -> list[dict[str, Any]]:
    """The messages before an answer, back to the session's begin or to a compaction of its context."""
    found = []
    before = by_id.get(str(entry.get("parentUuid")))
    while before is not None and before.get("subtype") != "compact_boundary":
        if before.get("message"):
            found.append(before)
        before = by_id.get(str(before.get("parentUuid")))
    return found[::-1]


def _claude_text(entry: Mapping[str, Any]) -> bytes:
    return message_text(entry["message"].get("content")).encode("utf-8", "replace")


def _codex(entries: Sequence[dict[str, Any]], path: Path) -> Iterator[Call]:
    """Codex: items of the context as they come; a count of tokens ends each call."""
    agent = spawner = ""
    history: list[bytes] = []
    answer: list[bytes] = []
    hidden, asked, totals, is_alone, number = None, 0.0, None, False, 0
    for entry in entries:
        payload = entry.get("payload") or {}
        kind = payload.get("type")
        if entry["type"] == "session_meta":
            source = payload.get("source")
            spawn = source.get("subagent") if isinstance(source, dict) else None
            spawn = spawn.get("thread_spawn") if isinstance(spawn, dict) else None
            agent, spawner = str(payload["id"]), str((spawn or {}).get("parent_thread_id") or "")
        elif entry["type"] == "compacted":
            kept = payload.get("replacement_history") or [payload.get("message", "")]
            history, answer, is_alone = [message_text(kept).encode("utf-8", "replace")], [], True
        elif entry["type"] == "response_item":
            text = message_text(payload).encode("utf-8", "replace")
            if payload.get("role", "assistant") == "assistant" and not str(kind).endswith(
                "_output"
            ):
                answer.append(text)
                continue
            history += [*answer, text]
            answer, asked = [], _seconds(entry["timestamp"])
        elif kind == "token_count" and payload.get("info"):
            info = payload["info"]
            if (
                info["total_token_usage"] == totals
            ):  # a limit of the account was told, and no call ended
                continue
            totals, usage = info["total_token_usage"], info["last_token_usage"]
            text = b"".join(history)
            if hidden is None:
                hidden = _hidden(int(usage["input_tokens"]), text)
            yield Call(
                f"{agent}#{number}",
                agent,
                spawner,
                asked,
                _seconds(entry["timestamp"]),
                int(usage["input_tokens"]),
                int(usage["output_tokens"]),
                is_alone=is_alone,
                **_text_blocks(hidden + text),
            )
            number, is_alone = number + 1, False


def _spans(entries: Sequence[dict[str, Any]], path: Path) -> Iterator[Call]:
    """OpenTelemetry: spans of model calls; an agent is the span that invoked it, else its conversation."""
    spans = {span["id"]: span for span in map(_span, _raw_spans(entries))}
    for span in spans.values():
        said = span["attributes"]
        is_call = said.get("gen_ai.operation.name", "chat") in (
            "chat",
            "text_completion",
            "generate_content",
        )
        if not is_call or "gen_ai.usage.input_tokens" not in said or span["failed"]:
            continue
        agent = _invoking(span, spans)
        above = _invoking(spans[agent], spans) if agent in spans else ""
        texts = [said.get(f"gen_ai.{key}") for key in ("system_instructions", "input.messages")]
        known = [json.loads(text) if isinstance(text, str) else text for text in texts if text]
        text = "".join(map(message_text, known)).encode("utf-8", "replace")
        yield Call(
            span["id"],
            agent,
            above,
            span["start"],
            span["end"],
            int(said["gen_ai.usage.input_tokens"]),
            int(said.get("gen_ai.usage.output_tokens") or 0),
            **(_text_blocks(text) if text else {}),
        )


def _raw_spans(entries: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for entry in entries:
        if "resourceSpans" not in entry:
            yield entry
        for resource in entry.get("resourceSpans", ()):
            for scope in resource.get("scopeSpans", ()):
                yield from scope.get("spans", ())


def _span(raw: Mapping[str, Any]) -> dict[str, Any]:
    """A span in one form, of OTLP's JSON or of the SDK's."""
    attributes, context = raw.get("attributes") or {}, raw.get("context") or {}
    if isinstance(attributes, list):
        attributes = {pair["key"]: next(iter(pair["value"].values()), None) for pair in attributes}
    if "startTimeUnixNano" in raw:
        start, end = (int(raw[f"{edge}TimeUnixNano"]) / 1e9 for edge in ("start", "end"))
    else:
        start, end = _seconds(raw["start_time"]), _seconds(raw["end_time"])
    status = (raw.get("status") or {}).get("code", (raw.get("status") or {}).get("status_code"))
    return {
        "id": str(raw.get("spanId") or context["span_id"]),
        "trace": str(raw.get("traceId") or context["trace_id"]),
        "above": str(raw.get("parentSpanId") or raw.get("parent_id") or ""),
        "start": start,
        "end": end,
        "failed": status in (2, "STATUS_CODE_ERROR", "ERROR"),
        "attributes": attributes,
    }


def _invoking(span: Mapping[str, Any], spans: Mapping[str, dict[str, Any]]) -> str:
    """The agent of a span: the nearest one above that invokes an agent."""
    above = spans.get(span["above"])
    while above is not None:
        if above["attributes"].get("gen_ai.operation.name") == "invoke_agent":
            return above["id"]
        above = spans.get(above["above"])
    return str(span["attributes"].get("gen_ai.conversation.id") or span["trace"])


def _graph(entries: Sequence[dict[str, Any]], path: Path) -> Iterator[Call]:
    """AIPerf's conversations with forks and spawns: authored, so lengths are estimated from their text, and
    times are those of calls that take no time to speak of."""
    sessions = {str(entry["session_id"]): entry["turns"] for entry in entries}
    turns = [turn for each in sessions.values() for turn in each]
    begun = {one for turn in turns for kind in INHERITS for one in _children(turn, kind)}
    for name in sessions.keys() - begun:
        yield from _turns(sessions, name, "", 0.0, b"")


def _turns(
    sessions: Mapping[str, Sequence[dict[str, Any]]],
    name: str,
    spawner: str,
    clock: float,
    text: bytes,
) -> Generator[Call, None, float]:
    """The calls of a conversation and of those that it begins; returns when it ends."""
    for number, turn in enumerate(sessions[name]):
        start = clock + float(turn.get("delay") or 0.0) / 1000
        clock = start + CALL_SECONDS
        said = [turn.get("tools") or "", turn.get("messages", turn.get("text", ""))]
        text += message_text(said).encode("utf-8", "replace")
        yield Call(
            f"{name}#{number}",
            name,
            spawner,
            start,
            clock,
            -(-len(text) // TOKEN_BYTES),
            int(turn.get("max_tokens") or turn.get("output_length") or 0),
            **_text_blocks(text),
        )
        ends = [clock]
        for kind, inherits in INHERITS.items():
            for child in _children(turn, kind):
                end = yield from _turns(sessions, child, name, clock, text if inherits else b"")
                ends += [] if inherits else [end]
        clock = max(ends)  # the next turn waits for what was spawned
    return clock


def _children(turn: Mapping[str, Any], kind: str) -> list[str]:
    given = [one if isinstance(one, dict) else {"child": one} for one in turn.get(kind, ())]
    return [str(child) for one in given for child in one.get("children", [one.get("child")])]


_FORMS = (
    (lambda entry: "block_size" in entry and "requests" in entry, _weka),
    (lambda entry: "resourceSpans" in entry or "span_id" in (entry.get("context") or {}), _spans),
    (lambda entry: entry.get("type") == "session_meta" and "payload" in entry, _codex),
    (lambda entry: "sessionId" in entry and "uuid" in entry, _claude),
    (lambda entry: "session_id" in entry and "turns" in entry, _graph),
)
