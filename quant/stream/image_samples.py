"""Calibration samples with images: pairs through the model's processor, joined, and filled up with text.

Pairs are rows of a `.jsonl` or `.json` file with `text` or `messages`, and paths of images, LLaVA's too. As
many whole pairs as fit a sample are joined; the rest of it is text, and so are later samples.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ...base.atomic_io import expanded
from ...base.errors import BadInput, first_line
from .calibration import (
    Calibration,
    ImageInputs,
    check_leakage,
    deduplicate,
    length_histogram,
    tokenize,
)
from .sources import MIXED, Document, document_of, numbered_rows, plain_text, read_documents

if TYPE_CHECKING:
    from PIL.Image import Image


MARK = "<image>"  # where an image goes in a text; LLaVA's word for it
_IDS, _MASK = "input_ids", "attention_mask"


@dataclass(frozen=True, slots=True)
class Pair:
    """A row of `where`, with `<image>` for each image placed in its text; the others come before it."""

    document: Document
    images: tuple[Path, ...]
    where: str

    def opened(self) -> list[Image]:
        """The images in RGB; BadInput where one is missing, or no picture that Pillow reads."""
        from PIL import Image

        pictures = []
        for path in self.images:
            try:
                with Image.open(path) as picture:
                    pictures.append(picture.convert("RGB"))
            except FileNotFoundError as error:
                raise BadInput(f"{self.where}: there is no image {path}") from error
            except Exception as error:  # Pillow's decoders raise whatever they meet
                raise BadInput(f"{self.where}: {path} is no image: {first_line(error)}") from error
        return pictures

    def messages(self) -> list[dict[str, Any]]:
        """A conversation whose turns hold parts of type `image` and `text`, as chat templates take them."""
        turns = self.document
        if isinstance(turns, str):
            turns = [{"role": "user", "content": turns}]
        left = len(self.images) - plain_text(self.document).count(MARK)
        messages: list[dict[str, Any]] = []
        for turn in turns:
            here = left if turn["role"] == "user" else 0
            left -= here
            pieces = turn["content"].split(MARK)
            parts: list[dict[str, str]] = [{"type": "image"}] * here
            for number, piece in enumerate(pieces):
                parts += [{"type": "image"}] * (number > 0)
                parts += [{"type": "text", "text": piece}] if piece else []
            messages.append({"role": turn["role"], "content": parts})
        return messages


def read_pairs(source: str | Path) -> tuple[list[Pair], list[Document]] | None:
    """The rows with images, and the texts of the others; None where no row has images."""
    path = expanded(source)
    if path.suffix not in (".jsonl", ".json") or not path.is_file():
        return None
    rows = list(numbered_rows(path))
    if not any(_images(row) for _, row in rows):
        return None
    pairs: list[Pair] = []
    texts: list[Document] = []
    for where, row in rows:
        images = _images(row)
        document = document_of(_without_parts(row, where), where)
        if not images:
            texts += [document] if document else []
            continue
        if not isinstance(images, list) or not all(isinstance(name, str) for name in images):
            raise BadInput(f"{where}: 'images' holds no list of paths")
        paths = []
        for name in images:
            if "://" in name or name.startswith("data:"):
                raise BadInput(
                    f"{where}: {name[:60]!r} is no path: save the picture next to the file"
                )
            try:
                paths.append(path.parent / expanded(name))
            except BadInput as error:
                raise BadInput(f"{where}: {error}") from error
        pairs.append(Pair(document, tuple(paths), where))
        if plain_text(document).count(MARK) > len(images):
            raise BadInput(f"{where} places more images with {MARK} than its {len(images)}")
    return pairs, texts


def _images(row: Any) -> Any:
    """Images that a row names: `images`, or LLaVA's `image`, one path."""
    if not isinstance(row, dict):
        return None
    single = row.get("image")
    return row.get("images") or ([single] if isinstance(single, str) and single else single)


