"""Frozen workloads: a file of exact token ids, lengths and arrival times, with their hash."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ...quant.base.errors import BadInput
from ..files.run_folder import write_atomically
from .workload import Tokenizer, Workload, WorkloadItem

FORMAT = 1
KEY = "llmopt_workload"


def write_frozen(workload: Workload, path: Path, *, model: str) -> None:
    """Write JSON lines: a header with the hash, then the requests in order.

    `model` names the model of the tokenizer. An existing file is replaced.

    Raises:
        BadInput: the folder of `path` does not exist.
    """
    if not path.parent.is_dir():
        raise BadInput(f"cannot write {path}: {path.parent} is not a folder")
    head = {
        KEY: FORMAT,
        "sha256": workload.sha256,
        "name": workload.name,
        "source": workload.source,
        "model": model,
        "num_requests": len(workload.items),
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
        }
        for item in workload.items
    ]
    write_atomically(path, "".join(json.dumps(line, allow_nan=False) + "\n" for line in lines))


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
    if head[KEY] != FORMAT:
        raise BadInput(f"{path}: frozen format {head[KEY]!r}; this version reads {FORMAT}")
    items = []
    for number, line in enumerate(lines[1:], start=2):
        entry = _object(line, path, number)
        where = f"{path}, line {number}"
        try:
            ids = tuple(map(int, entry["prompt_token_ids"]))
            length, due = int(entry["output_len"]), float(entry["arrival_seconds"])
        except (KeyError, TypeError, ValueError) as error:
            raise BadInput(
                f"{where}: wants prompt_token_ids, output_len and arrival_seconds"
            ) from error
        if not ids or length < 1 or not 0 <= due < float("inf"):
            raise BadInput(f"{where}: a prompt, an output length or a time is out of range")
        if min(ids) < 0 or max(ids) >= len(tokenizer):
            raise BadInput(
                f"{where}: token {max(ids)} is not in this model's vocabulary of {len(tokenizer)}: "
                f"the workload was frozen for {head.get('model')}"
            )
        if len(ids) + length > max_model_len:
            raise BadInput(
                f"{where}: {len(ids)} prompt and {length} output tokens exceed the context of "
                f"{max_model_len}; freeze it again for this model"
            )
        items.append(WorkloadItem(f"bench-{number - 2}", ids, length, due))
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


def _object(line: str, path: Path, number: int) -> dict[str, Any]:
    try:
        entry = json.loads(line)
    except json.JSONDecodeError as error:
        raise BadInput(f"{path}, line {number}: not JSON ({error.msg})") from error
    if not isinstance(entry, dict):
        raise BadInput(f"{path}, line {number}: wants an object")
    return entry
