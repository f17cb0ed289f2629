"""Calibration data: documents, tokenized and cut into samples of equal length, and others held out.

Duplicates are dropped, and text that shares long n-grams with the evaluation text is refused. A sample may
have the processor's tensors of its images with its token ids.
"""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch

from ...base.errors import BadInput
from .sources import STORIES, Document, plain_text, read_documents

_Document = TypeVar("_Document")
SHARED_WORDS = 24  # a shared n-gram of this length is no accident
LEAST_TOKENS = 8  # of a whole text: a word says nothing of the inputs of a model


@dataclass(frozen=True, slots=True, eq=False)
class ImageInputs:
    """The processor's tensors of one sample, by name such as `pixel_values`; empty for text alone."""

    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)
    num_images: int = 0


Images = tuple[ImageInputs, ...]
"""The inputs of each sample; empty where no sample has images."""


def with_images(token_ids: torch.Tensor, images: Images) -> tuple[torch.Tensor, Images]:
    rows = [row for row, sample in enumerate(images) if sample.num_images]
    return token_ids[rows], tuple(images[row] for row in rows)


def deduplicate(
    documents: Sequence[_Document], text_of: Callable[[_Document], str]
) -> list[_Document]:
    """The documents in order, without duplicates (compared by their words)."""
    kept: dict[bytes, _Document] = {}
    for document in documents:
        digest = hashlib.sha256(" ".join(text_of(document).split()).encode()).digest()
        kept.setdefault(digest, document)
    return [*kept.values()]


def check_leakage(name: str, texts: Sequence[str], against: str, evaluation: Sequence[str]) -> None:
    """Raise BadInput for a calibration text with `SHARED_WORDS` words in a row of an evaluation text."""
    where = {run: number for number, text in enumerate(evaluation, 1) for run in _runs(text)}
    for number, text in enumerate(texts, 1):
        for run in _runs(text):
            if run in where:
                excerpt = " ".join(run[:8])
                raise BadInput(
                    f"calibration data {name} overlaps with the evaluation text {against}: text {number} "
                    f"and text {where[run]} there both have {excerpt!r} …; measure on other text, or "
                    "calibrate on other text"
                )


def _runs(text: str) -> list[tuple[str, ...]]:
    tokens = text.split()
    length = min(SHARED_WORDS, len(tokens))
    return (
        [tuple(tokens[i : i + length]) for i in range(len(tokens) - length + 1)] if tokens else []
    )


def length_histogram(lengths: Sequence[int]) -> dict[str, int]:
    """Histogram of tokens per document, by powers of two: `{"65-128": 3, ...}`."""
    powers = Counter(max(length - 1, 0).bit_length() for length in lengths)
    return {
        f"{(1 << power - 1) + 1 if power else 0}-{1 << power}": powers[power]
        for power in sorted(powers)
    }


@dataclass(frozen=True, slots=True)
class Calibration:
    """Token ids of the calibration and held-out samples.

    Attributes:
        token_ids: int64 `[samples, length]`.
        held_out: int64 `[samples, length]` of other documents, for measuring only; may be empty.
        source: name of the text source, for the manifest.
        sha256: digest of shapes and ids, so that two runs can be told apart.
        conversations: number of documents that the model's chat template made.
        refused: conversations that the chat template refuses, such as a first turn of the assistant; dropped.
        documents: number of documents used; `duplicates` more were dropped from the whole source.
        with_bos: number of documents that begin with the BOS token.
        lengths: histogram of tokens per document.
        images, held_out_images: images of each sample; empty for text alone.
    """

    token_ids: torch.Tensor
    held_out: torch.Tensor
    source: str
    sha256: str
    conversations: int
    refused: int
    documents: int
    duplicates: int
    with_bos: int
    lengths: dict[str, int]
    images: Images = ()
    held_out_images: Images = ()

    @property
    def samples(self) -> tuple[torch.Tensor, Images]:
        return self.token_ids, self.images

    @property
    def held_out_samples(self) -> tuple[torch.Tensor, Images]:
        return self.held_out, self.held_out_images

    @property
    def num_tokens(self) -> int:
        return self.token_ids.numel() + self.held_out.numel()

    @property
    def num_images(self) -> int:
        return sum(sample.num_images for sample in (*self.images, *self.held_out_images))


def no_calibration() -> Calibration:
    samples = torch.empty(0, 0, dtype=torch.int64)
    return Calibration(samples, samples, "none", _digest(samples, samples), 0, 0, 0, 0, 0, {})


