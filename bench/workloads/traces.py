"""Trace replay: arrival times, lengths and shared prefix blocks of recorded traffic.

Three public formats. Azure's LLM inference traces (CSV: TIMESTAMP, ContextTokens, GeneratedTokens),
BurstGPT (CSV: Timestamp in seconds, Request tokens, Response tokens) and Mooncake (JSON lines:
timestamp in milliseconds, input_length, output_length, and hash_ids that name the prompt's blocks of
512 tokens; equal ids are equal text with equal text before it). None holds prompts, so the tokens are
random; with Mooncake, equal blocks get equal tokens.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from ...quant.base.errors import BadInput
from ...recipes import DATA
from .synthetic import allowed_tokens
from .workload import Tokenizer, Workload, WorkloadItem

BLOCK_TOKENS = 512
BUNDLED = {"azure": DATA / "azure_conversations.csv", "mooncake": DATA / "mooncake.jsonl"}
# A quantile, so that one huge request does not scale all others to nothing.
SHARE_TO_FIT = 0.9
# Clipping would make Mooncake's prompts equal: they differ at their ends.
LENGTH_RULES = {"azure": "clip", "burstgpt": "clip", "mooncake": "scale"}


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One recorded request: seconds on the trace's own clock, lengths in tokens, ids of its blocks."""

    seconds: float
    prompt_len: int
    output_len: int
    blocks: tuple[int, ...] = ()


def trace_workload(
    tokenizer: Tokenizer,
    kind: str,
    *,
    num_prompts: int,
    max_model_len: int,
    path: Path | None = None,
    start_seconds: float = 0.0,
    speed: float = 1.0,
    lengths: str | None = None,
    seed: int = 0,
) -> Workload:
    """`num_prompts` requests of a trace at their recorded times: the first at 0, gaps divided by `speed`.

    Args:
        kind: `azure`, `burstgpt` or `mooncake`.
        path: the trace; None is the bundled slice of Azure's or Mooncake's.
        start_seconds: begin that long after the trace's first request.
        lengths: how requests longer than the context are fitted. `clip` cuts the output to
            half the context at most and then the prompt to the rest; `scale` multiplies all lengths
            (and Mooncake's blocks) by one factor under which nine requests in ten fit, and cuts
            the others. The changes are counted in the notes. Default: `clip`, for Mooncake
            `scale`.

    Raises:
        BadInput: no such file, a malformed line (with its number), or no request left.
    """
    if path is None and kind not in BUNDLED:
        raise BadInput(f"--dataset {kind} needs --dataset-path: no slice of it is bundled")
    rule = lengths or LENGTH_RULES[kind]
    rows = read_trace(kind, path or BUNDLED[kind])
    origin = rows[0].seconds
    empty = 0
    chosen: list[TraceRow] = []
    for row in rows:
        if row.seconds - origin < start_seconds:
            continue
        if row.prompt_len < 1 or row.output_len < 1:
            empty += 1
            continue
        chosen.append(row)
        if len(chosen) == num_prompts:
            break
    source = f"{kind} trace {path.name}" if path else f"bundled slice of the {kind} trace"
    if not chosen:
        raise BadInput(
            f"{source} has no request after --trace-start {start_seconds:g}: it lasts "
            f"{rows[-1].seconds - origin:.0f} s"
        )
    notes = ["random tokens: a trace holds lengths and times, not text"]
    if empty:
        notes.append(f"{empty} requests without a prompt or an answer left out")
    if len(chosen) < num_prompts:
        notes.append(f"{len(chosen)} of {num_prompts} requests: the trace ends there")
    totals = sorted(row.prompt_len + row.output_len for row in chosen)
    large = totals[math.ceil(SHARE_TO_FIT * len(totals)) - 1]
    factor = min(1.0, max_model_len / large) if rule == "scale" else 1.0
    if factor < 1.0:
        notes.append(
            f"all lengths scaled by {factor:.4g} so that nine requests in ten, up to {large} "
            f"tokens, fit the context of {max_model_len}"
        )
    block = math.ceil(BLOCK_TOKENS * factor)
    allowed = allowed_tokens(tokenizer)
    items = []
    cut = 0
    for number, row in enumerate(chosen):
        prompt_len, output_len = fitted(row, factor, max_model_len)
        cut += (row.prompt_len + row.output_len) * factor > max_model_len
        blocks = row.blocks or (-1 - number,)
        tokens = block_tokens(allowed, seed, blocks, block if row.blocks else prompt_len)
        due = (row.seconds - chosen[0].seconds) / speed
        items.append(WorkloadItem(f"bench-{number}", tuple(tokens[:prompt_len]), output_len, due))
    if cut:
        notes.append(f"{cut} of {len(chosen)} requests cut to the context of {max_model_len}")
    if speed != 1.0:
        notes.append(f"replayed at {speed:g} times the trace's speed")
    return Workload(kind, source, tuple(items), tuple(notes), is_timed=True)


