"""Parts of a decoder's spec that a family chooses: tensor names, RoPE, routing, constant states."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...base.errors import BadInput
from ...base.json_lines import is_number

CLAMPED_SWIGLU = "clamped_swiglu"
"""Activation of gpt-oss, which clamps gate and up."""


class NotCovered(BadInput):
    """The config is valid, but needs a feature that this decoder does not implement."""


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
        state_mixer: module that mixes tokens in place of attention, in layers with a constant state.
        router_scale, expert_scale: factors on the router's normed input, on each expert's weight (Gemma 4).
        shared: gate and up (or the linear that stacks them) and down, below `shared_expert`.
        shared_gate: linear to one value, whose sigmoid weighs the shared expert's output (Qwen2-MoE).
        fused_experts: the experts are two 3-D tensors [experts, in, out] below `experts`, of gate with up and
            of down; None: each expert has modules.
        fused_transposed: fused tensors are [experts, out, in], where their shape does not tell.
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


ROPE_KINDS = ("default", "linear", "llama3", "yarn", "longrope", "proportional")
_NEEDED_BY_ROPE = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "longrope": ("short_factor", "long_factor"),
}


def rope_options(config: Mapping[str, Any], theta: float = 10000.0) -> dict[str, Any]:
    """Options of RoPE, with `rope_theta`: `rope_scaling` counts before `rope_parameters` in transformers 5.
    `theta` is the model type's default. BadInput: two base frequencies, or a number that the kind lacks."""
    options = config.get("rope_scaling") or config.get("rope_parameters") or {}
    theta = options.get("rope_theta") or config.get("rope_theta") or theta
    if not is_number(theta):
        raise BadInput(f"config.json: rope_theta is {theta!r}: a number is needed")
    if ((config.get("rope_parameters") or {}).get("rope_theta") or theta) != theta:
        raise BadInput(
            "config.json: rope_scaling counts before rope_parameters, and lacks its rope_theta: add it"
        )
    kind = options.get("rope_type", options.get("type", "default"))
    missing = [key for key in _NEEDED_BY_ROPE.get(kind, ()) if key not in options]
    if missing:
        raise BadInput(f"config.json: rope_type {kind!r} lacks {', '.join(missing)}")
    return {**options, "rope_theta": theta}


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """RoPE parameters: base frequency, and scaling to longer contexts.

    `kind` is one of `ROPE_KINDS`; `parameters` are the config's numbers. LongRoPE divides each frequency by a
    separate factor, from the short list within the original context and from the long one beyond it.
    Proportional RoPE (Gemma 4) rotates some of the pairs, with the frequencies of all. `width` is the number
    of rotated elements where layers differ; 0: the model's.

    With M-RoPE `sections` are the pairs that rotate by the temporal, the height and the width position, one
    section after the other or, with `sections_interleave` (Qwen3-VL), in turn as long as a section lasts."""

    theta: float
    kind: str
    parameters: Mapping[str, float]
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    width: int = 0
    sections: tuple[int, ...] = ()
    sections_interleave: bool = False

    @classmethod
    def from_config(cls, config: Mapping[str, Any], theta: float = 10000.0) -> RopeSpec:
        """Parse what `rope_options` finds in a config; `theta`: default."""
        options = rope_options(config, theta)
        kind = options.get("rope_type", options.get("type", "default"))
        if kind not in ROPE_KINDS:
            raise BadInput(
                f"config.json asks for rope_type {kind!r}, which this decoder does not know"
            )
        numbers = {k: float(v) for k, v in options.items() if isinstance(v, (int, float))}
        original = config.get("original_max_position_embeddings")
        if original and kind in ("llama3", "yarn", "longrope"):  # before that of `options`
            numbers["original_max_position_embeddings"] = float(original)
        if kind in ("yarn", "longrope"):
            longest = float(config["max_position_embeddings"])
            original = numbers.setdefault("original_max_position_embeddings", longest)
            numbers.setdefault("factor", longest / original)
        return cls(
            float(options["rope_theta"]),
            kind,
            numbers,
            tuple(map(float, options.get("short_factor") or ())),
            tuple(map(float, options.get("long_factor") or ())),
        )


