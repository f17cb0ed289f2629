"""Where a family keeps its weights in a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Names:
    """Module names, the defaults those of Llama; "" for a module that the family does not have.

    Attributes:
        bases: what the decoder's own modules start with; the first that the checkpoint uses counts.
        layer: a layer, by its number; all names below it are relative to it.
        qkv, gate_up: the linears that are stacked, or the single one that the family stacks itself.
        expert: gate, up and down of one expert, below `experts` and its number.
        fused_experts: the experts are two 3-D tensors with the inputs first, `gate_up_proj` and `down_proj`.
        gate_up_alternates: rows of gate and up take turns in them.
        transposed: every linear lies as [in, out].
        buffers: endings of tensors that others save beside the weights.
    """

    bases: tuple[str, ...] = ("model.", "language_model.model.", "model.language_model.")
    embedding: str = "embed_tokens"
    positions: str = ""
    layer: str = "layers.{}."
    final_norm: str = "norm"
    head: str = "lm_head"
    input_norm: str = "input_layernorm"
    post_attention_norm: str = ""
    mlp_norm: str = "post_attention_layernorm"
    post_mlp_norm: str = ""
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    output: str = "self_attn.o_proj"
    query_norm: str = "self_attn.q_norm"
    key_norm: str = "self_attn.k_norm"
    sinks: str = "self_attn.sinks"
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: str = "mlp.down_proj"
    router: str = "mlp.gate"
    correction: str = "mlp.gate.e_score_correction_bias"
    experts: str = "mlp.experts"
    expert: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    shared_expert: str = "mlp.shared_experts"
    fused_experts: bool = False
    gate_up_alternates: bool = False
    transposed: bool = False
    buffers: tuple[str, ...] = ("rotary_emb.inv_freq",)
