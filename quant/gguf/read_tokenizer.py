"""The tokenizer of a GGUF file, built from its keys: byte-level BPE and SentencePiece-style BPE.

As src/llama-vocab.cpp reads them: `tokenizer.ggml.model` says which, `tokenizer.ggml.pre` how text is cut,
token types what is matched whole. SentencePiece merges pairs of higher score first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ...base.errors import BadInput
from ..base.plain_tokenizer import PlainTokenizer, processor_template
from .container import GgufFile
from .keys import (
    END_KINDS,
    OLLAMAS_ENDS,
    TEMPLATE,
    TOKENIZER,
    TOKENIZER_KEYS,
    HeaderKeys,
    shortened,
)
from .tokenizer import ADDS_BOS, ADDS_SEPARATOR, EXPRESSIONS, IGNORES_MERGES, RAW_TEXT

_REMEDY = "put the model's tokenizer.json next to the file"
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4  # types of tokens in llama.cpp
_SPACE = "\u2581"
_SPECIAL = {
    "bos_token": "bos",
    "eos_token": "eos",
    "unk_token": "unknown",
    "pad_token": "padding",
    "sep_token": "seperator",
    "mask_token": "mask",  # the key's own spelling
}
# Of a SentencePiece vocabulary that does not say them.
_SENTENCEPIECE_IDS = {"bos": 1, "eos": 2, "unknown": 0}
# Of Phi 3, white space after these stays; after the other matched tokens it goes.
_PHI3_KEEPS_SPACE = ("<unk>", "<s>", "<|endoftext|>")
# Keys that `end_tokens` reads, and keys of the other kind of vocabulary.
_READ_ELSEWHERE = (
    *(f"{kind}_token_id" for kind in END_KINDS),
    *(OLLAMAS_ENDS, "merges", "scores", "add_space_prefix"),
)


def own_tokenizer(file: GgufFile) -> PlainTokenizer | None:
    """A file's own tokenizer, as llama.cpp takes it, with the folder's chat template if it has none. None
    where it is not read here and a tokenizer.json is next to it; else BadInput."""
    folder = file.path.parent
    try:
        tokenizer = read_tokenizer(file)
    except BadInput:
        if (folder / "tokenizer.json").is_file():
            return None
        raise
    tokenizer.chat_template = tokenizer.chat_template or processor_template(folder)
    return tokenizer


def read_tokenizer(file: GgufFile) -> PlainTokenizer:
    """The tokenizer that a file describes; BadInput: there is none, or of an unknown kind or key."""
    keys = _Keys(file.path, file.metadata)
    if keys.model not in ("gpt2", "llama", "gemma4"):
        raise BadInput(
            f"{file.path} has a tokenizer of kind {keys.model!r}, which is not read here (gpt2, llama and "
            f"gemma4 are): {_REMEDY}"
        )
    raw = keys.model == "llama" or keys.pre in RAW_TEXT
    tokenizer = _sentencepiece(keys) if keys.model == "llama" else _bpe(keys, raw=raw)
    tokenizer.add_special_tokens(_added(keys, (_UNKNOWN, _CONTROL)))
    tokenizer.add_tokens(_added(keys, (_USER_DEFINED,)))
    special = {name: keys.special(kind) for name, kind in _SPECIAL.items()}
    special = {name: text for name, text in special.items() if text is not None}
    known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    tokenizer.add_special_tokens([text for text in special.values() if text not in known])
    if (around := _around(keys, special)) is not None:
        tokenizer.post_processor = around
    keys.header.check(_READ_ELSEWHERE)
    return PlainTokenizer(
        tokenizer,
        special,
        keys.templates(),
        partial(_whole, tokenizer, special),
        # llama.cpp adds BOS to a chat too, and Unsloth takes it out of the template for that.
        renders_bos=keys.adds_bos and "bos_token" in special,
    )


def _whole(tokenizer: Any, special: Mapping[str, str]) -> Any:
    """transformers' tokenizer over the same backend, whose deep copy, through JSON, would take a second."""
    from transformers import PreTrainedTokenizerFast

    tokenizer.__deepcopy__ = lambda memo: tokenizer
    try:
        return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
    finally:
        del tokenizer.__deepcopy__


