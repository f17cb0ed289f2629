"""Calibration data: texts from a file, the hub or the package, tokenized into samples of equal length."""

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

from ...recipes import DATA
from ..base.errors import BadInput
from .leakage_check import check_leakage, deduplicate, length_histogram

BUNDLED = DATA / "calibration.txt"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_HUB_ROWS = 4096  # enough to shuffle without fetching a whole corpus
_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant"}

Messages = list[dict[str, str]]


@dataclass(frozen=True, slots=True)
class Calibration:
    """Token ids of the calibration and held-out samples.

    Attributes:
        token_ids: int64 `[samples, length]`.
        held_out: int64 `[samples, length]` of other documents, for measuring only; may be empty.
        source: name of the text source, for the manifest.
        sha256: of shapes and ids, so that two runs can be told apart.
        chat_template: whether the model's chat template was applied to conversations.
        documents: how many were used; `duplicates` more were dropped from the whole source.
        with_bos: how many of them begin with the BOS token.
        lengths: histogram of tokens per document.
    """

    token_ids: torch.Tensor
    held_out: torch.Tensor
    source: str
    sha256: str
    chat_template: bool
    documents: int
    duplicates: int
    with_bos: int
    lengths: dict[str, int]


def no_calibration() -> Calibration:
    """An empty calibration: no samples, for a data-free method whose errors are not measured."""
    samples = torch.empty(0, 0, dtype=torch.int64)
    return Calibration(samples, samples, "none", _digest(samples, samples), False, 0, 0, 0, {})


def load_calibration(
    source: str | None,
    tokenizer: Any,
    *,
    num_samples: int,
    seq_len: int,
    seed: int,
    held_out: int = 0,
    evaluation: Path | None = None,
) -> Calibration:
    """Texts of `source`, shuffled by `seed`, tokenized, joined and cut into equal samples.

    Args:
        source: a `.txt` file (texts divided by blank lines), a `.jsonl` file (`text`, `messages` or
            `conversations` in each line), a hub dataset id, or None for the bundled stories. Only a hub
            id touches the network.
        tokenizer: a transformers tokenizer; its chat template is applied to conversations, if it has one.
        held_out: number of held-out samples, from documents after the calibration ones.
        evaluation: a file of evaluation texts that calibration must not overlap with.

    Raises:
        BadInput: nothing is there, nothing is in it, a line cannot be read, or it overlaps with
            `evaluation`.
    """
    if num_samples < 1 or seq_len < 1 or held_out < 0:
        raise BadInput(
            f"{num_samples} samples of {seq_len} tokens are no calibration: ask for more"
        )
    name, documents = _documents(source)
    if not documents:
        raise BadInput(f"calibration data {name} is empty: give a file with text in it")
    unique = deduplicate(documents, _plain_text)
    random.Random(seed).shuffle(unique)
    stream = _Stream(unique, tokenizer)
    token_ids = stream.take(num_samples * seq_len)
    if not token_ids:
        raise BadInput(f"calibration data {name} holds no tokens for this model's tokenizer")
    length = min(seq_len, len(token_ids))
    samples = _cut(token_ids, num_samples, length)
    others = _cut(stream.take(held_out * length) if held_out else [], held_out, length)
    if evaluation is not None:
        used = [_plain_text(document) for document in unique[: len(stream.lengths)]]
        texts = [_plain_text(document) for document in _documents(str(evaluation))[1]]
        check_leakage(name, used, evaluation.name, texts)
    return Calibration(
        token_ids=samples,
        held_out=others,
        source=name,
        sha256=_digest(samples, others),
        chat_template=stream.templated,
        documents=len(stream.lengths),
        duplicates=len(documents) - len(unique),
        with_bos=stream.with_bos,
        lengths=length_histogram(stream.lengths),
    )


def _digest(samples: torch.Tensor, others: torch.Tensor) -> str:
    digest, length = hashlib.sha256(), samples.shape[1]
    for part in (samples, others):
        digest.update(f"{part.shape[0]}x{length}:".encode() + part.numpy().astype("<i8").tobytes())
    return digest.hexdigest()


class _Stream:
    """Documents, tokenized lazily."""

    def __init__(self, documents: list[str | Messages], tokenizer: Any):
        self._documents = iter(documents)
        self._tokenizer = tokenizer
        self.lengths: list[int] = []
        self.templated = False
        self.with_bos = 0

    def take(self, wanted: int) -> list[int]:
        """At least `wanted` ids of whole documents, or all remaining."""
        token_ids: list[int] = []
        while len(token_ids) < wanted and (document := next(self._documents, None)) is not None:
            ids, used_template = _tokenize(document, self._tokenizer)
            token_ids += ids
            self.lengths.append(len(ids))
            self.templated = self.templated or used_template
            self.with_bos += ids[:1] == [self._tokenizer.bos_token_id]
        return token_ids


def _cut(token_ids: list[int], num_samples: int, length: int) -> torch.Tensor:
    """Whole samples of `length` ids, at most `num_samples`."""
    rows = min(num_samples, len(token_ids) // length)
    return torch.tensor(token_ids[: rows * length], dtype=torch.int64).view(rows, length)


def _plain_text(document: str | Messages) -> str:
    """The text of a document; all turns of a conversation, without roles."""
    if isinstance(document, str):
        return document
    return "\n".join(turn["content"] for turn in document)


def _documents(source: str | None) -> tuple[str, list[str | Messages]]:
    """The source's name for the manifest, and its documents."""
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
    """One message as `role` and `content`; ShareGPT has `from` and `value`."""
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
    except Exception as error:  # the library raises many types; the user needs one line
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
    return tokenizer(_plain_text(document), verbose=False)["input_ids"], False