def _without_parts(row: Any, where: str) -> Any:
    """The row with contents that are lists of parts, OpenAI's form, as text with marks."""
    if not isinstance(row, dict) or not isinstance(row.get("messages"), list):
        return row
    turns = []
    for turn in row["messages"]:
        content = turn.get("content") if isinstance(turn, dict) else None
        text = ""
        for part in content if isinstance(content, list) else ():
            kind = part.get("type") if isinstance(part, dict) else None
            if kind != "image" and not (kind == "text" and isinstance(part.get("text"), str)):
                raise BadInput(
                    f"{where} has a part that is neither {{'type': 'text', 'text': …}} nor "
                    "{'type': 'image'}"
                )
            text += MARK if kind == "image" else part["text"]
        turns.append({**turn, "content": text} if isinstance(content, list) else turn)
    return {**row, "messages": turns}


@dataclass(slots=True)
class _Sample:
    token_ids: list[int]
    images: ImageInputs


@dataclass(slots=True)
class _Text:
    """Token ids of texts, taken from the first on."""

    documents: Iterator[Document]
    tokenizer: Any
    ids: list[int] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    used: list[str] = field(default_factory=list)

    def take(self, count: int) -> list[int]:
        """The next `count` ids, or what is left."""
        while len(self.ids) < count and (document := next(self.documents, None)) is not None:
            ids, _ = tokenize(document, self.tokenizer)
            if ids:
                self.ids += ids
                self.lengths.append(len(ids))
                self.used.append(plain_text(document))
        taken, self.ids = self.ids[:count], self.ids[count:]
        return taken


class PairEncoder:
    """Token ids and pixel tensors of joined pairs, by the model's processor and chat template."""

    def __init__(self, processor: Any, tokenizer: Any):
        self._processor, self._tokenizer = processor, tokenizer
        self._image_token = str(getattr(processor, "image_token", MARK))
        self._template = getattr(processor, "chat_template", None) or getattr(
            tokenizer, "chat_template", None
        )

    @property
    def templated(self) -> bool:
        return self._template is not None

    def text(self, pair: Pair) -> str:
        """A pair's text with the model's placeholder for each image; BadInput where the template fails."""
        messages = pair.messages()
        if not self.templated:
            return "\n".join(self._plain(message["content"]) for message in messages)
        for form in (messages, [m | {"content": self._plain(m["content"])} for m in messages]):
            try:
                text = self._tokenizer.apply_chat_template(
                    form, tokenize=False, chat_template=self._template
                )
            except Exception as error:  # templates raise what they like
                raise BadInput(
                    f"{pair.where}: the chat template refuses it: {first_line(error)}"
                ) from error
            if text.count(self._image_token) == len(pair.images):
                return text
        raise BadInput(
            f"{pair.where}: the chat template writes {text.count(self._image_token)} placeholders "
            f"{self._image_token!r} for {len(pair.images)} images"
        )

    def _plain(self, parts: Sequence[dict[str, str]]) -> str:
        return "".join(part.get("text", self._image_token) for part in parts)

    def encode(self, pairs: Sequence[Pair]) -> _Sample:
        """One sample of joined pairs; BadInput where the processor refuses an image."""
        pictures = [picture for pair in pairs for picture in pair.opened()]
        try:
            made = self._processor(
                text=["".join(self.text(pair) for pair in pairs)],
                images=pictures,
                return_tensors="pt",
                add_special_tokens=not self.templated,
            )
        except BadInput:
            raise
        except Exception as error:  # the processors of transformers may fail in any way
            raise BadInput(
                f"{pairs[0].where}: the model's processor refuses it: {first_line(error)}"
            ) from error
        tensors = {name: value for name, value in made.items() if isinstance(value, torch.Tensor)}
        token_ids = tensors.pop(_IDS)[0].tolist()
        tensors.pop(_MASK, None)  # all ones
        return _Sample(token_ids, ImageInputs(tensors, len(pictures)))


