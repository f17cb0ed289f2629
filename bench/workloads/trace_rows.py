"""Readers of trace files: recorded requests of one form, known by the content of the file.

- Azure's LLM inference traces (CSV: TIMESTAMP, ContextTokens, GeneratedTokens)
- BurstGPT (CSV: Timestamp in seconds, Request tokens, Response tokens)
- Mooncake (JSON lines: timestamp in milliseconds, input_length, output_length, and hash_ids that name the
  prompt's blocks of 512 tokens; equal ids are equal text with equal text before it), Alibaba's Bailian
- agents' sessions with tool gaps, sub-agents, compaction and shared prefixes: WEKA's traces, whose prompts
  are block hashes, and AIPerf's conversation graphs, whose text becomes block hashes. A folder is one trace.
"""

from __future__ import annotations

import csv
import json
import zlib
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from hashlib import blake2b
from pathlib import Path
from typing import Any

from ...base.errors import BadInput
from ...base.json_lines import json_objects

MOONCAKE_TOKENS = 512  # of a block that one hash stands for
BLOCK_BYTES = 64
"""Size of a block of a prompt's text in UTF-8: about what a server caches."""
DIGEST_BYTES = 6  # ids below 2^48 are exact in every reader of JSON
_SESSION_BLOCK = 1 << 64  # of the text that a row of a session appends: above every hash
AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
BURSTGPT = ("Timestamp", "Request tokens", "Response tokens")


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One recorded request.

    Attributes:
        seconds: arrival time on the trace's own clock.
        blocks: ids of the prompt's blocks; equal ids are equal text with equal text before it.
        filled: number of blocks that the prompt fills; the last one is rarely full.
        block_tokens: tokens of a block; 0 where the prompt's tokens are spread over its blocks evenly.
        parent: name of the request that had ended before this one was made; empty if unknown.
        extends: True if the prompt is the parent's, its answer, and more.
        gap: seconds from the parent's end to this request: a tool's time, or a person's.
    """

    seconds: float
    prompt_len: int
    output_len: int
    blocks: tuple[int, ...] = ()
    filled: float = 0.0
    block_tokens: int = 0
    name: str = ""
    parent: str = ""
    extends: bool = False
    gap: float = 0.0


def block_hashes(text: bytes) -> tuple[int, ...]:
    """Hash the whole blocks of a prompt's UTF-8 text, and the rest, each with the blocks before it."""
    hashes, digest = [], b""
    for start in range(0, len(text), BLOCK_BYTES):
        block = digest + text[start : start + BLOCK_BYTES]
        digest = blake2b(block, digest_size=DIGEST_BYTES).digest()
        hashes.append(int.from_bytes(digest, "little"))
    return tuple(hashes)


def message_text(part: Any) -> str:
    """Messages as text, whatever form content has, without cache breakpoints, which clients move."""
    if isinstance(part, str):
        return part
    if isinstance(part, list):
        return "".join(map(message_text, part))
    if not isinstance(part, dict):
        return json.dumps(part)
    kept = {key: value for key, value in part.items() if key not in ("cache_control", "id")}
    if kept.get("type") in ("text", "input_text", "output_text"):
        return str(kept.get("text", kept.get("content")))
    content = kept.pop("content", None)
    inner = "" if content is None else message_text(content)
    return json.dumps(kept, ensure_ascii=False, sort_keys=True) + inner + "\n"


def table_rows(kind: str, lines: Any, path: Path) -> Iterator[TraceRow] | None:
    """Requests of a trace in lines, None for other forms. BadInput: a malformed line, by number."""
    columns = {"azure": AZURE, "burstgpt": BURSTGPT}
    if kind not in (*columns, "mooncake"):
        first = next((line for line in lines if line.strip()), "")
        lines.seek(0)
        try:
            head = json.loads(first)
            kind = "mooncake" if isinstance(head, dict) and "input_length" in head else ""
        except json.JSONDecodeError:
            names = set(next(csv.reader([first]), ()))
            kind = next((kind for kind, wanted in columns.items() if names >= set(wanted)), "")
    if kind == "mooncake":
        return _mooncake(json_objects(path, "trace"))
    if kind == "azure":
        return _csv(lines, path, AZURE, _azure_seconds(), "")
    if kind == "burstgpt":
        return _csv(lines, path, BURSTGPT, float, " in seconds")
    return None


def _azure_seconds() -> Callable[[str], float]:
    """Seconds from the first time that is read."""
    first: list[datetime] = []

    def seconds(text: str) -> float:
        # Seven decimals of a second: one more than datetime supports.
        whole, _, fraction = text.partition("+")[0].partition(".")
        moment = datetime.fromisoformat(whole)
        first.append(moment)
        return float(f"0.{fraction or 0}") + (moment - first[0]).total_seconds()

    return seconds


