"""Model types and their GGUF architectures, and what each has beyond Llama (`convert_hf_to_gguf.py`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..base.errors import BadInput

_NORMS = ("input_layernorm", "post_attention_layernorm")
_FOUR_NORMS = (*_NORMS, "pre_feedforward_layernorm", "post_feedforward_layernorm")
_ATTENTION = tuple(f"self_attn.{name}_proj" for name in "qkvo")
_QK_NORMS = ("self_attn.q_norm", "self_attn.k_norm")
_MLP = tuple(f"mlp.{name}_proj" for name in ("gate", "up", "down"))
_DENSE = (*_NORMS, *_ATTENTION, *_MLP)
_GEMMA = ("gelu_pytorch_tanh",)


@dataclass(frozen=True, slots=True)
class GgufFamily:
    """A model type and the architecture that it is in GGUF.

    Attributes:
        stems: modules of a layer that have tensors, by the name behind `model.layers.N.`.
        permuted: whether rows of q and k change places, for llama.cpp's interleaved RoPE.
        norm_offset: what is added to norm weights, which the model itself adds at run time.
        activations: of the MLP, which llama.cpp computes.
        epsilon: names of the norms' epsilon in `config.json` and in GGUF.
        keys: further fields of `config.json`, and their keys.
        constants: fields that llama.cpp assumes, with the value that is right.
        head_dim: where `config.json` has none; 0: hidden size over heads.
        has_window: whether the sliding window is among `keys`.
    """

    model_type: str
    architecture: str
    stems: tuple[str, ...] = _DENSE
    permuted: bool = False
    norm_offset: float = 0.0
    activations: tuple[str, ...] = ("silu",)
    epsilon: tuple[str, str] = ("rms_norm_eps", "attention.layer_norm_rms_epsilon")
    keys: Mapping[str, str] = field(default_factory=dict)
    constants: Mapping[str, Any] = field(default_factory=dict)
    head_dim: int = 0
    has_window: bool = False

    @property
    def sparse(self) -> bool:
        """Whether its layers have experts."""
        return "num_experts_per_tok" in self.keys


_GRANITE_KEYS = {
    "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
}
_SOFT_CAPS = {
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
_WINDOW = {"sliding_window": "attention.sliding_window"}
_EXPERTS = {
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
}
_LAYER_NORM = "attention.layer_norm_epsilon"
FAMILIES = (
    GgufFamily("llama", "llama", permuted=True),
    GgufFamily("mistral", "llama", permuted=True),
    GgufFamily("qwen2", "qwen2"),
    GgufFamily("qwen3", "qwen3", stems=(*_DENSE, *_QK_NORMS), head_dim=128),
    GgufFamily("gemma", "gemma", norm_offset=1.0, activations=("gelu", *_GEMMA), head_dim=256),
    GgufFamily(
        "gemma2",
        "gemma2",
        stems=(*_FOUR_NORMS, *_ATTENTION, *_MLP),
        norm_offset=1.0,
        activations=_GEMMA,
        keys=_SOFT_CAPS | _WINDOW,
        head_dim=256,
        has_window=True,
    ),
    GgufFamily("granite", "granite", permuted=True, keys=_GRANITE_KEYS),
    GgufFamily(
        "olmo2",
        "olmo2",
        stems=(
            *("post_attention_layernorm", "post_feedforward_layernorm"),
            *(*_ATTENTION, *_QK_NORMS, *_MLP),
        ),
    ),
    GgufFamily(
        "cohere",
        "command-r",
        stems=("input_layernorm", *_ATTENTION, *_MLP),
        epsilon=("layer_norm_eps", _LAYER_NORM),
        keys={"logit_scale": "logit_scale"},
        constants={"use_qk_norm": False},
    ),
    GgufFamily(
        "starcoder2",
        "starcoder2",
        stems=(*_NORMS, *_ATTENTION, "mlp.c_fc", "mlp.c_proj"),
        activations=_GEMMA,
        epsilon=("norm_epsilon", _LAYER_NORM),
    ),
    GgufFamily(
        "phi3",
        "phi3",
        stems=(
            *_NORMS,
            *("self_attn.qkv_proj", "self_attn.o_proj"),
            *("mlp.gate_up_proj", "mlp.down_proj"),
        ),
        constants={"partial_rotary_factor": 1.0},
    ),
    GgufFamily("seed_oss", "seed_oss", head_dim=128),
    GgufFamily(
        "qwen3_moe",
        "qwen3moe",
        stems=(
            *(*_NORMS, *_ATTENTION, *_QK_NORMS, "mlp.gate"),
            *(f"mlp.experts.{name}_proj" for name in ("gate", "up", "down")),
        ),
        keys=_EXPERTS | {"num_experts": "expert_count"},
        constants={"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []},
        head_dim=128,
    ),
    GgufFamily(
        "mixtral",
        "llama",
        stems=(
            *(*_NORMS, *_ATTENTION, "block_sparse_moe.gate"),
            *(f"block_sparse_moe.experts.w{number}" for number in (1, 2, 3)),
        ),
        permuted=True,
        keys=_EXPERTS | {"num_local_experts": "expert_count"},
    ),
)
_BY_TYPE = {family.model_type: family for family in FAMILIES}


def family_of(config: Mapping[str, Any]) -> GgufFamily:
    """The family of a `config.json`.

    Raises:
        BadInput: an unsupported model type or feature.
    """
    model_type = str(config.get("model_type"))
    family = _BY_TYPE.get(model_type)
    if family is None:
        raise BadInput(
            f"model type {model_type!r} cannot be written as GGUF: supported are {', '.join(_BY_TYPE)}"
        )
    activation = config.get("hidden_act") or config.get("hidden_activation")
    if activation is not None and activation not in family.activations:
        raise BadInput(f"hidden_act {activation!r} cannot be written as GGUF")
    for name, value in family.constants.items():
        if config.get(name, value) != value:
            raise BadInput(f"{name} {config[name]!r} cannot be written as GGUF: only {value!r}")
    _check_window(config, family)
    scale = config.get("query_pre_attn_scalar")
    if scale is not None and scale != head_dim_of(config, family):
        raise BadInput(f"query_pre_attn_scalar {scale} cannot be written as GGUF: only the head's")
    return family


def family_named(architecture: str, *, sparse: bool) -> GgufFamily | None:
    """The family that is made from a file of an architecture without a `config.json`."""
    for family in FAMILIES:
        if family.architecture == architecture and family.sparse == sparse:
            return family
    return None


def head_dim_of(config: Mapping[str, Any], family: GgufFamily) -> int:
    """Width of an attention head."""
    default = int(config["hidden_size"]) // int(config["num_attention_heads"])
    return int(config.get("head_dim") or family.head_dim or default)


def _check_window(config: Mapping[str, Any], family: GgufFamily) -> None:
    """Raises BadInput for a sliding window that llama.cpp would not keep."""
    window = config.get("sliding_window", 4096 if family.model_type == "mistral" else None)
    used = family.model_type in ("mistral", "starcoder2", "phi3")
    if family.has_window or not (used or config.get("use_sliding_window", False)):
        return
    if window is not None and window < config.get("max_position_embeddings", window):
        raise BadInput(f"a sliding window of {window} tokens cannot be written as GGUF")
