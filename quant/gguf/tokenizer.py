"""A `tokenizer.json` as GGUF keys: SentencePiece-style BPE (`llama`) and byte-level BPE (`gpt2`)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..base.errors import BadInput
from ..model.checkpoint import read_json
from .pre_tokenizers import EXPRESSIONS, name_of

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)


def tokenizer_keys(folder: Path, vocab_size: int) -> dict[str, Any]:
    """The `tokenizer.*` keys for the tokenizer of a checkpoint.

    Args:
        folder: holds `tokenizer.json`.
        vocab_size: rows of the embedding; ids beyond the tokenizer's become unused tokens.

    Raises:
        BadInput: no tokenizer.json, a kind that llama.cpp's two models do not cover, or more tokens than
            rows.
    """
    path = folder / "tokenizer.json"
    content = read_json(path)
    model = content.get("model") or {}
    if model.get("type") != "BPE":
        raise BadInput(f"{path}: a {model.get('type')} tokenizer cannot be written as GGUF")
    vocab: dict[str, int] = dict(model["vocab"])
    merges = [m.split(" ") if isinstance(m, str) else m for m in model["merges"]]
    added = {int(token["id"]): token for token in content.get("added_tokens", [])}
    texts = {token_id: text for text, token_id in vocab.items()}
    texts |= {token_id: token["content"] for token_id, token in added.items()}
    if max(texts) >= vocab_size:
        raise BadInput(f"{path} has ids up to {max(texts)}, the embedding has {vocab_size} rows")
    byte_level = not model.get("byte_fallback")
    unknown = vocab.get(model.get("unk_token") or "")
    keys: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2" if byte_level else "llama",
        "tokenizer.ggml.pre": _pre_tokenizer(path, content) if byte_level else "default",
        "tokenizer.ggml.tokens": [texts.get(i, f"[PAD{i}]") for i in range(vocab_size)],
        "tokenizer.ggml.token_type": [
            _token_type(i, texts.get(i), added.get(i), i == unknown) for i in range(vocab_size)
        ],
    }
    if byte_level:
        keys["tokenizer.ggml.merges"] = [f"{left} {right}" for left, right in merges]
    else:
        # llama.cpp merges the pair of highest score first: the earlier a merge, the higher its score.
        rank: dict[str, int] = {}
        for left, right in merges:
            rank.setdefault(left + right, len(rank))
        keys["tokenizer.ggml.scores"] = [
            float(-rank.get(texts.get(i, ""), 0)) for i in range(vocab_size)
        ]
        keys["tokenizer.ggml.add_space_prefix"] = _adds_a_space(content)
        if unknown is not None:
            keys["tokenizer.ggml.unknown_token_id"] = unknown
    return keys | _special_keys(folder)


def _special_keys(folder: Path) -> dict[str, Any]:
    """Special token ids, add-BOS and add-EOS flags, and the chat template."""
    from transformers import AutoTokenizer

    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # a missing or broken file fails in many ways in there
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise BadInput(f"{folder} has no usable tokenizer: {reason}") from error
    ids = {
        "bos": tokenizer.bos_token_id,
        "eos": tokenizer.eos_token_id,
        "padding": tokenizer.pad_token_id,
    }
    keys: dict[str, Any] = {
        f"tokenizer.ggml.{name}_token_id": int(number)
        for name, number in ids.items()
        if number is not None
    }
    sample = tokenizer("a").input_ids
    keys["tokenizer.ggml.add_bos_token"] = bool(sample) and sample[0] == ids["bos"]
    keys["tokenizer.ggml.add_eos_token"] = len(sample) > 1 and sample[-1] == ids["eos"]
    if isinstance(tokenizer.chat_template, str):
        keys["tokenizer.chat_template"] = tokenizer.chat_template
    return keys


def _token_type(token_id: int, text: str | None, added: Any, ends_in_placeholder: bool) -> int:
    if text is None:
        return _UNUSED
    if ends_in_placeholder:
        return _UNKNOWN
    if added is not None:
        return _CONTROL if added.get("special") else _USER_DEFINED
    is_byte = len(text) == 6 and text.startswith("<0x") and text.endswith(">")
    return _BYTE if is_byte else _NORMAL


def _pre_tokenizer(path: Path, content: dict[str, Any]) -> str:
    """llama.cpp's name of the pre-tokenizer."""
    steps = content.get("pre_tokenizer") or {}
    steps = steps.get("pretokenizers", [steps])
    expressions = [expression for step in steps for expression in _expressions(step)]
    name = None
    if steps and steps[-1].get("type") == "ByteLevel" and None not in expressions:
        ignores_merges = bool(content["model"].get("ignore_merges"))
        name = name_of(map(str, expressions), ignores_merges=ignores_merges)
    if name is None:
        told = [step.get("pattern", step.get("type")) for step in steps]
        raise BadInput(
            f"{path} splits text in a way that is not known as a GGUF pre-tokenizer ({json.dumps(told)}): "
            f"known are {', '.join(EXPRESSIONS)}"
        )
    return name


def _expressions(step: dict[str, Any]) -> tuple[str | None, ...]:
    """The expressions by which a step of a tokenizer.json cuts a text; None is one that cannot be said so."""
    match step:
        case {"invert": True}:
            return (None,)
        case {"type": "Split", "pattern": {"Regex": str(expression)}, "behavior": "Isolated"}:
            return (expression,)
        case {"type": "Digits"}:
            return (r"\p{N}" if step.get("individual_digits") else r"\p{N}+",)
        case {"type": "ByteLevel"}:
            return EXPRESSIONS["gpt-2"] if step.get("use_regex", True) else ()
    return (None,)


def _adds_a_space(content: dict[str, Any]) -> bool:
    """Whether the tokenizer adds a prefix space."""
    normalizer = content.get("normalizer") or {}
    steps = normalizer.get("normalizers", [normalizer])
    if any(step.get("type") == "Prepend" for step in steps):
        return True
    pre_tokenizer = content.get("pre_tokenizer") or {}
    return (
        pre_tokenizer.get("type") == "Metaspace"
        and pre_tokenizer.get("prepend_scheme", "always") != "never"
    )