def fitted(row: TraceRow, factor: float, max_model_len: int) -> tuple[int, int]:
    """(prompt, output) tokens of a request after scaling and cutting; at least 1 each."""
    prompt = max(1, math.floor(row.prompt_len * factor))
    output = max(1, math.floor(row.output_len * factor))
    if prompt + output > max_model_len:
        output = min(output, max(1, max_model_len // 2))
        prompt = min(prompt, max_model_len - output)
    return prompt, output


def block_tokens(allowed: np.ndarray, seed: int, blocks: tuple[int, ...], length: int) -> list[int]:
    """`length` tokens for every block, the same ones for the same id and seed."""
    tokens: list[int] = []
    for name in blocks:
        # Requests without blocks have negative ids, but a seed must not be negative.
        rng = np.random.default_rng([seed, abs(name), int(name < 0)])
        tokens += allowed[rng.integers(0, len(allowed), size=length)].tolist()
    return tokens


def read_trace(kind: str, path: Path) -> list[TraceRow]:
    """Every request of a trace file, in the order of its times.

    Raises:
        BadInput: no such file, or a malformed line (with its number).
    """
    try:
        with path.open(encoding="utf-8", newline="") as lines:
            rows = list(_rows(kind, lines, path))
    except (FileNotFoundError, IsADirectoryError) as error:
        raise BadInput(f"trace {path} is not a file") from error
    except UnicodeDecodeError as error:
        raise BadInput(f"trace {path} is not UTF-8 text: {error.reason}") from error
    if not rows:
        raise BadInput(f"trace {path} has no request")
    return sorted(rows, key=lambda row: row.seconds)


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


def _mooncake(lines: Any, path: Path) -> Iterator[TraceRow]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"trace {path}, line {number}"
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise BadInput(f"{where}: not JSON ({error.msg})") from error
        if not isinstance(row, dict):
            raise BadInput(f"{where}: wants an object")
        time = row.get("timestamp")
        blocks = row.get("hash_ids", [])
        if isinstance(time, bool) or not isinstance(time, int | float):
            raise BadInput(f'{where}: "timestamp" is {time!r}, not milliseconds')
        if not isinstance(blocks, list) or not all(
            type(name) is int and name >= 0 for name in blocks
        ):
            raise BadInput(f'{where}: "hash_ids" wants a list of whole numbers')
        prompt_len = _count(row, "input_length", where)
        if blocks and prompt_len > BLOCK_TOKENS * len(blocks):
            raise BadInput(
                f"{where}: {prompt_len} prompt tokens do not fit {len(blocks)} blocks of "
                f"{BLOCK_TOKENS}"
            )
        output_len = _count(row, "output_length", where)
        yield TraceRow(time / 1000, prompt_len, output_len, tuple(blocks))


def _rows(kind: str, lines: Any, path: Path) -> Iterator[TraceRow]:
    if kind == "mooncake":
        return _mooncake(lines, path)
    if kind == "azure":
        columns = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
        return _csv(lines, path, columns, _azure_seconds(), "")
    columns = ("Timestamp", "Request tokens", "Response tokens")
    return _csv(lines, path, columns, float, " in seconds")


def _count(row: dict[str, Any], key: str, where: str) -> int:
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
