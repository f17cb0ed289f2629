"""Treatment of every header key that llama.cpp names, and a reader that refuses the rest.

The names are those of llama.cpp's src/llama-arch.cpp; what it reads for an architecture is in src/models/
and in the common part of src/llama-model.cpp (autumn 2026). A key of the architecture's own namespace, or of
the tokenizer's, must be used or known to change nothing: a model that is computed without a key that it
needs gives plausible wrong numbers. Every name that is in no table here is refused.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...base.errors import BadInput

TOKENIZER = "tokenizer.ggml"


@dataclass(frozen=True, slots=True)
class KeyRule:
    """Treatment of one key.

    Attributes:
        treatment: "used"; "ignored"; or "refused", unless it has one of `harmless`.
        note: the meaning of a used key, or the reason why one is ignored.
        harmless: values that change nothing.
    """

    treatment: str
    note: str
    harmless: tuple[Any, ...] = ()


def _used(**notes: str) -> dict[str, KeyRule]:
    return {name.replace("__", "."): KeyRule("used", note) for name, note in notes.items()}


def _ignored(**notes: str) -> dict[str, KeyRule]:
    return {name.replace("__", "."): KeyRule("ignored", note) for name, note in notes.items()}


def _unless(**harmless: Any) -> dict[str, KeyRule]:
    return {
        name.replace("__", "."): KeyRule(
            "refused", "", value if isinstance(value, tuple) else (value,)
        )
        for name, value in harmless.items()
    }


ARCHITECTURE_KEYS: dict[str, KeyRule] = {
    **_used(
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
    **_ignored(
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
        pooling_type=0,
        rope__scaling__alpha=0.0,
    ),
}

_INFILLING = "infilling is not a prompt of its own here"

TOKENIZER_KEYS: dict[str, KeyRule] = {
    **_used(
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
    **_ignored(
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


class HeaderKeys:
    """Keys of one namespace of a file's header: what is read is ticked off, and `check` refuses the rest.

    Args:
        path: the file, for messages.
        metadata: every key of the file.
        namespace: start of the names, such as `llama`.
        rules: treatment by the rest of the name.
        remedy: end of the refusal, what the user can do.
    """

    def __init__(
        self,
        path: Path,
        metadata: Mapping[str, Any],
        namespace: str,
        rules: Mapping[str, KeyRule],
        remedy: str,
    ):
        self._path, self._metadata, self._namespace = path, metadata, namespace
        self._rules, self._remedy = rules, remedy
        self._read: set[str] = set()

    def get(self, name: str, default: Any = None) -> Any:
        """A key's value, ticked off."""
        self._read.add(name)
        return self._metadata.get(f"{self._namespace}.{name}", default)

    def need(self, name: str) -> Any:
        """A key's value; raises BadInput where the file lacks it."""
        if (value := self.get(name)) is None:
            raise BadInput(
                f"{self._path} lacks the key {self._namespace}.{name}: it is no whole model"
            )
        return value

    def size(self, name: str, default: int | None = None) -> int:
        """A number above 0; raises BadInput for anything else."""
        value = self.need(name) if default is None else self.get(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            shown = shortened(value)
            raise BadInput(
                f"{self._path}: {self._namespace}.{name} is {shown}, not a number above 0"
            )
        return value

    def number(self, name: str, default: float) -> float:
        """A number as the shortest decimal that rounds to its float32: 1e-06, not 9.999999974752427e-07.

        Raises:
            BadInput: anything else.
        """
        value = self.get(name, default)
        if (
            not isinstance(value, int | float)
            or isinstance(value, bool)
            or not math.isfinite(value)
        ):
            raise self.refuse(name, "not a number")
        return float(str(np.float32(value)))

    def refuse(self, name: str, reason: str = "") -> BadInput:
        """The error for a value that the reader cannot follow."""
        value = shortened(self._metadata.get(f"{self._namespace}.{name}"))
        reason = f" ({reason})" if reason else ""
        return BadInput(
            f"{self._path}: {self._namespace}.{name} is {value}, which is not read here{reason}: "
            f"{self._remedy}"
        )

    def check(self, elsewhere: Collection[str] = ()) -> None:
        """Refuse what was read neither here nor `elsewhere`, and is not known to change nothing.

        Raises:
            BadInput: such a key, by name.
        """
        for key, value in self._metadata.items():
            namespace, _, name = key.partition(f"{self._namespace}.")
            if namespace or not name or name in self._read or name in elsewhere:
                continue
            rule = self._rules.get(name, _UNKNOWN)
            harmless = rule.harmless if rule.treatment == "refused" else (0, [])
            if rule.treatment != "ignored" and value not in harmless:
                raise self.refuse(name)


def shortened(value: Any) -> str:
    """A value as text of at most 60 characters."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
