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


@dataclass(frozen=True, slots=True)
class KeyRule:
    """Treatment of a key, "used", "ignored", or "refused" but for `harmless` values, and its meaning."""

    treatment: str
    note: str
    harmless: tuple[Any, ...] = ()


def _keys(treatment: str, /, **notes: str) -> dict[str, KeyRule]:
    return {name.replace("__", "."): KeyRule(treatment, note) for name, note in notes.items()}


def _unless(**harmless: Any) -> dict[str, KeyRule]:
    tuples = {
        key: value if isinstance(value, tuple) else (value,) for key, value in harmless.items()
    }
    return {key.replace("__", "."): KeyRule("refused", "", value) for key, value in tuples.items()}


ARCHITECTURE_KEYS: dict[str, KeyRule] = {
    **_keys(
        "used",
        block_count="`num_hidden_layers`",
        context_length="`max_position_embeddings`",
        embedding_length="`hidden_size`",
        feed_forward_length="`intermediate_size`; a list of one per layer is refused",
        attention__head_count="`num_attention_heads`; a list is refused",
        attention__head_count_kv="`num_key_value_heads`; a list is refused",
        attention__key_length="`head_dim`",
        attention__value_length="must equal `attention.key_length`",
        attention__layer_norm_rms_epsilon="epsilon of RMS norms",
        attention__layer_norm_epsilon="epsilon of layer norms",
        attention__sliding_window="`sliding_window`; 0 is none",
        attention__scale="`attention_multiplier` (Granite); 0 or none is 1 / sqrt(head_dim)",
        attn_logit_softcapping="`attn_logit_softcapping` (Gemma 2)",
        final_logit_softcapping="`final_logit_softcapping` (Gemma 2)",
        embedding_scale="`embedding_multiplier` (Granite); 0 is 1",
        residual_scale="`residual_multiplier` (Granite); 0 is 1",
        logit_scale="`logits_scaling` (Granite), `logit_scale` (Command R)",
        expert_count="number of experts; 0 is none",
        expert_used_count="`num_experts_per_tok`; 0 is none",
        expert_feed_forward_length="`moe_intermediate_size`",
        rope__dimension_count="must equal `attention.key_length`: a part of a head is not rotated here",
        rope__freq_base="`rope_theta`, 10000 without it",
        rope__freq_base_swa="must equal `rope.freq_base`",
        rope__scale_linear="the factor's older name",
        rope__scaling__type="none, linear (also without the key) or yarn",
        rope__scaling__factor="`factor`; 0 is 1",
        rope__scaling__original_context_length="`original_max_position_embeddings` of YaRN",
        rope__scaling__attn_factor="multiplies YaRN's attention factor; without YaRN only 1",
        rope__scaling__finetuned="Granite without it has no RoPE, and is refused",
        rope__scaling__yarn_ext_factor="1 with YaRN, else 0; -1 is unset",
        rope__scaling__yarn_attn_factor=(
            "`attention_factor`, as the converter writes it; 1 is refused where it is not the usual "
            "factor, because llama.cpp does not read it"
        ),
        rope__scaling__yarn_beta_fast="`beta_fast`",
        rope__scaling__yarn_beta_slow="`beta_slow`",
        rope__scaling__yarn_log_multiplier=(
            "0.1 and 1 are `mscale_all_dim` 1 in the converter's two conventions; others are refused"
        ),
    ),
    **_keys(
        "ignored",
        vocab_size="the rows of the embedding count",
        tensor_data_layout="llama.cpp does not read it",
    ),
    **_unless(
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
    ),
}

_INFILLING = "infilling is not a prompt of its own here"

TOKENIZER_KEYS: dict[str, KeyRule] = {
    **_keys(
        "used",
        model="gpt2, llama or gemma4; others are refused",
        pre="the name of the expressions that cut a text; an unknown one is refused",
        tokens="the vocabulary",
        token_type="which tokens are matched whole",
        scores="the order of merges of a SentencePiece vocabulary",
        merges="the merges of a byte-level vocabulary",
        bos_token_id="BOS token",
        eos_token_id="EOS token; ends an answer",
        eot_token_id="end of a turn; ends an answer",
        eom_token_id="end of a message; ends an answer",
        eos_token_ids="Ollama's list of tokens that end an answer",
        unknown_token_id="unknown token",
        seperator_token_id="separator token",
        padding_token_id="padding token",
        mask_token_id="mask token",
        add_bos_token="BOS before a text",
        add_eos_token="EOS after a text",
        add_sep_token="separator after a text",
        add_space_prefix="a space before a text",
        fim_pad_token_id="ends an answer",
        fim_rep_token_id="ends an answer",
        fim_sep_token_id="ends an answer",
    ),
    **_keys(
        "ignored",
        token_type_count="for models of sentence pairs",
        cls_token_id="for classifiers",
        add_padding_token="Ollama's; a text has no padding",
        add_unknown_token="Ollama's; a text has no unknown token around it",
        add_mask_token="Ollama's; a text has no mask",
        fim_pre_token_id=_INFILLING,
        fim_suf_token_id=_INFILLING,
        fim_mid_token_id=_INFILLING,
        prefix_token_id=_INFILLING,
        suffix_token_id=_INFILLING,
        middle_token_id=_INFILLING,
        remove_extra_whitespaces="llama.cpp uses it with Unigram vocabularies only",
    ),
    **_unless(normalizer__lowercase=False, normalizer__strip_accents=False, suppress_tokens=([],)),
}

_UNKNOWN = KeyRule("refused", "")


@dataclass
class HeaderKeys:
    """Keys of one namespace: `get` ticks them off, `check` refuses the rest, by `rules` and a `remedy`."""

    path: Path
    metadata: Mapping[str, Any]
    namespace: str
    rules: Mapping[str, KeyRule]
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
            rule = self.rules.get(name, _UNKNOWN)
            harmless = rule.harmless if rule.treatment == "refused" else (0, [])
            if rule.treatment != "ignored" and value not in harmless:
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
