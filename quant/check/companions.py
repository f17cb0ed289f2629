"""Findings about the files next to the weights: tokenizer, chat template, generation config, end tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ...base.errors import BadInput
from ..model.checkpoint import read_json
from .contents import Contents
from .findings import Finding

_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json")


def companion_findings(contents: Contents) -> Iterator[Finding]:
    """Missing and contradictory companions; of a GGUF file its keys have them."""
    folder = contents.checkpoint.folder
    if contents.gguf is not None:
        if "tokenizer.ggml.tokens" not in contents.gguf.metadata:
            why = "the file has no tokenizer: llama.cpp cannot read text with it"
            yield Finding("missing-tokenizer", contents.gguf.path.name, why, "suspect")
        return
    if not any((folder / name).is_file() for name in _TOKENIZERS):
        why = f"none of {', '.join(_TOKENIZERS)} is there: servers cannot read text"
        yield Finding("missing-tokenizer", "tokenizer.json", why, "suspect")
    try:
        tokenizer = _read(folder, "tokenizer_config.json")
        generation = _read(folder, "generation_config.json")
        vocabulary = _read(folder, "tokenizer.json")
    except BadInput as error:
        yield Finding("damaged-json", str(folder), str(error))
        return
    has_template = "chat_template" in tokenizer or any(folder.glob("chat_template*"))
    if tokenizer and not has_template:
        yield Finding(
            "no-chat-template", "tokenizer_config.json", "there is no chat template", "note"
        )
    if not generation:
        why = "there is none: engines sample and end by their own defaults"
        yield Finding("no-generation-config", "generation_config.json", why, "note")
    yield from _end_tokens(contents.checkpoint.text_config, tokenizer, generation, vocabulary)


def _read(folder: Path, name: str) -> dict[str, Any]:
    return read_json(folder / name) if (folder / name).is_file() else {}


def _end_tokens(
    config: Mapping[str, Any],
    tokenizer: Mapping[str, Any],
    generation: Mapping[str, Any],
    vocabulary: Mapping[str, Any],
) -> Iterator[Finding]:
    """End tokens of config, generation config and tokenizer, which have to share one."""
    size, ids = config.get("vocab_size"), _ids(config.get("eos_token_id"))
    generated = _ids(generation.get("eos_token_id"))
    for token in sorted(ids | generated):
        if isinstance(size, int) and token >= size:
            why = f"end token {token} is beyond the vocabulary of {size:,}"
            yield Finding("token-beyond-vocabulary", "eos_token_id", why)
    if ids and generated and not ids & generated:
        why = (
            f"config.json ends with {sorted(ids)}, generation_config.json with {sorted(generated)}"
        )
        yield Finding("end-tokens-differ", "generation_config.json", why, "suspect")
    named = tokenizer.get("eos_token")
    text = named.get("content") if isinstance(named, Mapping) else named
    if not isinstance(text, str) or not vocabulary:
        return
    added = {
        entry.get("content"): entry.get("id") for entry in vocabulary.get("added_tokens") or ()
    }
    known = (vocabulary.get("model") or {}).get("vocab")
    token = added.get(text, known.get(text) if isinstance(known, Mapping) else None)
    listed = generated or ids
    if token is not None and listed and token not in listed | ids:
        why = f"the tokenizer ends with {text} ({token}), the configs with {sorted(listed | ids)}"
        yield Finding("end-tokens-differ", "tokenizer_config.json", why, "suspect")


def _ids(value: Any) -> set[int]:
    return {token for token in (value if isinstance(value, list) else [value]) if token is not None}
