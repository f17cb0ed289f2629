"""Tokenizers that transformers builds by the class that a folder declares, against its tokenizer.json.

A class of transformers 5 with a constructor of its own takes the vocabulary and merges of a tokenizer.json,
and has its own kind of model, normalizer and pre-tokenizer, whatever the file has. A Llama-type model that
declares `GPT2Tokenizer` and splits numbers otherwise then gets other ids, which decode to the same text
(huggingface/transformers#45920, #45812, #44462).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..base.plain_tokenizer import quiet

PROBE = "Don't  pay 12345.50€,\n\nélève! IT'S (x_y)==42;\t日本語のテスト\r\n  end. \U0001f98a\n"
_SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token")


def as_in_file(tokenizer: Any, folder: Path) -> Any:
    """The tokenizer, or one of the folder's tokenizer.json where its class cuts texts in another way."""
    file, backend = folder / "tokenizer.json", getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or not file.is_file() or not _differs(backend, file):
        return tokenizer
    if tokenizer.init_kwargs.get("add_prefix_space"):  # the folder's option, which the class takes
        return tokenizer
    from transformers import PreTrainedTokenizerFast

    plain = quiet(PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True))
    texts = [PROBE[at:] for at in range(0, len(PROBE), 7)]
    if plain(texts).input_ids == tokenizer(texts).input_ids:
        return tokenizer
    vocabulary = plain.get_vocab()
    for name in _SPECIAL:  # of which a class has defaults
        default = getattr(tokenizer, name)
        if getattr(plain, name) is None and default in vocabulary:
            setattr(plain, name, default)
    return plain


def _differs(backend: Any, file: Path) -> bool:
    """True if the kind of model, or what splits a text for byte-level BPE, is another than the file's."""
    from tokenizers import Tokenizer

    parts = _head(file.read_text(encoding="utf-8"))
    kind = parts["model"].get("type")
    if kind is not None and kind != type(backend.model).__name__:
        return True
    if "ByteLevel" not in json.dumps(parts.get("pre_tokenizer")):
        return False  # SentencePiece's, which classes write in several ways
    empty = {"type": "BPE", "vocab": {}, "merges": []}
    named = {name: parts.get(name) for name in ("normalizer", "pre_tokenizer")}
    written = Tokenizer.from_str(
        json.dumps({"version": "1.0", "added_tokens": [], **named, "model": empty})
    )
    return any(_state(getattr(written, name)) != _state(getattr(backend, name)) for name in named)


def _state(part: Any) -> bytes:
    return b"" if part is None else part.__getstate__()


def _head(text: str) -> dict[str, Any]:
    """The parts of a tokenizer.json before the vocabulary, which is most of it; all if that is not last."""
    head = text.partition('"vocab"')[0].rstrip().removesuffix(",")
    try:
        parts = json.loads(head + "}}")
    except ValueError:
        parts = {}
    return parts if "pre_tokenizer" in parts else json.loads(text)
