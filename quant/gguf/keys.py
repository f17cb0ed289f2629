"""Treatment of every header key that llama.cpp names, a reader that refuses the rest, and end tokens.

Names are those of src/llama-arch.cpp, uses those of src/models/ and src/llama-model.cpp (autumn 2026). A key
of the architecture or tokenizer must be used or known to change nothing: a model without a key that it needs
gives plausible wrong numbers. End tokens (EOS, EOT, EOM, and certain texts) are found as by
src/llama-vocab.cpp.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ...base.errors import BadInput
from ...base.json_lines import is_number

TOKENIZER = "tokenizer.ggml"
TEMPLATE = "tokenizer.chat_template"
"""Key of the chat template. Named ones have the name after a point; `tokenizer.chat_templates` lists them."""


UNSET = (0, [])
"""Values of a key that is used, with which it says nothing where it is not read."""
_Rules = Mapping[str, tuple[Any, ...] | None]
"""Harmless values of keys that are not read, beyond which they are refused; None: the key is ignored."""


def _rules(used: str, ignored: str, **harmless: Any) -> _Rules:
    refused = {
        name.replace("__", "."): value if isinstance(value, tuple) else (value,)
        for name, value in harmless.items()
    }
    return dict.fromkeys(used.split(), UNSET) | dict.fromkeys(ignored.split()) | refused


ARCHITECTURE_KEYS = _rules(
    """
    block_count context_length embedding_length feed_forward_length
    attention.head_count attention.head_count_kv attention.key_length attention.value_length
    attention.layer_norm_rms_epsilon attention.layer_norm_epsilon attention.sliding_window attention.scale
    attn_logit_softcapping final_logit_softcapping embedding_scale residual_scale logit_scale
    expert_count expert_used_count expert_feed_forward_length
    rope.dimension_count rope.freq_base rope.freq_base_swa rope.scale_linear rope.scaling.type
    rope.scaling.factor rope.scaling.original_context_length rope.scaling.attn_factor
    rope.scaling.finetuned rope.scaling.yarn_ext_factor rope.scaling.yarn_attn_factor
    rope.scaling.yarn_beta_fast rope.scaling.yarn_beta_slow rope.scaling.yarn_log_multiplier
    """,
    "vocab_size tensor_data_layout",
    attention__causal=True,
    attention__clamp_kqv=0.0,
    attention__max_alibi_bias=0.0,
    attention__sliding_window_pattern=2,  # of Gemma 2: every second layer has the window
    attention__temperature_scale=0.0,
    expert_gating_func=(0, 1),
    expert_group_count=(0, 1),
    expert_group_used_count=(0, 1),
    expert_shared_count=0,
    expert_shared_feed_forward_length=0,
    expert_weights_norm=True,
    expert_weights_scale=(0.0, 1.0),
    interleave_moe_layer_step=(0, 1),
    leading_dense_block_count=0,
    nextn_predict_layers=0,
    pooling_type=(0, 1, 2, 3),  # none, mean, cls and last, which `read_pooling` takes
    rope__scaling__alpha=0.0,
)
TOKENIZER_KEYS = _rules(
    """
    model pre tokens token_type scores merges bos_token_id eos_token_id eot_token_id eom_token_id
    eos_token_ids unknown_token_id seperator_token_id padding_token_id mask_token_id add_bos_token
    add_eos_token add_sep_token add_space_prefix fim_pad_token_id fim_rep_token_id fim_sep_token_id
    """,
    # Keys of classifiers, of models of sentence pairs, of Ollama, of infilling, which is no prompt of its own
    # here, and of Unigram vocabularies.
    """
    token_type_count cls_token_id add_padding_token add_unknown_token add_mask_token fim_pre_token_id
    fim_suf_token_id fim_mid_token_id prefix_token_id suffix_token_id middle_token_id
    remove_extra_whitespaces
    """,
    normalizer__lowercase=False,
    normalizer__strip_accents=False,
    suppress_tokens=([],),
)


@dataclass
class HeaderKeys:
    """Keys of one namespace: `get` ticks them off, `check` refuses the rest, by `rules` and a `remedy`."""

    path: Path
    metadata: Mapping[str, Any]
    namespace: str
    rules: _Rules
    remedy: str
    _read: set[str] = field(default_factory=set)

    def get(self, name: str, default: Any = None) -> Any:
        self._read.add(name)
        return self.metadata.get(f"{self.namespace}.{name}", default)

    def need(self, name: str) -> Any:
        if (value := self.get(name)) is None:
            raise BadInput(
                f"{self.path} lacks the key {self.namespace}.{name}: it is no whole model"
            )
        return value

    def size(self, name: str, default: int | None = None) -> int:
        value = self.need(name) if default is None else self.get(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            text = f"{self.namespace}.{name} is {shortened(value)}, not a number above 0"
            raise BadInput(f"{self.path}: {text}")
        return value

    def number(self, name: str, default: float) -> float:
        """A number as the shortest decimal that rounds to its float32: 1e-06, not 9.999999974752427e-07."""
        value = self.get(name, default)
        if not is_number(value):
            raise self.refuse(name, "not a number")
        return float(str(np.float32(value)))

    def refuse(self, name: str, reason: str = "") -> BadInput:
        value = shortened(self.metadata.get(f"{self.namespace}.{name}"))
        reason = f" ({reason})" if reason else ""
        shown = name if name.isprintable() else shortened(name)
        return BadInput(
            f"{self.path}: {self.namespace}.{shown} is {value}, which is not read here{reason}: "
            f"{self.remedy}"
        )

    def check(self, elsewhere: Collection[str] = ()) -> None:
        """Raises BadInput for a key that was read neither here nor `elsewhere`, unless it changes nothing."""
        for key, value in self.metadata.items():
            namespace, _, name = key.partition(f"{self.namespace}.")
            if namespace or not name or name in self._read or name in elsewhere:
                continue
            harmless = self.rules.get(name, ())
            if harmless is not None and value not in harmless:
                raise self.refuse(name)


def shortened(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


SAMPLING = {
    "temperature": "temp",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "penalty_repeat",
}
"""Fields of a generation_config.json, and their keys in `general.sampling`."""
UNREAD_SAMPLING = ("sequence", "xtc_probability", "mirostat", "penalty_last_n")
"""Keys of `general.sampling` that nothing here does as llama.cpp does."""


def sampling_keys(generation: Mapping[str, Any]) -> dict[str, Any]:
    """Keys of the sampling of a generation config. BadInput: a value that is no number."""
    values = {name: generation[name] for name in SAMPLING if generation.get(name) is not None}
    for name, value in values.items():
        if not is_number(value):
            raise BadInput(f"generation_config.json: {name} is {shortened(value)}, not a number")
    return {  # llama.cpp and transformers have 0 for no limit, vLLM -1
        f"general.sampling.{SAMPLING[name]}": max(int(value), 0)
        if name == "top_k"
        else float(value)
        for name, value in values.items()
    }


def stored_sampling(path: Path, metadata: Mapping[str, Any]) -> dict[str, float]:
    """Fields of a generation config for the sampling keys of a file. BadInput: a value that is no number."""
    keys = HeaderKeys(path, metadata, "general.sampling", {}, "convert the model again")
    given = {
        name: keys.number(key, 0.0) for name, key in SAMPLING.items() if keys.get(key) is not None
    }
    return {name: int(value) if name == "top_k" else value for name, value in given.items()}


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
_CONTROL = 3  # the type of control tokens in llama.cpp


def template_keys(template: str | Mapping[str, str] | None) -> dict[str, Any]:
    """The keys of a chat template, or of several by their names."""
    named = template if isinstance(template, Mapping) else {"default": template} if template else {}
    others = {re.sub(r"[^A-Za-z0-9]", "_", n): text for n, text in named.items() if n != "default"}
    keys: dict[str, Any] = {TEMPLATE: named["default"]} if "default" in named else {}
    keys |= {f"{TEMPLATE}.{name}": text for name, text in others.items()}
    return keys | ({f"{TEMPLATE}s": [*others]} if others else {})


def end_tokens(metadata: Mapping[str, Any]) -> tuple[int, ...]:
    """Ids of the tokens that end an answer, the EOS token first; none without a vocabulary or keys."""
    tokens = _list(metadata, "tokens")
    texts = {text: tokens.index(text) for text in _WANTED.intersection(tokens)}
    named = {kind: metadata.get(f"{TOKENIZER}.{kind}_token_id") for kind in END_KINDS}
    if named["eos"] is None and metadata.get(f"{TOKENIZER}.model") == "llama":
        named["eos"] = 2
    for kind, candidates in _BY_TEXT.items():
        if named[kind] is None:
            named[kind] = min((texts[text] for text in candidates if text in texts), default=None)
    ends, types = _ENDS & texts.keys(), _list(metadata, "token_type")
    if {"<|call|>", "<|return|>"} <= ends or {"<|calls|>", "<|flush|>"} <= ends:
        ends -= {"<|end|>"}  # of a message in Harmony's and Solar's templates, not of the answer
    if "</s>" in ends and texts["</s>"] < len(types) and types[texts["</s>"]] != _CONTROL:
        ends -= {"</s>"}  # the HTML tag in Gemma's vocabulary, which is no control token
    ids = (*named.values(), *_list(metadata, OLLAMAS_ENDS), *sorted(texts[text] for text in ends))
    inside = (number for number in ids if isinstance(number, int) and 0 <= number < len(tokens))
    return tuple(dict.fromkeys(inside))


def end_keys(ids: Collection[int], eos: int | None, tokens: Sequence[str]) -> dict[str, int]:
    """Keys of all end tokens but EOS. BadInput: more than keys, of texts that llama.cpp does not know."""
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
