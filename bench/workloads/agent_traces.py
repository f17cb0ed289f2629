"""Sessions of agents as traces: model calls with tool gaps, sub-agents, compaction and shared prefixes.

It reads WEKA's agentic traces, whose prompts are block hashes, and AIPerf's conversation graphs, whose text
becomes block hashes. A folder is read as one trace, on one clock.
"""

from __future__ import annotations

import json
import zlib
from collections import defaultdict
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...base.errors import BadInput
from .trace_rows import BLOCK_BYTES, TraceRow, block_hashes, message_text

TOKEN_BYTES = 4
"""Bytes of a token, where a file has text and no count."""
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


def read_agents(paths: Sequence[Path]) -> list[TraceRow] | None:
    """The calls in session files, linked; None where a file is of none of the known forms.

    Raises:
        BadInput: a file of a known form that lacks what it should have.
    """
    calls: list[Call] = []
    for path in paths:
        objects = _objects(path)
        reader = next((reader for knows, reader in _FORMS if any(map(knows, objects[:50]))), None)
        if reader is None:
            return None
        try:
            calls += reader(objects, path)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            what = f"{type(error).__name__}: {error}"
            raise BadInput(f"trace {path}: {reader.__name__.strip('_')} without {what}") from error
    return linked(calls)


def _objects(path: Path) -> list[dict[str, Any]]:
    """The objects of JSON lines, or of one document: an object, or a list of them.

    Raises:
        BadInput: a line that is not JSON, after one that is.
    """
    text = path.read_text(encoding="utf-8")
    try:
        document = json.loads(text)
        found = document if isinstance(document, list) else [document]
    except json.JSONDecodeError:
        found = []
        for number, line in enumerate(text.splitlines(), start=1):
            try:
                found += [json.loads(line)] if line.strip() else []
            except json.JSONDecodeError as error:
                if not found:  # no JSON at all
                    return []
                raise BadInput(f"trace {path}, line {number}: not JSON ({error.msg})") from error
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
                    call.output_len,
                    call.blocks,
                    call.filled,
                    call.block_tokens,
                    call.name,
                    parent.name if parent else "",
                    before is not None and parent is before and _extends(before, call),
                    call.start - parent.end if parent else 0.0,
                )
            )
    return rows


def _extends(before: Call, call: Call) -> bool:
    """Whether the prompt begins with the one before; without blocks nobody knows."""
    shared = before.blocks[: int(before.filled)]
    return bool(shared) and call.blocks[: len(shared)] == shared


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
            block_hashes(text),
            len(text) / BLOCK_BYTES,
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
    (lambda entry: "session_id" in entry and "turns" in entry, _graph),
)