def load_calibration(
    source: str | Path | None,
    tokenizer: Any,
    *,
    num_samples: int,
    seq_len: int,
    seed: int,
    held_out: int = 0,
    evaluation: Path | None = None,
) -> Calibration:
    """Texts of `source`, shuffled by `seed`, tokenized, joined and cut into equal samples.

    A source that holds less than what is asked for is used whole, and shared in the same proportion.

    Args:
        source: a `.txt` file (texts divided by blank lines), a `.jsonl` or `.json` file (`text`, `messages`
            or `conversations` in each row), a hub dataset id, or None for the bundled stories. Only a hub id
            touches the network.
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
    name, documents = read_documents(STORIES if source is None else source)
    if not documents:
        raise BadInput(f"calibration data {name} is empty: give a file with text in it")
    unique = deduplicate(documents, plain_text)
    random.Random(seed).shuffle(unique)
    num_documents = num_samples + held_out
    read = _Tokenized(unique, tokenizer, num_samples * seq_len, held_out * seq_len)
    if read.num_tokens < min(LEAST_TOKENS, num_samples * seq_len):
        raise BadInput(
            f"calibration data {name} holds {read.num_tokens} tokens for this model's tokenizer, and at "
            f"least {LEAST_TOKENS} are needed: give more text"
        )
    length = min(seq_len, read.num_tokens)
    rows = min(num_documents, read.num_tokens // length)
    wanted = max(1, rows * num_samples // num_documents)
    samples, others = read.divided(wanted, held_out, length)
    if evaluation is not None:
        texts = [plain_text(document) for document in read_documents(evaluation)[1]]
        check_leakage(name, [plain_text(text) for text in read.used], evaluation.name, texts)
    return Calibration(
        token_ids=samples,
        held_out=others,
        source=name,
        sha256=_digest(samples, others),
        conversations=read.conversations,
        refused=read.refused,
        documents=len(read.used),
        duplicates=len(documents) - len(unique),
        with_bos=sum(ids[:1] == [tokenizer.bos_token_id] for ids in read.token_ids),
        lengths=length_histogram([len(ids) for ids in read.token_ids]),
    )


def _digest(samples: torch.Tensor, others: torch.Tensor) -> str:
    digest, length = hashlib.sha256(), samples.shape[1]
    for part in (samples, others):
        digest.update(f"{part.shape[0]}x{length}:".encode() + part.numpy().astype("<i8").tobytes())
    return digest.hexdigest()


class _Tokenized:
    """Documents from the first on, tokenized up to `wanted` tokens, and others up to `held_out` tokens."""

    def __init__(self, documents: Sequence[Document], tokenizer: Any, wanted: int, held_out: int):
        self.used: list[Document] = []
        self.token_ids: list[list[int]] = []
        self.num_tokens = self.conversations = self.refused = 0
        enough = None  # tokens in all, once those wanted are there
        for document in documents:
            if enough is None and self.num_tokens >= wanted:
                enough = self.num_tokens + held_out
            if enough is not None and self.num_tokens >= enough:
                break
            ids, templated = tokenize(document, tokenizer)
            if ids is None:
                self.refused += 1
                continue
            self.used.append(document)
            self.token_ids.append(ids)
            self.num_tokens += len(ids)
            self.conversations += templated

    def divided(
        self, num_samples: int, held_out: int, length: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Samples of `length` ids, and held-out ones from the documents after theirs."""
        first: list[int] = []
        rest: list[int] = []
        for ids in self.token_ids:
            if len(first) < num_samples * length:
                first += ids
            else:
                rest += ids
        return _cut(first, num_samples, length), _cut(rest, held_out, length)


def _cut(token_ids: list[int], num_samples: int, length: int) -> torch.Tensor:
    rows = min(num_samples, len(token_ids) // length)
    return torch.tensor(token_ids[: rows * length], dtype=torch.int64).view(rows, length)


def tokenize(document: Document, tokenizer: Any) -> tuple[list[int] | None, bool]:
    """Token ids of a document, and whether the chat template made them; None where it refuses to."""
    from jinja2 import TemplateError

    if isinstance(document, str):
        return tokenizer(document, verbose=False)["input_ids"], False
    if getattr(tokenizer, "chat_template", None):
        try:
            text = tokenizer.apply_chat_template(document, tokenize=False)
        except TemplateError:
            return None, False
        # The template writes the special tokens itself.
        return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"], True
    return tokenizer(plain_text(document), verbose=False)["input_ids"], False