def image_calibration(
    name: str,
    pairs: Sequence[Pair],
    texts: Sequence[Document],
    processor: Any,
    tokenizer: Any,
    *,
    num_samples: int,
    seq_len: int,
    seed: int,
    held_out: int = 0,
    evaluation: Path | None = None,
) -> Calibration:
    """Samples of joined pairs filled up with text, then of text. BadInput: misfit, or overlap."""
    rows = deduplicate(pairs, lambda pair: f"{plain_text(pair.document)} {pair.images}")
    documents = deduplicate(texts, plain_text)
    mixing = random.Random(seed)
    mixing.shuffle(rows)
    mixing.shuffle(documents)
    encoder = PairEncoder(processor, tokenizer)
    groups = _joined(rows, encoder, seq_len, num_samples + held_out)
    own = _Text(iter(documents), tokenizer)
    mixed = read_documents(MIXED)[1]
    random.Random(seed).shuffle(mixed)
    fill = _Text(iter(mixed), tokenizer)
    samples = [_filled(group, own, fill, seq_len) for group in groups]
    behind = _Text(own.documents, tokenizer, own.ids)
    share = len(samples) * held_out // (num_samples + held_out)
    share = min(len(samples) - 1, max(share, 1)) if held_out else 0
    chosen, others = samples[share:][:num_samples], samples[:share]
    chosen += _of_text(behind, seq_len, num_samples - len(chosen))
    others += _of_text(behind, seq_len, held_out - len(others))
    used = [plain_text(pair.document) for pair in rows] + own.used + fill.used + behind.used
    if evaluation is not None:
        against = [plain_text(document) for document in read_documents(evaluation)[1]]
        check_leakage(name, used, evaluation.name, against)
    ids, held_out_ids = (
        torch.tensor([s.token_ids for s in part], dtype=torch.int64).view(len(part), seq_len)
        for part in (chosen, others)
    )
    digest = hashlib.sha256()
    for sample in (*chosen, *others):
        digest.update(repr(sample.token_ids).encode())
        for key, tensor in sorted(sample.images.tensors.items()):
            digest.update(f"{key}{tuple(tensor.shape)}{tensor.dtype}".encode())
            digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    lengths = [len(group.token_ids) for group in groups]
    return Calibration(
        token_ids=ids,
        held_out=held_out_ids,
        source=name,
        sha256=digest.hexdigest(),
        conversations=len(rows) if encoder.templated else 0,
        refused=0,
        documents=len(rows) + len(own.lengths) + len(behind.lengths),
        duplicates=len(pairs) - len(rows) + len(texts) - len(documents),
        with_bos=sum(sample.token_ids[:1] == [tokenizer.bos_token_id] for sample in chosen),
        lengths=length_histogram([*lengths, *own.lengths, *behind.lengths]),
        images=tuple(sample.images for sample in chosen),
        held_out_images=tuple(sample.images for sample in others),
    )


def _joined(pairs: Sequence[Pair], encoder: PairEncoder, seq_len: int, most: int) -> list[_Sample]:
    """Join as many pairs in a sample as fit, in their order."""
    samples: list[_Sample] = []
    group: list[Pair] = []
    last: _Sample | None = None
    for pair in pairs:
        both = encoder.encode([*group, pair])
        if len(both.token_ids) <= seq_len:
            group, last = [*group, pair], both
            continue
        if last is not None:
            samples.append(last)
            both = encoder.encode([pair])
        if len(both.token_ids) > seq_len:
            raise BadInput(
                f"{pair.where} takes {len(both.token_ids)} tokens with its images, and a sample has "
                f"{seq_len}: give a larger --seq-len"
            )
        group, last = [pair], both
        if len(samples) == most:
            return samples
    return samples if last is None else [*samples, last]


def _filled(sample: _Sample, own: _Text, fill: _Text, seq_len: int) -> _Sample:
    """The sample with text after its pairs; what the processor says of each token is zero there."""
    given = len(sample.token_ids)
    more = own.take(seq_len - given)
    more += fill.take(seq_len - given - len(more))
    tensors = {
        name: torch.cat([tensor, tensor.new_zeros(1, len(more))], dim=1)
        if tuple(tensor.shape) == (1, given)
        else tensor
        for name, tensor in sample.images.tensors.items()
    }
    images = ImageInputs(tensors, sample.images.num_images)
    return _Sample([*sample.token_ids, *more], images)


def _of_text(text: _Text, seq_len: int, count: int) -> list[_Sample]:
    """At most `count` samples of text alone."""
    samples: list[_Sample] = []
    while len(samples) < count and len(ids := text.take(seq_len)) == seq_len:
        samples.append(_Sample(ids, ImageInputs()))
    return samples