class _Keys:
    """The `tokenizer.*` keys of a file, each checked when it is asked for."""

    def __init__(self, path: Path, metadata: Mapping[str, Any]):
        self.path, self._metadata = path, metadata
        self.header = HeaderKeys(path, metadata, TOKENIZER, TOKENIZER_KEYS, _REMEDY)
        self.model = _text(self.header.get("model"))
        self.pre = _text(self.header.get("pre")) or "default"
        if self.model == "gemma4":
            self.pre = "gemma4"
        elif self.model == "gpt2" and self.pre not in EXPRESSIONS:
            what = f"cuts text by the pre-tokenizer {self.pre!r}, which is not known here"
            raise BadInput(f"{path} {what}: {_REMEDY}")
        # Tokens without a text have one of their id, as in llama.cpp.
        self.tokens = [text or f"[EMPTY_{i}]" for i, text in enumerate(self.list("tokens", str))]
        if not self.tokens:
            raise BadInput(f"{path} holds no tokenizer: {_REMEDY}")
        self.vocab = {text: index for index, text in enumerate(self.tokens)}
        if len(self.vocab) < len(self.tokens):
            index = next(i for i, text in enumerate(self.tokens) if self.vocab[text] != i)
            text = self.tokens[index]
            raise BadInput(
                f"{path}: the tokens {index} and {self.vocab[text]} are both {shortened(text)}: {_REMEDY}"
            )
        self.types: list[int] = self.list("token_type", int)
        count = len(self.tokens)
        if self.types and len(self.types) != count:
            raise BadInput(f"{path}: {count} tokens and {len(self.types)} types: it is damaged")

    def text(self, key: str) -> str | None:
        return _text(self._metadata.get(key))

    def templates(self) -> str | dict[str, str] | None:
        """The chat template, or several by name, as transformers has them."""
        names = (key.partition(f"{TEMPLATE}.")[2] for key in self._metadata)
        named = {name: self.text(f"{TEMPLATE}.{name}") or "" for name in names if name}
        default = self.text(TEMPLATE)
        return ({} if default is None else {"default": default}) | named if named else default

    def flag(self, name: str, default: bool) -> bool:
        return bool(self.header.get(name, default))

    @property
    def adds_bos(self) -> bool:
        return self.flag("add_bos_token", self.model == "llama" or self.pre in ADDS_BOS)

    def list(self, name: str, of: type) -> list[Any]:
        value = self.header.get(name, [])
        if not isinstance(value, list) or not all(isinstance(item, of) for item in value):
            raise BadInput(f"{self.path}: tokenizer.ggml.{name} is no list of {of.__name__}")
        return value

    def special(self, kind: str) -> str | None:
        """The text of a special token; None where the file names none, or one that there is not."""
        default = _SENTENCEPIECE_IDS.get(kind) if self.model == "llama" else None
        number = self.header.get(f"{kind}_token_id", default)
        if number is None:
            return None
        if not isinstance(number, int):
            raise BadInput(f"{self.path}: tokenizer.ggml.{kind}_token_id is {number!r}, no token's")
        return self.tokens[number] if 0 <= number < len(self.tokens) else None


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _bpe(keys: _Keys, *, raw: bool) -> Any:
    """Byte-level BPE; with `raw`, tokens are spelled in the text's own characters."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    vocab = keys.vocab
    merges = [_pair(line) for line in keys.list("merges", str)]
    options: dict[str, Any] = {"byte_fallback": raw, "ignore_merges": keys.pre in IGNORES_MERGES}
    if raw:
        # llama.cpp takes a run of newlines whole.
        lengths = sorted(len(text) for text in vocab if text and not text.strip("\n"))
        merges += [("\n" * cut, "\n" * (size - cut)) for size in lengths for cut in range(1, size)]
        merges = _of_tokens(merges, vocab)
        options |= {"unk_token": keys.special("unknown"), "fuse_unk": True}
    try:
        merging = models.BPE(vocab=vocab, merges=merges, **options)
    except Exception:  # of what is no token; the package has no type of its own for it
        merging = models.BPE(vocab=vocab, merges=_of_tokens(merges, vocab), **options)
    tokenizer = Tokenizer(merging)
    split = partial(pre_tokenizers.Split, behavior="isolated")
    cuts: list[Any] = [split(Regex(expression)) for expression in EXPRESSIONS[keys.pre]]
    if raw:
        tokenizer.normalizer = normalizers.Replace(" ", _SPACE)
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
        )
    else:
        cuts.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
        tokenizer.decoder = decoders.ByteLevel()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(cuts)
    return tokenizer


def _sentencepiece(keys: _Keys) -> Any:
    """SentencePiece-style BPE: merges from scores, spaces as U+2581, bytes for what no token spells."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    vocab = keys.vocab
    merges, unknown = _scored_merges(keys, vocab), keys.special("unknown")
    options: dict[str, Any] = {"unk_token": unknown, "fuse_unk": True, "byte_fallback": True}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, **options))
    prefix = keys.flag("add_space_prefix", True)
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend(_SPACE)] * prefix + [normalizers.Replace(" ", _SPACE)]
    )
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(steps + [decoders.Strip(" ", 1, 0)] * prefix)
    return tokenizer


