"""Frozen workloads: a file of exact token ids, lengths and arrival times, with their hash."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ...quant.base.atomic_io import write_atomically
from ...quant.base.errors import BadInput
from .workload import ConversationTurn, Message, Tokenizer, Workload, WorkloadItem

# Format 2 has conversations; a workload of single requests is written as format 1.
FORMATS = (1, 2)
KEY = "llmopt_workload"


def write_frozen(workload: Workload, path: Path, *, model: str) -> None:
    """Write JSON lines: a header with the hash, then the requests in order.

    `model` names the model of the tokenizer. An existing file is replaced.

    Raises:
        BadInput: the folder of `path` does not exist.
    """
    if workload.num_images:
        raise BadInput(f"cannot write {path}: a frozen workload holds token ids, and no images")
    if not path.parent.is_dir():
        raise BadInput(f"cannot write {path}: {path.parent} is not a folder")
    head = {
        KEY: FORMATS[workload.is_multi_turn],
        "sha256": workload.sha256,
        "name": workload.name,
        "source": workload.source,
        "model": model,
        "num_requests": workload.num_requests,
        "prompt_tokens": workload.prompt_tokens,
        "output_tokens": workload.output_tokens,
        "is_stand_in": workload.is_stand_in,
        "is_timed": workload.is_timed or any(item.arrival_seconds for item in workload.items),
        "notes": list(workload.notes),
    }
    lines = [head] + [
        {
            "prompt_token_ids": item.prompt_token_ids,
            "output_len": item.output_len,
            "arrival_seconds": item.arrival_seconds,
            **_conversation(item),
        }
        for item in workload.items
    ]
    write_atomically(path, "".join(json.dumps(line, allow_nan=False) + "\n" for line in lines))


def _conversation(item: WorkloadItem) -> dict[str, Any]:
    """The messages and later turns of a conversation; nothing for a single request."""
    if not item.turns:
        return {}
    return {
        "messages": [asdict(message) for message in item.messages],
        "turns": [asdict(turn) for turn in item.turns],
    }


def is_frozen(path: Path) -> bool:
    """Whether a file begins with the header of a frozen workload."""
    try:
        with path.open(encoding="utf-8") as lines:
            head = json.loads(lines.readline(1 << 20))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError):
        return False
    return isinstance(head, dict) and KEY in head


def read_frozen(path: Path, tokenizer: Tokenizer, *, max_model_len: int) -> Workload:
    """Read a file of `write_frozen`, complete and unchanged.

    Raises:
        BadInput: an invalid line (with its number), a hash mismatch, ids outside the vocabulary, or a
            request that exceeds the context.
    """
    lines = path.read_text(encoding="utf-8").splitlines()
    head = _object(lines[0], path, 1)
    if head[KEY] not in FORMATS:
        raise BadInput(
            f"{path}: frozen format {head[KEY]!r}; this version reads {' and '.join(map(str, FORMATS))}"
        )
    items = []
    for number, line in enumerate(lines[1:], start=2):
        items.append(_read_item(_object(line, path, number), f"{path}, line {number}", number - 2))
        _check_item(
            items[-1], f"{path}, line {number}", tokenizer, max_model_len, head.get("model")
        )
    workload = Workload(
        str(head.get("name")),
        f"frozen {path.name}: {head.get('source')}",
        tuple(items),
        tuple(map(str, head.get("notes", ()))),
        is_stand_in=bool(head.get("is_stand_in")),
        is_timed=bool(head.get("is_timed")),
    )
    if workload.sha256 != head.get("sha256"):
        raise BadInput(
            f"{path}: the requests hash to {workload.sha256[:16]}, the header says "
            f"{str(head.get('sha256'))[:16]}: the file was changed"
        )
    return workload


def _read_item(entry: dict[str, Any], where: str, position: int) -> WorkloadItem:
    try:
        ids = tuple(map(int, entry["prompt_token_ids"]))
        length, due = int(entry["output_len"]), float(entry["arrival_seconds"])
        messages = tuple(Message(**message) for message in entry.get("messages", ()))
        turns = tuple(map(_read_turn, entry.get("turns", ())))
    except (KeyError, TypeError, ValueError) as error:
        raise BadInput(
            f"{where}: wants prompt_token_ids, output_len and arrival_seconds, and of a conversation its "
            "messages and turns"
        ) from error
    return WorkloadItem(f"bench-{position}", ids, length, due, messages, turns)


def _read_turn(entry: dict[str, Any]) -> ConversationTurn:
    answer = entry["answer_token_ids"]
    return ConversationTurn(
        tuple(map(int, entry["token_ids"])),
        int(entry["output_len"]),
        tuple(Message(**message) for message in entry["messages"]),
        float(entry["think_seconds"]),
        None if answer is None else tuple(map(int, answer)),
        None if entry["answer"] is None else str(entry["answer"]),
    )


def _check_item(
    item: WorkloadItem, where: str, tokenizer: Tokenizer, max_model_len: int, model: Any
) -> None:
    """Raises:
    BadInput: a value out of range, an id outside the vocabulary, or more tokens than the context holds.
    """
    pauses = [item.arrival_seconds, *(turn.think_seconds for turn in item.turns)]
    ids = [*item.prompt_token_ids]
    for turn in item.turns:
        ids += turn.token_ids + (turn.answer_token_ids or ())
    if (
        not item.prompt_token_ids
        or min(item.output_lens) < 1
        or not all(0 <= seconds < math.inf for seconds in pauses)
    ):
        raise BadInput(f"{where}: a prompt, an output length or a time is out of range")
    if min(ids) < 0 or max(ids) >= len(tokenizer):
        raise BadInput(
            f"{where}: token {max(ids)} is not in this model's vocabulary of {len(tokenizer)}: "
            f"the workload was frozen for {model}"
        )
    prompt, output = item.prompt_lens[-1], item.output_lens[-1]
    if prompt + output > max_model_len:
        raise BadInput(
            f"{where}: {prompt} prompt and {output} output tokens exceed the context of "
            f"{max_model_len}; freeze it again for this model"
        )


def _object(line: str, path: Path, number: int) -> dict[str, Any]:
    try:
        entry = json.loads(line)
    except json.JSONDecodeError as error:
        raise BadInput(f"{path}, line {number}: not JSON ({error.msg})") from error
    if not isinstance(entry, dict):
        raise BadInput(f"{path}, line {number}: wants an object")
    return entry
