r"""A `tokenizer.json` as GGUF keys: SentencePiece-style BPE (`llama`) and byte-level BPE (`gpt2`).

Pre-tokenizers of byte-level BPE have llama.cpp's names (`tokenizer.ggml.pre`): expressions that cut a text.

Each expression cuts every piece that those before it left: a match is a piece, and so is what lies between
two matches. Names and expressions are llama.cpp's (src/llama-vocab.cpp, October 2026); where it holds an
approximation, because its engine has no classes of letter case or no intersections, the expression here is
the one of the model's own tokenizer.json.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

from ...base.errors import BadInput, reported_as
from ..base.plain_tokenizer import processor_template
from ..model.checkpoint import read_json
from .keys import end_keys, template_keys

_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_GPT2 = (r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",)
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"


def _words(
    *,
    start: str = f"{_CONTRACTION}|",
    letters: str = r"\p{L}+",
    digits: str = r"\p{N}",
    symbols: str = r" ?[^\s\p{L}\p{N}]+[\r\n]*",
    spaces: str = _SPACES,
) -> str:
    return rf"{start}[^\r\n\p{{L}}\p{{N}}]?{letters}|{digits}|{symbols}|{spaces}"


def _cased_words(
    *, end: str = "", digits: str = r"\p{N}{1,3}", upper: str = _UPPER, lower: str = _LOWER
) -> str:
    """GPT-4o's expression and its relatives: a word ends before a capital that follows a small letter."""
    head = r"[^\r\n\p{L}\p{N}]?"
    return (
        rf"{head}[{upper}]*[{lower}]+{end}|{head}[{upper}]+[{lower}]*{end}|{digits}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
    )


_LLAMA3 = (_words(digits=r"\p{N}{1,3}"),)
_QWEN2 = (_words(),)
_GPT4O = (_cased_words(end=f"{_CONTRACTION}?"),)
_DIGITS_FIRST = (r"\p{N}", *_GPT2)
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"
_HAN_KANA = r"[一-龥぀-ゟ゠-ヿ]+"
_PUNCTUATED = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
)
_DEEPSEEK3 = (r"\p{N}{1,3}", _HAN_KANA, rf"{_PUNCTUATED}| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}")
# Letters that have a case, as DeepSeek's tokenizer.json lists them.
_CASED = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af"
    "\u0370-\u0373\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5"
    "\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba"
    "\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45"
    "\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe"
    "\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc"
    "\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139"
    "\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3"
    "\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06"
    "\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3"
    "\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df"
    "\U0001e900-\U0001e943"
)
_GROUPS_OF_THREE = r"\d{1,3}(?=(?:\d{3})*\b)"
_EVERY_GROUP_OF_THREE = r"\d{1,3}(?=(?:\d{3})*(?!\d))"
_CASCADE = "".join(rf"|\s{{{2**power}}}(?!\S)" for power in range(9, 1, -1))
_LINES = r"[^\n]+|[\n]+"

