"""Write the table of header keys into docs/measured/gguf-keys.md: `python tools/gguf_keys.py [--check]`.

It is made from `quant/gguf/keys.py`, by which the reader uses, ignores or refuses a key.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from document_part import put_part
from llmopt.quant.families.family import GgufRules
from llmopt.quant.gguf.architecture import gguf_families
from llmopt.quant.gguf.keys import ARCHITECTURE_KEYS, TOKENIZER_KEYS, UNSET

_NOTES = {
    "block_count": "`num_hidden_layers`",
    "context_length": "`max_position_embeddings`",
    "embedding_length": "`hidden_size`",
    "feed_forward_length": "`intermediate_size`; a list of one per layer is refused",
    "attention.head_count": "`num_attention_heads`; a list is refused",
    "attention.head_count_kv": "`num_key_value_heads`; a list is refused",
    "attention.key_length": "`head_dim`",
    "attention.value_length": "must equal `attention.key_length`",
    "attention.layer_norm_rms_epsilon": "epsilon of RMS norms",
    "attention.layer_norm_epsilon": "epsilon of layer norms",
    "attention.sliding_window": "`sliding_window`; 0 is none",
    "attention.scale": "`attention_multiplier` (Granite); 0 or none is 1 / sqrt(head_dim)",
    "attn_logit_softcapping": "`attn_logit_softcapping` (Gemma 2)",
    "final_logit_softcapping": "`final_logit_softcapping` (Gemma 2)",
    "embedding_scale": "`embedding_multiplier` (Granite); 0 is 1",
    "residual_scale": "`residual_multiplier` (Granite); 0 is 1",
    "logit_scale": "`logits_scaling` (Granite), `logit_scale` (Command R)",
    "expert_count": "number of experts; 0 is none",
    "expert_used_count": "`num_experts_per_tok`; 0 is none",
    "expert_feed_forward_length": "`moe_intermediate_size`",
    "rope.dimension_count": "must equal `attention.key_length`: a part of a head is not rotated here",
    "rope.freq_base": "`rope_theta`, 10000 without it",
    "rope.freq_base_swa": "must equal `rope.freq_base`",
    "rope.scale_linear": "the factor's older name",
    "rope.scaling.type": "none, linear (also without the key) or yarn",
    "rope.scaling.factor": "`factor`; 0 is 1",
    "rope.scaling.original_context_length": "`original_max_position_embeddings` of YaRN",
    "rope.scaling.attn_factor": "multiplies YaRN's attention factor; without YaRN only 1",
    "rope.scaling.finetuned": "Granite without it has no RoPE, and is refused",
    "rope.scaling.yarn_ext_factor": "1 with YaRN, else 0; -1 is unset",
    "rope.scaling.yarn_attn_factor": (
        "`attention_factor`, as the converter writes it; 1 is refused where it is not the usual factor, "
        "because llama.cpp does not read it"
    ),
    "rope.scaling.yarn_beta_fast": "`beta_fast`",
    "rope.scaling.yarn_beta_slow": "`beta_slow`",
    "rope.scaling.yarn_log_multiplier": (
        "0.1 and 1 are `mscale_all_dim` 1 in the converter's two conventions; others are refused"
    ),
    "vocab_size": "the rows of the embedding count",
    "tensor_data_layout": "llama.cpp does not read it",
    "model": "gpt2, llama or gemma4; others are refused",
    "pre": "the name of the expressions that cut a text; an unknown one is refused",
    "tokens": "the vocabulary",
    "token_type": "which tokens are matched whole",
    "scores": "the order of merges of a SentencePiece vocabulary",
    "merges": "the merges of a byte-level vocabulary",
    "bos_token_id": "BOS token",
    "eos_token_id": "EOS token; ends an answer",
    "eot_token_id": "end of a turn; ends an answer",
    "eom_token_id": "end of a message; ends an answer",
    "eos_token_ids": "Ollama's list of tokens that end an answer",
    "unknown_token_id": "unknown token",
    "seperator_token_id": "separator token",
    "padding_token_id": "padding token",
    "mask_token_id": "mask token",
    "add_bos_token": "BOS before a text",
    "add_eos_token": "EOS after a text",
    "add_sep_token": "separator after a text",
    "add_space_prefix": "a space before a text",
    "fim_pad_token_id": "ends an answer",
    "fim_rep_token_id": "ends an answer",
    "fim_sep_token_id": "ends an answer",
    "token_type_count": "for models of sentence pairs",
    "cls_token_id": "for classifiers",
    "add_padding_token": "Ollama's; a text has no padding",
    "add_unknown_token": "Ollama's; a text has no unknown token around it",
    "add_mask_token": "Ollama's; a text has no mask",
    "remove_extra_whitespaces": "llama.cpp uses it with Unigram vocabularies only",
    **dict.fromkeys(
        (
            "fim_pre_token_id",
            "fim_suf_token_id",
            "fim_mid_token_id",
            "prefix_token_id",
            "suffix_token_id",
            "middle_token_id",
        ),
        "infilling is not a prompt of its own here",
    ),
}
"""Meaning of the keys that are used or ignored."""
# Further names of llama.cpp's src/llama-arch.cpp (autumn 2026), of models of other kinds.
_OTHERS = """
activation_sparsity_scale altup.active_idx altup.num_inputs attention.compress_ratios
attention.compress_rope_freq_base attention.decay_lora_rank attention.gate_lora_rank
attention.group_norm_epsilon attention.group_norm_groups attention.iclr_lora_rank
attention.indexer.head_count attention.indexer.key_length attention.indexer.top_k attention.key_length_mla
attention.key_length_swa attention.kv_lora_rank attention.output_group_count attention.output_lora_rank
attention.output_scale attention.q_lora_rank attention.recurrent_layers attention.relative_buckets_count
attention.shared_kv_layers attention.temperature_length attention.value_length_mla
attention.value_length_swa attention.value_residual_mix_lora_rank attention.value_scale
classifier.output_labels convnext.block_count convnext.embedding_length decoder_block_count
decoder_start_token_id deepstack_mapping dense_2_feat_in dense_2_feat_out dense_3_feat_in dense_3_feat_out
embedding_length_out embedding_length_per_layer_input expert_chunk_feed_forward_length expert_group_scale
experts_per_group features_length full_attention_interval hash_layer_count hidden_activation
hyper_connection.count hyper_connection.epsilon hyper_connection.sinkhorn_iterations kda.head_dim
moe_every_n_layers moe_latent_size n_deepstack_layers norm_before_residual posnet.block_count
posnet.embedding_length rescale_every_n_layers rope.dimension_count_swa rope.dimension_sections
router_logit_softcapping shortconv.l_cache ssm.conv_kernel ssm.dt_b_c_rms ssm.group_count ssm.inner_size
ssm.state_size ssm.time_step_rank swiglu_clamp_exp swiglu_clamp_shexp swin_norm target_hidden_size
target_layers time_decay_extra_dim time_mix_extra_dim token_shift_count use_parallel_residual wkv.head_size
"""


def table() -> str:
    """The Markdown between the markers: a table for each namespace, and the other names."""
    families = gguf_families().values()
    names = ", ".join(
        f"`{name}`" for name in dict.fromkeys(rules.architecture for rules in families)
    )
    return "\n".join(
        [
            f"Architectures: {names}.",
            "",
            *_rows("ARCHITECTURE", ARCHITECTURE_KEYS),
            "",
            "The keys of some architectures, which are refused in a file of another one unless they are 0:",
            "",
            *_family_rows(families),
            "",
            "Any other key of the architecture is refused, whatever its value. llama.cpp names these:",
            ", ".join(f"`{name}`" for name in _OTHERS.split()) + ".",
            "",
            *_rows("tokenizer.ggml", TOKENIZER_KEYS),
            "",
            "Any other key of `tokenizer.ggml` is refused, such as `precompiled_charsmap`.",
        ]
    )


def _rows(namespace: str, rules: Mapping[str, tuple[Any, ...] | None]) -> Iterable[str]:
    yield f"| `{namespace}.` | treatment | |"
    yield "|---|---|---|"
    for name, harmless in rules.items():
        if harmless is None:
            yield f"| `{name}` | ignored | {_NOTES[name]} |"
        elif harmless is UNSET:
            yield f"| `{name}` | used | {_NOTES[name]} |"
        else:
            values = " or ".join(f"`{value}`" for value in harmless)
            yield f"| `{name}` | refused | unless it is {values} |"


def _family_rows(families: Iterable[GgufRules]) -> Iterable[str]:
    users: dict[str, list[str]] = {}
    opened: dict[tuple[str, bool], GgufRules] = {}
    for rules in families:
        opened.setdefault((rules.architecture, "num_experts_per_tok" in rules.keys), rules)
    for rules in opened.values():
        keys = {*rules.keys.values(), *(["attention.sliding_window"] if rules.slides else [])}
        for key in keys:
            users.setdefault(key, []).append(rules.architecture)
    yield "| key | architectures |"
    yield "|---|---|"
    for key, architectures in sorted(users.items()):
        yield f"| `{key}` | {', '.join(f'`{name}`' for name in architectures)} |"


if __name__ == "__main__":
    put_part("docs/measured/gguf-keys.md", "gguf_keys.py", __doc__, table)
