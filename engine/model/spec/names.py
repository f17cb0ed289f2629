"""Tensor names of a model family's checkpoints."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Names:
    """Module names, the defaults those of Llama; "" for a module that the family does not have.

    Attributes:
        bases: usual prefixes of the decoder's modules; a checkpoint may have another.
        layer: prefix of a layer, by index; all names below are relative to it.
        qkv, gate_up: the linears to stack, or the single one that the checkpoint already stacks.
        expert: gate, up and down of one expert, below `experts` and the expert id; experts that are not gated
            have up and down alone.
        expert_latent: linears into and out of the width that routed experts work in (Nemotron-H).
        state_mixer: what mixes tokens in place of attention, in layers with a constant state.
        router_scale, expert_scale: factors on the router's normed input, on each expert's weight (Gemma 4).
        shared: gate and up (or the linear that stacks them) and down, below `shared_expert`.
        shared_gate: linear to one value, whose sigmoid weighs the shared expert's output (Qwen2-MoE).
        fused_experts: the experts are two 3-D tensors [experts, in, out] below `experts`, of gate with up and
            of down; None: each expert has modules.
        fused_transposed: those tensors are [experts, out, in], where their shape does not tell.
        gate_up_alternates: rows of gate and up are interleaved in them.
        transposed: every linear's weight is stored as [in, out] (Conv1D).
        layer_scale: a scalar that multiplies the layer's output (Gemma 4).
        buffers: suffixes of saved buffers, which are ignored.
        mtp: prefixes of modules for multi-token prediction, below the base or beside it, which are ignored.
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
    state_mixer: str = ""
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: str = "mlp.down_proj"
    router: str = "mlp.gate"
    correction: str = "mlp.gate.e_score_correction_bias"
    router_scale: str = ""
    expert_scale: str = ""
    experts: str = "mlp.experts"
    expert: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    expert_latent: tuple[str, str] = ("", "")
    shared_expert: str = "mlp.shared_experts"
    shared: tuple[tuple[str, ...], str] = (("gate_proj", "up_proj"), "down_proj")
    shared_gate: str = ""
    fused_experts: tuple[str, str] | None = None
    fused_transposed: bool = False
    gate_up_alternates: bool = False
    transposed: bool = False
    layer_scale: str = ""
    buffers: tuple[str, ...] = ("rotary_emb.inv_freq",)
    mtp: tuple[str, ...] = ()

    @property
    def experts_apart(self) -> str:
        """The module below which each expert has modules, also where a family has them fused."""
        is_named = self.experts.endswith("experts") or self.fused_experts is None
        return self.experts if is_named else f"{self.experts}.experts"
