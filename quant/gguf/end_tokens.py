"""Tokens that end an answer, by the keys of a GGUF file and by the texts that llama.cpp knows.

As llama.cpp's src/llama-vocab.cpp collects them (autumn 2026): every EOS, EOT and EOM token, and every
token of certain texts. A file has one key of each kind; further end tokens must have such texts.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ...base.errors import BadInput
from .keys import TOKENIZER

OLLAMAS_ENDS = "eos_token_ids"
"""Ollama's key for all end tokens of a model."""
END_KINDS = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
# llama.cpp takes the first token of these texts where the file has no key of the kind.
_BY_TEXT = {
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}
_ENDS: frozenset[str] = frozenset({
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>",
    "<end_of_turn>", "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]",
    "<|end_of_text|>", "<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>", "[e~[",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
})  # fmt: skip
_WANTED = _ENDS.union(*_BY_TEXT.values())
_CONTROL = 3


def end_tokens(metadata: Mapping[str, Any]) -> tuple[int, ...]:
    """Ids of the tokens that end an answer, the EOS token first; none without a vocabulary or keys."""
    tokens = _list(metadata, "tokens")
    texts = {text: tokens.index(text) for text in _WANTED.intersection(tokens)}
    default = 2 if metadata.get(f"{TOKENIZER}.model") == "llama" else None
    named = {kind: metadata.get(f"{TOKENIZER}.{kind}_token_id") for kind in END_KINDS}
    if named["eos"] is None:
        named["eos"] = default
    for kind, candidates in _BY_TEXT.items():
        if named[kind] is None:
            named[kind] = min((texts[text] for text in candidates if text in texts), default=None)
    by_text = {texts[text] for text in _known_ends(texts, _list(metadata, "token_type"))}
    ids = (*named.values(), *_list(metadata, OLLAMAS_ENDS), *sorted(by_text))
    inside = (number for number in ids if isinstance(number, int) and 0 <= number < len(tokens))
    return tuple(dict.fromkeys(inside))


def _known_ends(texts: Mapping[str, int], types: Sequence[Any]) -> frozenset[str]:
    """The texts of a vocabulary that end an answer."""
    ends = _ENDS & texts.keys()
    if ("<|call|>" in ends and "<|return|>" in ends) or {"<|calls|>", "<|flush|>"} <= ends:
        ends -= {"<|end|>"}  # of a message in Harmony's and Solar's templates, not of the answer
    if "</s>" in ends:
        # Gemma's vocabulary has the HTML tag, as a token that is no control token.
        number = texts["</s>"]
        if number < len(types) and types[number] != _CONTROL:
            ends -= {"</s>"}
    return ends


def end_keys(ids: Collection[int], eos: int | None, tokens: Sequence[str]) -> dict[str, int]:
    """The keys that keep end tokens in a file, next to the EOS key.

    Args:
        ids: every token that ends an answer.
        eos: the tokenizer's EOS token, which has its own key.
        tokens: the vocabulary.

    Raises:
        BadInput: more end tokens than keys, of texts that llama.cpp does not know.
    """
    further = [number for number in sorted(ids) if number != eos]
    unknown = [number for number in further if tokens[number] not in _ENDS]
    if len(unknown) > 2:
        shown = ", ".join(tokens[number] for number in unknown)
        raise BadInput(f"GGUF has keys for two end tokens next to EOS, and the model has {shown}")
    chosen = [*unknown, *(number for number in further if number not in unknown)]
    return {
        f"{TOKENIZER}.{kind}_token_id": number
        for kind, number in zip(("eot", "eom"), chosen, strict=False)
    }


def _list(metadata: Mapping[str, Any], name: str) -> list[Any]:
    value = metadata.get(f"{TOKENIZER}.{name}")
    return value if isinstance(value, list) else []