def yarn_scale(factor: float, weight: float = 1.0) -> float:
    """YaRN's attention scaling (mscale) for a context extension factor."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


@dataclass(frozen=True, slots=True)
class RouterSpec:
    """Top-k routing of a mixture of experts.

    Attributes:
        scoring: "softmax" over all experts or "sigmoid" of each.
        normalize: the top-k weights are divided by their sum.
        scale: factor on the top-k weights after that (routed scaling factor).
        num_groups, topk_groups: group-limited top-k (DeepSeek): experts are selected from the best
            `topk_groups` of `num_groups` groups; a group's score is the sum of its `group_top_k` best.
        correction: a learned bias is added to the scores for selection, not for the weights (DeepSeek-V3).
        on_inputs: the weight multiplies the expert's input, not its output (Llama 4).
        bias: the router's linear has a bias.
        least_sum: added to the sum of the top-k weights before the division.
    """

    scoring: str = "softmax"
    normalize: bool = True
    scale: float = 1.0
    num_groups: int = 1
    topk_groups: int = 1
    group_top_k: int = 1
    correction: bool = False
    on_inputs: bool = False
    bias: bool = False
    least_sum: float = 1e-20


@dataclass(frozen=True, slots=True)
class Temperature:
    """Attention temperature: the scores of position p grow by `1 + weight * ln(1 + (p + first) // floor)`.

    In layers without RoPE (Llama 4: the first position counts as 1), or `everywhere` (Ministral 3: as 0).

    Source: Nakanishi, "Scalable-Softmax Is Superior for Attention" (arXiv:2501.19399)."""

    floor: float
    weight: float
    first: int = 1
    everywhere: bool = False


@dataclass(frozen=True, slots=True)
class LayerSizes:
    """Sizes of one layer, where those of a model differ (Gemma 4).

    Attributes:
        kv_source: the layer whose keys and values it attends to (KV sharing); None: its own.
        keys_as_values: the values are the projected keys, before their norm and RoPE.
        sparsity: share of the gate's elements that are cut to 0, by their mean and deviation (Gemma 3n).
    """

    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    kv_source: int | None = None
    keys_as_values: bool = False
    sparsity: float = 0.0


@dataclass(frozen=True, slots=True)
class AltUpSpec:
    """Alternating updates of `num_streams`, of which a layer computes the `active` one, and LAuReL (Gemma
    3n). `scales_output`: the corrected stream is scaled before the per-layer input reads it."""

    num_streams: int
    active: int
    scales_output: bool
    laurel_rank: int


@dataclass(frozen=True, slots=True)
class ShortConvSpec:
    """Gated short convolution of `kernel` tokens (LFM2)."""

    kernel: int
    bias: bool
    num_states: int = 1


@dataclass(frozen=True, slots=True)
class DeltaNetSpec:
    """Gated delta net (Qwen3-Next, Qwen3.5). `by_head`: the projections are `in_proj_qkvz` and `in_proj_ba`,
    each by key head (Qwen3-Next), not `in_proj_qkv`, `in_proj_z`, `in_proj_b` and `in_proj_a` (Qwen3.5)."""

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    kernel: int
    by_head: bool
    num_states: int = 2

    @property
    def keys_width(self) -> int:
        return self.num_key_heads * self.key_dim

    @property
    def values_width(self) -> int:
        return self.num_value_heads * self.value_dim


@dataclass(frozen=True, slots=True)
class Mamba2Spec:
    """Mamba 2 (Granite 4, Nemotron-H). Groups of heads share B and C; `kernel` counts tokens of the
    convolution, which `conv_bias` belongs to."""

    num_heads: int
    head_dim: int
    num_groups: int
    state_size: int
    kernel: int
    conv_bias: bool
    bias: bool
    step_limit: tuple[float, float]
    num_states: int = 2

    @property
    def width(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def conv_width(self) -> int:
        return self.width + 2 * self.num_groups * self.state_size


StateMixer = ShortConvSpec | DeltaNetSpec | Mamba2Spec


@dataclass(frozen=True, slots=True)
class LayerParts:
    """Mixer and feed-forward block of a layer, or one of the two, in a norm (Nemotron-H). `state` names the
    module that mixes tokens in place of attention."""

    state: StateMixer | None = None
    has_mixer: bool = True
    has_mlp: bool = True

    @property
    def has_cache(self) -> bool:
        return self.has_mixer and self.state is None
