"""Calibration data: texts from a file, the hub or the package, cut into samples of one length."""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from ..recipes import DATA
from .errors import BadInput

BUNDLED = DATA / "calibration.txt"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_HUB_ROWS = 4096  # enough to shuffle among without fetching a whole corpus
_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant"}

Messages = list[dict[str, str]]


@dataclass(frozen=True, slots=True)
class Calibration:
    """Token ids that the model is shown while it is quantized.

    Attributes:
        token_ids: int64 `[samples, length]`.
        source: where the text came from, for the record.
        sha256: of shape and ids, so that two runs can be told apart.
        chat_template: whether conversations went through the model's chat template.
    """

    token_ids: torch.Tensor
    source: str
    sha256: str
    chat_template: bool


def load_calibration(
    source: str | None, tokenizer: Any, *, num_samples: int, seq_len: int, seed: int
) -> Calibration:
    """Texts of `source`, shuffled by `seed`, tokenized, joined and cut into equal samples.

    Args:
        source: a `.txt` file (texts divided by blank lines), a `.jsonl` file (`text`, `messages` or
            `conversations` in each line), a hub dataset id, or None for the bundled stories. Only a hub
            id touches the network.
        tokenizer: a transformers tokenizer; its chat template is applied to conversations, if it has one.

    Raises:
        BadInput: nothing is there, nothing is in it, or a line cannot be read.
    """
    if num_samples < 1 or seq_len < 1:
        raise BadInput(
            f"{num_samples} samples of {seq_len} tokens are no calibration: ask for more"
        )
    name, documents = _documents(source)
    if not documents:
        raise BadInput(f"calibration data {name} is empty: give a file with text in it")
    random.Random(seed).shuffle(documents)
    wanted = num_samples * seq_len
    token_ids: list[int] = []
    templated = False
    for document in documents:
        ids, used_template = _tokenize(document, tokenizer)
        token_ids += ids
        templated = templated or used_template
        if len(token_ids) >= wanted:
            break
    if not token_ids:
        raise BadInput(f"calibration data {name} holds no tokens for this model's tokenizer")
    length = min(seq_len, len(token_ids))
    rows = min(num_samples, len(token_ids) // length)
    samples = torch.tensor(token_ids[: rows * length], dtype=torch.int64).view(rows, length)
    digest = hashlib.sha256(f"{rows}x{length}:".encode() + samples.numpy().astype("<i8").tobytes())
    return Calibration(samples, name, digest.hexdigest(), templated)


def _documents(source: str | None) -> tuple[str, list[str | Messages]]:
    """The name of a source for the record, and its documents."""
    if source is None:
        return f"bundled {BUNDLED.name}", _from_text(BUNDLED)
    path = Path(source).expanduser()
    if path.is_file():
        if path.suffix == ".jsonl":
            return path.name, list(_from_jsonl(path))
        if path.suffix == ".txt":
            return path.name, _from_text(path)
        raise BadInput(f"calibration file {path} is neither .txt nor .jsonl")
    if _HUB_ID.fullmatch(source) and not path.exists() and not source.startswith(("~", ".", "/")):
        if path.suffix in (".txt", ".jsonl", ".json"):
            raise BadInput(f"calibration file {path} does not exist")
        return source, list(_from_hub(source))
    raise BadInput(f"calibration data {source!r} is no .txt or .jsonl file and no hub dataset id")


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise BadInput(f"calibration file {path} is not UTF-8 text: {error}") from error


def _from_text(path: Path) -> list[str | Messages]:
    return [text.strip() for text in re.split(r"\n\s*\n", _read(path)) if text.strip()]


def _from_jsonl(path: Path) -> Iterator[str | Messages]:
    for number, line in enumerate(_read(path).splitlines(), start=1):
        if not line.strip():
            continue
        where = f"{path} line {number}"
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise BadInput(f"{where} is not valid JSON: {error}") from error
        document = _document(row, where)
        if document:
            yield document


def _document(row: Any, where: str) -> str | Messages:
    """The text or the conversation of one row."""
    if isinstance(row, dict):
        if isinstance(row.get("text"), str):
            return row["text"].strip()
        turns = row.get("messages", row.get("conversations"))
        if isinstance(turns, list):
            return [_turn(turn, where) for turn in turns]
    raise BadInput(f"{where} has neither 'text' nor 'messages' nor 'conversations'")


def _turn(turn: Any, where: str) -> dict[str, str]:
    """One turn in the shape of chat templates; ShareGPT says `from` and `value`."""
    if isinstance(turn, dict):
        role, content = turn.get("role", turn.get("from")), turn.get("content", turn.get("value"))
        if isinstance(role, str) and isinstance(content, str):
            return {"role": _ROLES.get(role, role), "content": content}
    raise BadInput(f"{where} has a turn without a role and a text")


def _from_hub(dataset_id: str) -> Iterator[str | Messages]:
    try:
        from datasets import load_dataset  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise BadInput(
            f"{dataset_id!r} is no file here; to read it from the hub: pip install 'llmopt[hub]'"
        ) from error
    try:
        rows = list(islice(load_dataset(dataset_id, split="train", streaming=True), _HUB_ROWS))
    except Exception as error:  # the library raises many types; the person needs one line
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise BadInput(f"the hub did not give dataset {dataset_id!r}: {reason}") from error
    for number, row in enumerate(rows, start=1):
        document = _document(row, f"dataset {dataset_id} row {number}")
        if document:
            yield document


def _tokenize(document: str | Messages, tokenizer: Any) -> tuple[list[int], bool]:
    """Token ids of a document, and whether the chat template made them."""
    if isinstance(document, str):
        return tokenizer(document, verbose=False)["input_ids"], False
    if getattr(tokenizer, "chat_template", None):
        text = tokenizer.apply_chat_template(document, tokenize=False)
        # The template writes the special tokens itself.
        return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"], True
    text = "\n".join(turn["content"] for turn in document)
    return tokenizer(text, verbose=False)["input_ids"], False
