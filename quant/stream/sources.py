"""Documents of a calibration source: a file, a hub data set, or a text that ships with the package."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

from ...base.atomic_io import expanded
from ...base.errors import BadInput, first_line
from ...base.extras import import_extra
from ...base.json_lines import json_lines, parse_json
from ...recipes import DATA, MODELS

STORIES = DATA / "calibration.txt"
MIXED = DATA / "calibration_mixed.jsonl.xz"
PICTURES = DATA / "pictures" / "pairs.jsonl"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_HUB_ROWS = 4096  # enough to shuffle without fetching a whole corpus
_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant"}
_FILES = (".txt", ".jsonl", ".json")

# Of the bundled models by default: 3 million parameters with at most 512 inputs to a linear need no more.
BUNDLED_SAMPLES, BUNDLED_SEQ_LEN = 64, 256
# On a CPU by default, and of a quick run: docs/measured/calibration.md has what it costs in quality.
CPU_SAMPLES, CPU_SEQ_LEN = 64, 512

Messages = list[dict[str, str]]
Document = str | Messages


def is_bundled(model: Path) -> bool:
    return model.resolve().parent == MODELS.resolve()


def bundled_text(model: Path) -> Path:
    return STORIES if is_bundled(model) else MIXED


def plain_text(document: Document) -> str:
    """The text of a document; all turns of a conversation, without roles."""
    if isinstance(document, str):
        return document
    return "\n".join(turn["content"] for turn in document)


def check_source(source: str | Path) -> None:
    """Raises BadInput where `source` is neither a file of texts nor a hub dataset id; reads nothing."""
    path = expanded(source)
    if source in (STORIES, MIXED):
        return
    if path.is_file():
        if path.suffix not in _FILES:
            raise BadInput(f"calibration file {path} is neither .txt nor .jsonl nor .json")
        return
    name = str(source)
    is_path = path.suffix in _FILES or name.startswith(("~", ".", "/"))
    if is_path and not path.exists():
        raise BadInput(f"calibration file {path} does not exist")
    if is_path or not _HUB_ID.fullmatch(name) or path.exists():
        raise BadInput(
            f"calibration data {name!r} is no .txt, .jsonl or .json file and no hub dataset id"
        )


def read_documents(source: str | Path) -> tuple[str, list[Document]]:
    """The source's name and documents; BadInput where unreadable. A hub dataset id needs the network."""
    if source in (STORIES, MIXED):
        name = f"bundled {Path(source).name}"
        return name, list(_mixed()) if source == MIXED else _from_text(STORIES)
    check_source(source)
    path = expanded(source)
    if not path.is_file():
        return str(source), list(_from_hub(str(source)))
    if path.suffix == ".txt":
        return path.name, _from_text(path)
    return path.name, list(_documents(numbered_rows(path)))


@cache
def _mixed() -> tuple[Document, ...]:
    return tuple(_documents(json_lines(MIXED)))


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadInput(f"calibration file {path} is not UTF-8 text: {error}") from error


def _from_text(path: Path) -> list[Document]:
    return [text.strip() for text in re.split(r"\n\s*\n", _read(path)) if text.strip()]


def numbered_rows(path: Path) -> Iterator[tuple[str, Any]]:
    """The rows of a `.jsonl` file, or of a JSON array as ShareGPT's files are, each with its place."""
    if path.suffix == ".jsonl":
        yield from json_lines(path, "calibration file")
        return
    try:
        rows = parse_json(_read(path))
    except json.JSONDecodeError as error:
        raise BadInput(f"{path} is not valid JSON: {error}") from error
    if not isinstance(rows, list):
        raise BadInput(f"{path} holds no array of texts or conversations")
    yield from ((f"{path} row {number}", row) for number, row in enumerate(rows, start=1))


def _documents(rows: Iterable[tuple[str, Any]]) -> Iterator[Document]:
    for where, row in rows:
        if document := document_of(row, where):
            yield document


def document_of(row: Any, where: str) -> Document:
    if isinstance(row, dict):
        if isinstance(row.get("text"), str):
            return row["text"].strip()
        turns = row.get("messages", row.get("conversations"))
        if isinstance(turns, list):
            return [_turn(turn, where) for turn in turns]
    raise BadInput(f"{where} has neither 'text' nor 'messages' nor 'conversations'")


def _turn(turn: Any, where: str) -> dict[str, str]:
    """One message as `role` and `content`; ShareGPT has `from` and `value`."""
    if isinstance(turn, dict):
        role, content = turn.get("role", turn.get("from")), turn.get("content", turn.get("value"))
        if isinstance(role, str) and isinstance(content, str):
            return {"role": _ROLES.get(role, role), "content": content}
    raise BadInput(f"{where} has a turn without a role and a text")


def _from_hub(dataset_id: str) -> Iterator[Document]:
    use = f"{dataset_id!r} is no file here; reading it from the hub"
    datasets = import_extra(use, "hub", "datasets")
    try:
        rows = list(
            islice(datasets.load_dataset(dataset_id, split="train", streaming=True), _HUB_ROWS)
        )
    except Exception as error:  # the library raises many types; the user needs one line
        reason = first_line(error)
        raise BadInput(f"the hub did not give dataset {dataset_id!r}: {reason}") from error
    named = (f"dataset {dataset_id} row {number}" for number in range(1, len(rows) + 1))
    yield from _documents(zip(named, rows, strict=True))
