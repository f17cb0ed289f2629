"""Recorded requests of one form: their record, the block hashes of a prompt, and the readers of trace files.

A file is known by its content. Azure's LLM inference traces (CSV: TIMESTAMP, ContextTokens, GeneratedTokens),
BurstGPT (CSV: Timestamp in seconds, Request tokens, Response tokens), Mooncake (JSON lines: timestamp in
milliseconds, input_length, output_length, and hash_ids that name the prompt's blocks of 512 tokens; equal
ids are equal text with equal text before it), and agents' sessions (`agent_traces`).
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from hashlib import blake2b
from pathlib import Path
from typing import Any

from ...base.errors import BadInput
from ...base.json_lines import json_objects

MOONCAKE_TOKENS = 512
BLOCK_BYTES = 64
"""Size of a block of a prompt's text in UTF-8: about what a server caches."""
DIGEST_BYTES = 6  # ids below 2^48 are exact in every reader of JSON
AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
BURSTGPT = ("Timestamp", "Request tokens", "Response tokens")


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One recorded request.

    Attributes:
        seconds: when it came, on the trace's own clock.
        prompt_len, output_len: in tokens.
        blocks: ids of the prompt's blocks; equal ids are equal text with equal text before it.
        filled: number of blocks that the prompt fills; the last one is rarely full.
        block_tokens: tokens of a block; 0 where the prompt's tokens are spread over its blocks evenly.
        name: names the request in `parent` of others.
        parent: the request that had ended before this one was made; empty where none is known.
        extends: the prompt is the parent's, its answer, and more.
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
    """Hash the whole blocks of a prompt's UTF-8 text, and the rest as one more.

    Each hash holds those before it, as in a prefix cache: equal ids are equal prefixes.
    """
    hashes, digest = [], b""
    for start in range(0, len(text), BLOCK_BYTES):
        block = digest + text[start : start + BLOCK_BYTES]
        digest = blake2b(block, digest_size=DIGEST_BYTES).digest()
        hashes.append(int.from_bytes(digest, "little"))
    return tuple(hashes)


def message_text(part: Any) -> str:
    """Messages as text: the same whether their content is a string or a list of parts, and whether a cache
    breakpoint stands on it, which clients move from turn to turn."""
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
    said = "" if content is None else message_text(content)
    return json.dumps(kept, ensure_ascii=False, sort_keys=True) + said + "\n"


def table_rows(kind: str, lines: Any, path: Path) -> Iterator[TraceRow] | None:
    """The requests of a trace in lines; None where `kind` is none and the content is of none of these forms.

    Raises:
        BadInput: a malformed line, with its number.
    """
    columns = {"azure": AZURE, "burstgpt": BURSTGPT}
    if kind not in (*columns, "mooncake"):
        first = next((line for line in lines if line.strip()), "")
        lines.seek(0)
        kind = _kind(first, columns)
    if kind == "mooncake":
        return _mooncake(json_objects(path, "trace"))
    if kind == "azure":
        return _csv(lines, path, AZURE, _azure_seconds(), "")
    if kind == "burstgpt":
        return _csv(lines, path, BURSTGPT, float, " in seconds")
    return None


def _kind(first: str, columns: Mapping[str, tuple[str, ...]]) -> str:
    """The form of a trace by its first line; empty where it is none of these."""
    try:
        head = json.loads(first)
    except json.JSONDecodeError:
        names = set(next(csv.reader([first]), ()))
        return next((kind for kind, wanted in columns.items() if names >= set(wanted)), "")
    if not isinstance(head, dict):
        return ""
    return "mooncake" if "input_length" in head else ""


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
    lines: Any,
    path: Path,
    columns: tuple[str, str, str],
    seconds: Callable[[str], float],
    unit: str,
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
    """Requests of Mooncake, and of AIPerf's form of it: in a session each waits for the one before."""
    sessions: dict[str, tuple[str, float]] = {}
    for number, (where, row) in enumerate(rows):
        session, delay = row.get("session_id"), row.get("delay") or 0.0
        parent, before = sessions.get(str(session), ("", 0.0))
        time = row.get("timestamp", before + delay if session is not None else None)
        if isinstance(time, bool) or not isinstance(time, int | float):
            raise BadInput(f'{where}: "timestamp" is {time!r}, not milliseconds')
        blocks = _blocks(row, where)
        prompt_len = _count(row, "input_length", where)
        if blocks and prompt_len > MOONCAKE_TOKENS * len(blocks):
            raise BadInput(
                f"{where}: {prompt_len} prompt tokens do not fit {len(blocks)} blocks of "
                f"{MOONCAKE_TOKENS}"
            )
        output_len = _count(row, "output_length", where)
        yield TraceRow(
            time / 1000,
            prompt_len,
            output_len,
            blocks,
            float(len(blocks)),
            MOONCAKE_TOKENS if blocks else 0,
            name := f"{session}#{number}" if session is not None else "",
            parent,
            gap=delay / 1000 if parent else 0.0,
        )
        sessions[str(session)] = name, time


def _blocks(row: Mapping[str, Any], where: str) -> tuple[int, ...]:
    blocks = row.get("hash_ids", [])
    if not isinstance(blocks, list) or not all(type(name) is int and name >= 0 for name in blocks):
        raise BadInput(f'{where}: "hash_ids" wants a list of whole numbers')
    return tuple(blocks)


def _count(row: Mapping[str, Any], key: str, where: str) -> int:
    """A number of tokens."""
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
