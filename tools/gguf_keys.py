"""Write the table of header keys into docs/measured/gguf-keys.md: `python tools/gguf_keys.py [--check]`.

It is made from `quant/gguf/keys.py`, by which the reader uses, ignores or refuses a key.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from document_part import put_part
from llmopt.quant.families.family import GgufRules
from llmopt.quant.gguf.architecture import gguf_families
from llmopt.quant.gguf.keys import ARCHITECTURE_KEYS, TOKENIZER_KEYS, KeyRule

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


def _rows(namespace: str, rules: Mapping[str, KeyRule]) -> Iterable[str]:
    yield f"| `{namespace}.` | treatment | |"
    yield "|---|---|---|"
    for name, rule in rules.items():
        note = rule.note
        if rule.treatment == "refused":
            note = f"unless it is {' or '.join(f'`{value}`' for value in rule.harmless)}"
        yield f"| `{name}` | {rule.treatment} | {note} |"


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