_LINE_END = r"\s*[\r\n]|\s+(?!\S)|\s+"
_QWEN35 = _words(letters=r"[\p{L}\p{M}]+", symbols=r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*")
_JAIS2 = _words(digits=r"\p{N}{1,3}", spaces=rf"\s*[\r\n]+{_CASCADE}|\s{{1,2}}(?!\S)|\s{{1}}")
_BAILING = _words(
    start=r"'(?i:[sdmt]|ll|ve|re)|", symbols=r" ?[^\s\p{L}\p{N}]++[\r\n]*", spaces=_LINE_END
)
_EXAONE_MOE = _words(
    letters=r"(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+",
    symbols=r" ?[^\s\p{L}\p{N}]+[\r\n/]?",
    spaces=_LINE_END,
)
_YOUTU = r"[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|" + _HAN_KANA


def _named(*families: tuple[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    return {name: expressions for names, expressions in families for name in names.split()}


EXPRESSIONS = _named(
    (
        "gpt-2 phi-2 jina-es jina-de gigachat jina-v2-es jina-v2-de a.x-4.0 mellum modern-bert",
        _GPT2,
    ),
    ("jina-v1-en jina-v2-code roberta-bpe mpt olmo jais trillion granite-docling exaone4", _GPT2),
    ("starcoder refact command-r smollm codeshell exaone minerva-7b mellum2", _DIGITS_FIRST),
    ("llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano", _LLAMA3),
    ("dbrx smaug-bpe chatglm-bpe glm4 glm5", _LLAMA3),
    ("qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2", _QWEN2),
    ("qwen35", (_QWEN35,)),
    ("ufakzeka", (_words(start=""),)),
    ("laguna", (_LINES, *_QWEN2)),
    ("minicpm5", (r"\p{N}{1,3}", _words(digits=r"\p{N}+"))),
    ("jais-2", (_JAIS2,)),
    ("seed-coder", (_words(symbols=r" ?[^\s\p{L}\p{N}\r\n]+"),)),
    ("bailingmoe bailingmoe2 llada-moe", (_BAILING,)),
    ("exaone-moe", (_EXAONE_MOE,)),
    ("gpt-4o llama4 kanana2 talkie minimax-m2 granite-embed-multi-97m", _GPT4O),
    ("tekken", (_cased_words(digits=r"\p{N}"),)),
    ("tiny_aya cohere2moe", (_GROUPS_OF_THREE, *_GPT4O)),
    ("youtu", (_YOUTU, _cased_words(end=f"{_CONTRACTION}?", digits=r"\p{N}"))),
    (
        "kimi-k2",
        (
            r"\p{Han}+",
            _cased_words(
                end=f"{_CONTRACTION}?",
                upper=rf"{_UPPER}&&[^\p{{Han}}]",
                lower=rf"{_LOWER}&&[^\p{{Han}}]",
            ).replace(r"[\r\n/]*", r"[\r\n]*"),
        ),
    ),
    (
        "deepseek-llm",
        (
            r"[\r\n]",
            rf"\s?[{_CASED}]+",
            r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
            r"\s+$",
            "[一-龥ࠀ-一가-퟿]+",
            r"\p{N}+",
        ),
    ),
    ("deepseek-coder", (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}")),
    ("deepseek-v3 hunyuan-dense joyai-llm hy_v4", _DEEPSEEK3),
    (
        "spark2_5",
        (*_DEEPSEEK3[:2], rf"{_PUNCTUATED}| ?[\p{{P}}\p{{S}}]+|[\r\n]|\s+(?!\S)|\s+", r"\p{N}"),
    ),
    (
        "afmoe",
        (
            _EVERY_GROUP_OF_THREE,
            "[一-鿿㐀-䶿豈-﫿぀-ゟ゠-ヿ･-ﾟ⼀-⿟เ-๿຀-໿ក-៿က-႟ꩠ-ꩿꧠ-꧿가-힯ᄀ-ᇿ]+",
            _DEEPSEEK3[2],
        ),
    ),
    ("falcon", (r"[\p{P}\$\+<=>\^~\|`]+", *_GPT2, r"[0-9][0-9][0-9]")),
    ("default", (r"[\p{P}\$\+<=>\^~\|]+", *_GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
    ("poro-chat bloom gpt3-finnish", (_BLOOM,)),
    ("viking", (_BLOOM, r"\p{N}")),
    (
        "chameleon",
        (
            r"<sentinel:[0-9]+>",
            r"(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
            r"([\t\n]|    |  )",
            r"\p{N}",
            r"[\p{P}!-/:-@\[-`{-~]",
            *_GPT2,
        ),
    ),
    ("superbpe", (r"\p{N}+", _EVERY_GROUP_OF_THREE)),
    ("gemma4 granite-embed-multi-311m sarvam-moe", (_LINES,)),
    ("whitespace", (r"\S+",)),
)


def _only(names: str) -> frozenset[str]:
    return frozenset(names.split())


# A piece that is a token as it stands is that token, whatever the merges say.
IGNORES_MERGES = _only(
    "minicpm5 llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano youtu glm4 glm5"
    " tekken granite-embed-multi-97m"
)
# BOS unless the file says otherwise.
ADDS_BOS = _only(
    "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano tekken chameleon"
)
# A separator after the text.
ADDS_SEPARATOR = _only("jina-v1-en jina-v2-code roberta-bpe")
# Tokens are spelled in the text's own characters, with byte tokens for what is left; spaces become U+2581.
RAW_TEXT = _only("gemma4 granite-embed-multi-311m sarvam-moe")


def name_of(expressions: Iterable[str], *, ignores_merges: bool) -> str | None:
    """llama.cpp's name of a pre-tokenizer, of those that are alike the first; None if it has none."""
    wanted = tuple(expressions)
    alike = (name for name, theirs in EXPRESSIONS.items() if theirs == wanted)
    return next((name for name in alike if (name in IGNORES_MERGES) == ignores_merges), None)


_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)  # in llama.cpp


def tokenizer_keys(
    folder: Path, vocab_size: int, ends: Collection[int] = frozenset()
) -> dict[str, Any]:
    """`tokenizer.*` keys for tokenizer.json and end tokens, with unused tokens up to `vocab_size`. Raises
    BadInput: no tokenizer.json, more tokens than rows, or kinds and end tokens that GGUF lacks."""
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
            _token_type(texts.get(i), added.get(i), i == unknown) for i in range(vocab_size)
        ],
    }
    if byte_level:
        keys["tokenizer.ggml.merges"] = [f"{left} {right}" for left, right in merges]
    else:
        # llama.cpp merges the pair of highest score first: the earlier a merge, the higher its score.
        rank: dict[str, int] = {}
        for left, right in merges:
            rank.setdefault(left + right, len(rank))
        scores = [float(-rank.get(texts.get(i, ""), 0)) for i in range(vocab_size)]
        keys["tokenizer.ggml.scores"] = scores
        normalizer, cut = content.get("normalizer") or {}, content.get("pre_tokenizer") or {}
        steps = normalizer.get("normalizers", [normalizer])
        keys["tokenizer.ggml.add_space_prefix"] = any(
            step.get("type") == "Prepend" for step in steps
        ) or (cut.get("type") == "Metaspace" and cut.get("prepend_scheme", "always") != "never")
        if unknown is not None:
            keys["tokenizer.ggml.unknown_token_id"] = unknown
    keys |= _special_keys(folder)
    eos = keys.get("tokenizer.ggml.eos_token_id")
    return keys | end_keys(ends, eos, keys["tokenizer.ggml.tokens"])


def _special_keys(folder: Path) -> dict[str, Any]:
    """Special token ids, add-BOS and add-EOS flags, and the chat template."""
    from transformers import AutoTokenizer

    with reported_as(f"{folder} has no usable tokenizer"):
        tokenizer: Any = AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
        template = tokenizer.chat_template or processor_template(folder)
    bos, eos, padding = tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id
    ids = {"bos": bos, "eos": eos, "padding": padding}
    keys: dict[str, Any] = {
        f"tokenizer.ggml.{name}_token_id": int(i) for name, i in ids.items() if i is not None
    }
    sample = tokenizer("a").input_ids
    path = folder / "tokenizer_config.json"
    settings = read_json(path) if path.is_file() else {}
    adds = {"bos": bool(sample) and sample[0] == bos, "eos": len(sample) > 1 and sample[-1] == eos}
    for name, is_added in adds.items():
        # A flag counts alone too, as in llama.cpp's converter (DeepSeek-R1-Distill-Qwen).
        is_set = settings.get(f"add_{name}_token") is True and ids[name] is not None
        keys[f"tokenizer.ggml.add_{name}_token"] = is_added or is_set
    return keys | template_keys(template)


def _token_type(text: str | None, added: Any, is_unknown: bool) -> int:
    if text is None:
        return _UNUSED
    if is_unknown:
        return _UNKNOWN
    if added is not None:
        return _CONTROL if added.get("special") else _USER_DEFINED
    is_byte = len(text) == 6 and text.startswith("<0x") and text.endswith(">")
    return _BYTE if is_byte else _NORMAL


def _pre_tokenizer(path: Path, content: dict[str, Any]) -> str:
    steps = content.get("pre_tokenizer") or {}
    steps = steps.get("pretokenizers", [steps])
    expressions = [expression for step in steps for expression in _expressions(step)]
    name = None
    if steps and steps[-1].get("type") == "ByteLevel" and None not in expressions:
        ignores_merges = bool(content["model"].get("ignore_merges"))
        name = name_of(map(str, expressions), ignores_merges=ignores_merges)
    if name is None:
        cuts = [step.get("pattern", step.get("type")) for step in steps]
        raise BadInput(
            f"{path} splits text in a way that is not known as a GGUF pre-tokenizer ({json.dumps(cuts)}): "
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