def _scored_merges(keys: _Keys, vocab: Mapping[str, int]) -> list[tuple[str, str]]:
    """Every pair of tokens that makes a token, the highest score first; of equal scores the lower id."""
    scores, count = keys.list("scores", float), len(keys.tokens)
    if len(scores) != count:
        raise BadInput(f"{keys.path}: {count} tokens and {len(scores)} scores: it is damaged")
    order = sorted(vocab.values(), key=lambda index: (-scores[index], index))
    return [
        (left, right)
        for text in map(keys.tokens.__getitem__, order)
        for cut in range(1, len(text))
        if (left := text[:cut]) in vocab and (right := text[cut:]) in vocab
    ]


def _of_tokens(
    merges: Sequence[tuple[str, str]], vocab: Mapping[str, int]
) -> list[tuple[str, str]]:
    return [(a, b) for a, b in merges if a in vocab and b in vocab and a + b in vocab]


def _pair(line: str) -> tuple[str, str]:
    cut = line.find(" ", 1)
    return line[:cut], line[cut + 1 :]


def _added(keys: _Keys, types: Sequence[int]) -> list[Any]:
    """Tokens that are matched whole, before anything else is done to a text."""
    from tokenizers import AddedToken

    name = (keys.text("general.name") or "").lower()
    is_phi3 = "phi-3" in name or "phi3" in name
    return [
        AddedToken(
            text,
            normalized=False,
            special=kind != _USER_DEFINED,
            rstrip=is_phi3 and text not in _PHI3_KEEPS_SPACE,
        )
        for text, kind in zip(keys.tokens, keys.types, strict=False)
        if kind in types and text
    ]


def _around(keys: _Keys, special: Mapping[str, str]) -> Any:
    """The post-processor that puts BOS, EOS and a separator around a text; None where there is none."""
    from tokenizers import processors

    before, after = [], []
    if keys.adds_bos:
        before.append(special.get("bos_token"))
    if keys.flag("add_eos_token", False):
        after.append(special.get("eos_token"))
    if keys.flag("add_sep_token", keys.pre in ADDS_SEPARATOR):
        after.append(special.get("sep_token"))
    around = [text for text in (*before, *after) if text is not None]
    if not around:
        return None
    single = [*(text for text in before if text), "$A", *(text for text in after if text)]
    return processors.TemplateProcessing(
        single=single, special_tokens=[(text, keys.tokens.index(text)) for text in set(around)]
    )