def _csv(
    lines: Any, path: Path, columns: tuple[str, ...], seconds: Callable[[str], float], unit: str
) -> Iterator[TraceRow]:
    """The rows of a CSV file by its `columns` of time, prompt tokens and output tokens."""
    reader = csv.DictReader(lines)
    missing = [name for name in columns if name not in (reader.fieldnames or ())]
    if missing:
        raise BadInput(f"trace {path} has no column {missing[0]!r}: it wants {', '.join(columns)}")
    for row in reader:
        where = f"trace {path}, line {reader.line_num}"
        if any(row[name] is None for name in columns):
            raise BadInput(f"{where}: too few columns")
        time, *lengths = columns
        try:
            due = seconds(row[time])
        except ValueError as error:
            raise BadInput(f"{where}: {row[time]!r} is no time{unit}") from error
        prompt_len, output_len = (_count(row, name, where) for name in lengths)
        yield TraceRow(due, prompt_len, output_len)


def _mooncake(rows: Iterable[tuple[str, dict[str, Any]]]) -> Iterator[TraceRow]:
    """Requests of Mooncake, of AIPerf's form of it, in which a row of a session is what it appends to the row
    before and its answer (github.com/ai-dynamo/aiperf, docs/reference/conversation-context-mode.md), and of
    Bailian (docs.nvidia.com/aiperf/tutorials/datasets-inputs/profile-with-bailian-traces, 2026-11-30)."""
    sessions: dict[str, TraceRow] = {}
    for number, (where, row) in enumerate(rows):
        size, second = (16, 1) if "chat_id" in row else (MOONCAKE_TOKENS, 1000)
        session, delay = (
            row.get("session_id"),
            _number(row.get("delay") or 0.0, "delay", where) / 1000,
        )
        before = sessions.get(str(session))
        time = row.get("timestamp")
        if time is None and session is not None:
            time = ((before.seconds if before else 0.0) + delay) * second
        time = _number(time, "timestamp", where)
        hashes = row.get("hash_ids") or []
        blocks = tuple(hashes) if isinstance(hashes, list) else (-1,)
        if not blocks and session is None and time % 1:
            # GuideLLM's traces have just lengths too, and seconds.
            problem = '"timestamp" has a fraction: seconds are not read, milliseconds are whole'
            raise BadInput(f"{where}: {problem}")
        if not all(type(name) is int and name >= 0 for name in blocks):
            raise BadInput(f'{where}: "hash_ids" wants a list of whole numbers')
        prompt_len = _count(row, "input_length", where)
        if blocks and len(blocks) != -(-prompt_len // size):
            raise BadInput(f"{where}: {len(blocks)} blocks of {size} for {prompt_len} tokens")
        if session is not None and (before or not blocks):
            size, blocks = 0, (*(before.blocks if before else ()), _SESSION_BLOCK + number)
            prompt_len += before.prompt_len + before.output_len if before else 0
        lengths = prompt_len, _count(row, "output_length", where)
        prompt = blocks, float(len(blocks)), size if blocks else 0
        links = (before.name, True, delay) if before else ("", False, 0.0)
        name = f"{session}#{number}" if session is not None else ""
        request = TraceRow(time / second, *lengths, *prompt, name, *links)
        yield request
        if session is not None:
            sessions[str(session)] = request


def _number(value: Any, key: str, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise BadInput(f'{where}: "{key}" is {value!r}, not a number')
    return value


def _count(row: Mapping[str, Any], key: str, where: str) -> int:
    value = row.get(key)
    try:
        if isinstance(value, bool | float):
            raise ValueError
        count = int(value)  # pyright: ignore[reportArgumentType]
    except (TypeError, ValueError) as error:
        raise BadInput(f"{where}: {key} is {value!r}, not a number of tokens") from error
    if count < 0:
        raise BadInput(f"{where}: {key} is {count}, below 0")
    return count


TOKEN_BYTES = 4
"""Bytes of a token, where a file has text and no count."""
CALL_SECONDS = 0.001
INHERITS = {"forks": True, "spawns": False}
"""Ways to begin a conversation in AIPerf's graphs: whether with the text so far."""
ORCHESTRATION = ("orchestrator", "rounds", "spawns", "pre_session_spawns")


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a model by an `agent`, which `spawner` may have started; seconds, `blocks`, `filled`."""

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
    """The linked calls in session files, None for unknown forms. BadInput: one that lacks a part."""
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
    """Objects of JSON lines, or one document. BadInput: a line that is no JSON after one that is."""
    text = path.read_text(encoding="utf-8")
    try:
        document = json.loads(text)
        entries = document if isinstance(document, list) else [document]
    except json.JSONDecodeError:
        entries = []
        for number, line in enumerate(text.splitlines(), start=1):
            try:
                entries += [json.loads(line)] if line.strip() else []
            except json.JSONDecodeError as error:
                if not entries:  # no JSON at all
                    return []
                raise BadInput(f"trace {path}, line {number}: not JSON ({error.msg})") from error
    return [entry for entry in entries if isinstance(entry, dict)]


def linked(calls: Iterable[Call]) -> list[TraceRow]:
    """Rows of a trace; a call waits for the last to end before it: of its agent, spawner or spawned."""
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
            earlier = [c for c in (before, *above, *done) if c and c.end <= call.start]
            parent = max(earlier, key=lambda call: call.end, default=None)
            extends = before is not None and parent is before and _extends(before, call)
            prompt = (call.blocks, call.filled, call.block_tokens)
            gap = call.start - parent.end if parent else 0.0
            links = (call.name, parent.name if parent else "", extends, gap)
            rows.append(TraceRow(call.start, call.prompt_len, call.output_len, *prompt, *links))
    return rows


def _extends(before: Call, call: Call) -> bool:
    """True if the prompt begins with the one before; unknown without blocks."""
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
            is_relative = min((call["t"] for call in inner), default=0) < entry["t"]
            name = f"{agent}/{entry['agent_id']}"
            yield from _weka_calls(inner, name, agent, start if is_relative else since, size, scope)
            continue
        prompt_len, end = int(entry["in"]), start + float(entry.get("api_time") or 0.0)
        blocks = tuple(scope + int(block) for block in entry.get("hash_ids", ()))
        lengths = (prompt_len, int(entry["out"]))
        names = (f"{agent}#{number}", agent, spawner)
        yield Call(*names, start, end, *lengths, blocks, prompt_len / size, size)


def _graph(entries: Sequence[dict[str, Any]], path: Path) -> Iterator[Call]:
    """AIPerf's conversations with forks and spawns, of estimated lengths, in which calls take no time."""
    sessions: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for entry in entries:
        if unread := [key for key in ORCHESTRATION if entry.get(key)]:
            raise BadInput(
                f"trace {path}: {', '.join(unread)} of a conversation cannot be replayed"
            )
        sessions[str(entry["session_id"])] += entry["turns"]
    sessions = dict(sessions)  # a child that is not there is an error
    turns = [turn for session in sessions.values() for turn in session]
    begun = {child for turn in turns for kind in INHERITS for child, _ in _children(turn, kind)}
    for name in sessions:
        if name not in begun:
            yield from _turns(sessions, name, "", 0.0, b"")


def _turns(
    sessions: Mapping[str, Sequence[dict[str, Any]]],
    name: str,
    spawner: str,
    clock: float,
    text: bytes,
) -> Generator[Call, None, float]:
    """The calls of a conversation and of those that it begins; returns when it ends."""
    joins: dict[int, float] = defaultdict(float)  # by the turn that waits for what was spawned
    for number, turn in enumerate(sessions[name]):
        clock = max(clock, joins[number])
        due = float(turn.get("timestamp") or 0.0) / 1000
        start = max(clock + float(turn.get("delay") or 0.0) / 1000, due)
        clock = start + CALL_SECONDS
        parts = [turn.get(key) or "" for key in ("tools", "messages", "text", "texts")]
        text += message_text(parts).encode("utf-8", "replace")
        output_len = int(turn.get("max_tokens") or turn.get("output_length") or 0)
        names = (f"{name}#{number}", name, spawner)
        lengths = (-(-len(text) // TOKEN_BYTES), output_len)
        yield Call(*names, start, clock, *lengths, block_hashes(text), len(text) / BLOCK_BYTES)
        text += b"." * (output_len * TOKEN_BYTES)  # the answer, which the next turn repeats
        for kind, inherits in INHERITS.items():
            for child, join in _children(turn, kind):
                end = yield from _turns(sessions, child, name, clock, text if inherits else b"")
                join = number + 1 if join is None else int(join)
                joins[join] = max(joins[join], 0.0 if inherits else end)
    return max([clock, *joins.values()])


def _children(turn: Mapping[str, Any], kind: str) -> list[tuple[str, Any]]:
    """(conversation that a turn begins, number of the turn that waits for it or None)"""
    entries = (e if isinstance(e, dict) else {"child": e} for e in turn.get(kind, ()))
    pairs = ((e.get("children", [e.get("child")]), e.get("join_at")) for e in entries)
    return [(str(child), join) for children, join in pairs for child in children]


_FORMS = (
    (lambda entry: "block_size" in entry and "requests" in entry, _weka),
    (lambda entry: "session_id" in entry and "turns" in entry, _graph),
)
