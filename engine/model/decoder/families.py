"""Model families of the native decoder: config parsing and tensor names per model type.

The planner's `ModelShape` has all sizes and the defaults of each model type; the functions here add the
architecture choices. Unsupported features raise `NotCovered`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from ....quant.base.errors import BadInput
from ...planner.model.families import complete, current_names
from ...planner.model.shapes import ModelShape
from ..layers.mlp import ACTIVATIONS, CLAMPED_SWIGLU
from ..spec.classifier import is_classifier
from ..spec.names import Names
from ..spec.rope import RopeSpec, yarn_scale
from ..spec.spec import ModelSpec, NotCovered, RouterSpec, Temperature
from ..spec.text_config import text_config
from .dense_families import DENSE_FAMILIES, GEMMA_NORMS
from .family import Choices, Config, DecoderFamily
from .gemma3n_family import GEMMA3N
from .gemma4_family import GEMMA4
from .sparse_families import SPARSE_FAMILIES
from .state_families import STATE_FAMILIES

# Default epsilons that differ from 1e-6.
_NORM_EPS = {"mixtral": 1e-5, "phi3": 1e-5, "gpt_oss": 1e-5, "llama4_text": 1e-5}


def model_spec(raw: Config) -> ModelSpec:
    """Parse a raw `config.json`; of a multimodal one its text model.

    Raises:
        NotCovered: an unsupported model type or feature.
        BadInput: an invalid value, or a missing key.
    """
    raw = current_names(raw)
    multimodal = isinstance(raw.get("text_config"), Mapping)
    config = text_config(raw) if multimodal else raw
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise NotCovered(
            f"config.json: model_type {model_type!r} is not one of the decoder's own "
            f"({', '.join(SUPPORTED_MODEL_TYPES)})"
        )
    family = FAMILIES[model_type]
    try:
        if family.tensors is None:
            _, tensors, config = complete(config)
        else:
            tensors, config = family.tensors, config if multimodal else text_config(config)
        config = family.prepare(config)
        shape = family.shape(model_type, tensors, config)
        dtype = config.get("dtype") or config.get("torch_dtype")
        defaults: dict[str, Any] = {
            "shape": shape,
            "names": Names(),
            "dtype": str(dtype or "float32"),
            "norm_eps": float(config.get("rms_norm_eps", _NORM_EPS.get(model_type, 1e-6))),
            "rotary_width": shape.head_dim,
            "attention_scale": shape.head_dim**-0.5,
            "activation": config.get("hidden_act", "silu"),
            "multimodal": multimodal,
            "is_classifier": is_classifier(raw),
        }
        spec = ModelSpec(**{**defaults, **family.choices(shape, config)})
    except NotCovered:
        raise
    except BadInput as error:
        text = str(error)
        raise BadInput(text if "config" in text else f"config.json: {text}") from error
    except KeyError as error:
        raise BadInput(f"config.json lacks {error.args[0]!r}") from error
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise BadInput(f"config.json: {error}") from error
    if spec.activation not in (*ACTIVATIONS, CLAMPED_SWIGLU):
        raise NotCovered(f"config.json: hidden_act {spec.activation!r} is not supported")
    return spec


def _rotated(shape: ModelShape, config: Config, theta: float = 10000.0) -> Choices:
    """The same RoPE in every layer."""
    return {"ropes": (RopeSpec.from_config(config, theta),) * shape.num_layers}


def _llama(shape: ModelShape, config: Config) -> Choices:
    return _rotated(shape, config)


def _mixtral(shape: ModelShape, config: Config) -> Choices:
    block = "block_sparse_moe"
    names = Names(router=f"{block}.gate", experts=f"{block}.experts", expert=("w1", "w3", "w2"))
    return {**_rotated(shape, config, 1e6), "names": names}


def _qwen3_moe(shape: ModelShape, config: Config) -> Choices:
    router = RouterSpec(normalize=bool(config.get("norm_topk_prob", False)))
    return {**_rotated(shape, config), "router": router}


def _phi3(shape: ModelShape, config: Config) -> Choices:
    options = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if options.get("rope_type", options.get("type")) in ("su", "yarn"):  # earlier names
        config = {**config, "rope_parameters": {**options, "rope_type": "longrope"}}
    part = config.get("partial_rotary_factor", options.get("partial_rotary_factor", 1.0))
    return {
        **_rotated(shape, {"original_max_position_embeddings": 4096, **config}),
        "names": Names(qkv=("self_attn.qkv_proj",), gate_up=("mlp.gate_up_proj",)),
        "rotary_width": int(shape.head_dim * part),
    }


def _gemma(shape: ModelShape, config: Config) -> Choices:
    return {
        "names": GEMMA_NORMS,
        "activation": config.get("hidden_activation") or "gelu_pytorch_tanh",
        "attention_scale": config.get("query_pre_attn_scalar", 256) ** -0.5,
        "norm_offset": 1.0,
        "embedding_scale": math.sqrt(shape.hidden_size),
    }


def _gemma2(shape: ModelShape, config: Config) -> Choices:
    return {
        **_gemma(shape, config),
        **_rotated(shape, config),
        "attention_softcap": config.get("attn_logit_softcapping", 50.0),
        "logit_softcap": config.get("final_logit_softcapping", 30.0),
    }


def _gemma3(shape: ModelShape, config: Config) -> Choices:
    if config.get("use_bidirectional_attention"):
        raise NotCovered("config.json: use_bidirectional_attention is not supported")
    return {
        **_gemma(shape, config),
        "ropes": _gemma3_ropes(shape, config),
        "bidirectional": (True,) * shape.num_layers,
        "attention_softcap": config.get("attn_logit_softcapping"),
        "logit_softcap": config.get("final_logit_softcapping"),
    }


def _gemma3_ropes(shape: ModelShape, config: Config) -> tuple[RopeSpec, ...]:
    """One RoPE for full-attention layers and one for sliding-window layers, in either config form."""
    both = config.get("rope_parameters") or {}
    if "full_attention" in both or "sliding_attention" in both:
        full = {**config, "rope_parameters": both.get("full_attention")}
        sliding = {**config, "rope_parameters": both.get("sliding_attention")}
    else:
        full = config
        sliding = {"rope_theta": config.get("rope_local_base_freq")}
    kinds = (RopeSpec.from_config(full, 1e6), RopeSpec.from_config(sliding, 1e4))
    return tuple(kinds[window is not None] for window in shape.windows)


def _gpt_oss(shape: ModelShape, config: Config) -> Choices:
    if "rope_parameters" not in config and "rope_scaling" not in config:
        stretched = {"rope_type": "yarn", "factor": 32.0, "truncate": False}
        stretched["original_max_position_embeddings"] = 4096
        config = {**config, "rope_parameters": stretched}
    if (config.get("swiglu_alpha", 1.702), config.get("swiglu_limit", 7.0)) != (1.702, 7.0):
        raise NotCovered("config.json: swiglu_alpha and swiglu_limit are fixed at 1.702 and 7")
    return {
        **_rotated(shape, config, 150000.0),
        "names": Names(
            router="mlp.router",
            fused_experts=("gate_up_proj", "down_proj"),
            gate_up_alternates=True,
        ),
        "activation": CLAMPED_SWIGLU,
        "router": RouterSpec(bias=True),
    }


def _llama4(shape: ModelShape, config: Config) -> Choices:
    block = "feed_forward"
    with_rope = config.get("no_rope_layers") or [window is not None for window in shape.windows]
    rope = RopeSpec.from_config(config, 500000.0)
    return {
        "names": Names(
            gate_up=(f"{block}.gate_proj", f"{block}.up_proj"),
            down=f"{block}.down_proj",
            router=f"{block}.router",
            experts=f"{block}.experts",
            shared_expert=f"{block}.shared_expert",
            fused_experts=("gate_up_proj", "down_proj"),
        ),
        "ropes": tuple(rope if has_rope else None for has_rope in with_rope),
        "rotary_interleaved": True,
        "qk_norm_after_rotation": bool(config.get("use_qk_norm", True)),
        "temperature": Temperature(config.get("floor_scale", 8192), config.get("attn_scale", 0.1))
        if config.get("attn_temperature_tuning", True)
        else None,
        "router": RouterSpec(scoring="sigmoid", normalize=False, on_inputs=True),
    }


def _deepseek(shape: ModelShape, config: Config) -> Choices:
    if config.get("attention_bias") or config.get("mlp_bias"):
        raise NotCovered("config.json: biases in a DeepSeek model are not supported")
    assert shape.latent is not None
    rope = RopeSpec.from_config(config)
    scale = shape.latent.query_dim**-0.5
    if rope.kind != "default" and (weight := rope.parameters.get("mscale_all_dim")):
        scale *= yarn_scale(rope.parameters["factor"], weight) ** 2
    return {
        "ropes": (rope,) * shape.num_layers,
        "rotary_width": shape.latent.rope_dim,
        "rotary_interleaved": bool(config.get("rope_interleave", True)),
        "attention_scale": scale,
        "mtp_layers": True,
    }


def _deepseek_v2(shape: ModelShape, config: Config) -> Choices:
    method = config.get("topk_method") or "greedy"
    if method not in ("greedy", "group_limited_greedy"):
        raise NotCovered(f"config.json: topk_method {method!r} is not supported")
    grouped = method == "group_limited_greedy"
    router = RouterSpec(
        normalize=False,
        scale=float(config.get("routed_scaling_factor", 1.0)),
        num_groups=config["n_group"] if grouped else 1,
        topk_groups=config["topk_group"] if grouped else 1,
    )
    return {**_deepseek(shape, config), "router": router}


def _deepseek_v3(shape: ModelShape, config: Config) -> Choices:
    router = RouterSpec(
        scoring="sigmoid",
        normalize=bool(config.get("norm_topk_prob", True)),
        scale=float(config.get("routed_scaling_factor", 2.5)),
        num_groups=config.get("n_group") or 8,
        topk_groups=config.get("topk_group") or 4,
        group_top_k=2,
        correction=True,
    )
    return {**_deepseek(shape, config), "router": router}


def _gpt2(shape: ModelShape, config: Config) -> Choices:
    unusual = ("scale_attn_by_inverse_layer_idx", "add_cross_attention")
    if any(config.get(key) for key in unusual) or not config.get("scale_attn_weights", True):
        raise NotCovered("config.json: scaled or crossed attention of GPT-2 is not supported")
    return {
        "names": Names(
            bases=("transformer.", ""),
            embedding="wte",
            positions="wpe",
            layer="h.{}.",
            final_norm="ln_f",
            input_norm="ln_1",
            mlp_norm="ln_2",
            qkv=("attn.c_attn",),
            output="attn.c_proj",
            gate_up=("mlp.c_fc",),
            down="mlp.c_proj",
            transposed=True,
            buffers=(".attn.bias", ".attn.masked_bias"),
        ),
        "ropes": (None,) * shape.num_layers,
        "activation": config.get("activation_function", "gelu_new"),
        "norm_eps": float(config.get("layer_norm_epsilon", 1e-5)),
    }


def _falcon(shape: ModelShape, config: Config) -> Choices:
    if config.get("alibi"):
        raise NotCovered("config.json: Falcon with alibi is not supported")
    two_norms = shape.norms_per_layer == 2
    parallel = config["new_decoder_architecture"] or config["parallel_attn"]
    split = parallel and two_norms
    return {
        **_rotated(shape, config),
        "names": Names(
            bases=("transformer.", ""),
            embedding="word_embeddings",
            layer="h.{}.",
            final_norm="ln_f",
            input_norm="ln_attn" if split else "input_layernorm",
            mlp_norm="ln_mlp" if split else "post_attention_layernorm" if two_norms else "",
            qkv=("self_attention.query_key_value",),
            output="self_attention.dense",
            gate_up=("mlp.dense_h_to_4h",),
            down="mlp.dense_4h_to_h",
        ),
        "activation": config.get("activation", "gelu"),
        "norm_eps": float(config.get("layer_norm_epsilon", 1e-5)),
        "grouped_qkv": True,
        "parallel": bool(parallel),
    }


# Types of the planner's table.
_PLANNED: Mapping[str, Callable[[ModelShape, Config], Choices]] = {
    "llama": _llama,
    "mistral": _llama,
    "mixtral": _mixtral,
    "qwen2": _llama,
    "qwen3": _llama,
    "qwen3_moe": _qwen3_moe,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "phi3": _phi3,
    "gpt_oss": _gpt_oss,
    "llama4_text": _llama4,
    "deepseek_v2": _deepseek_v2,
    "deepseek_v3": _deepseek_v3,
    "gpt2": _gpt2,
    "falcon": _falcon,
}
FAMILIES: Mapping[str, DecoderFamily] = {
    **{name: DecoderFamily(choices) for name, choices in _PLANNED.items()},
    **DENSE_FAMILIES,
    **SPARSE_FAMILIES,
    **STATE_FAMILIES,
    "gemma3n_text": GEMMA3N,
    "gemma4_text": GEMMA4,
}
SUPPORTED_MODEL_TYPES = tuple(FAMILIES)
