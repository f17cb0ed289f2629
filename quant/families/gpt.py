"""Dense families: GPT-2, Falcon and StarCoder2 (layer norms, no gate), Phi, OLMo, EXAONE, Cohere."""

from __future__ import annotations

from dataclasses import replace

from .choices import BIASED_ATTENTION, POST_NORMS, QK_NORM, is_sliding, ropes, same_rope
from .family import (
    GGUF_ATTENTION,
    GGUF_LAYER_NORM,
    GGUF_MLP,
    GGUF_NORMS,
    GGUF_QK_NORMS,
    Choices,
    GgufRules,
    ModelFamily,
)
from .shape_rules import Config, ShapeRules, sliding_everywhere
from .shapes import ModelShape
from .spec_parts import Names, NotCovered, RopeSpec, rope_options


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
        **same_rope(shape, config),
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


def _falcon_kv_heads(config: Config) -> int | None:
    """KV heads of the old layout, which ignores `num_kv_heads`."""
    if config["new_decoder_architecture"]:
        return None
    return 1 if config["multi_query"] else config["num_attention_heads"]


def _falcon_norms(config: Config) -> int:
    if config["new_decoder_architecture"]:
        return config.get("num_ln_in_parallel_attn") or 2
    return 1 if config["parallel_attn"] else 2


def _phi3(shape: ModelShape, config: Config) -> Choices:
    options = rope_options(config)
    if options.get("rope_type", options.get("type")) in ("su", "yarn"):  # earlier names
        config = {**config, "rope_scaling": {**options, "rope_type": "longrope"}}
    part = {**config, **options}.get("partial_rotary_factor") or 1.0
    rope = RopeSpec.from_config({"original_max_position_embeddings": 4096, **config})
    return {
        "ropes": (rope,) * shape.num_layers,
        "names": Names(qkv=("self_attn.qkv_proj",), gate_up=("mlp.gate_up_proj",)),
        "norm_eps": float(config.get("rms_norm_eps", 1e-5)),
        "rotary_width": int(shape.head_dim * part),
    }


def _olmo(_: ModelShape, config: Config) -> Choices:
    return {**ropes(config), "names": POST_NORMS, "qk_norm_whole": True}


def _exaone4(_: ModelShape, config: Config) -> Choices:
    has_rope = None if config.get("sliding_window") is None else is_sliding(config)
    return {**ropes(config, has_rope), "names": POST_NORMS}


def _cohere(_: ModelShape, config: Config) -> Choices:
    """Command R and, with RoPE in sliding-window layers alone, Command A."""
    if config.get("use_qk_norm"):
        raise NotCovered("config.json: use_qk_norm of Cohere is not supported")
    return {
        **ropes(config, is_sliding(config) if config.get("layer_types") else None),
        "names": Names(mlp_norm=""),
        "norm_eps": float(config["layer_norm_eps"]),
        "norm_bias": False,
        "rotary_interleaved": True,
        "parallel": True,
        "logit_scale": float(config["logit_scale"]),
    }


_COHERE_RULES = replace(BIASED_ATTENTION, norms_per_layer=1, layer_norm=True)

FAMILIES = (
    ModelFamily(
        "gpt2",
        ShapeRules(
            {"max_position_embeddings": 1024, "tie_word_embeddings": True},
            qkv_bias=True,
            output_bias=True,
            mlp_bias=True,
            layer_norm=True,
            gated_mlp=False,
            width_key="n_inner",
            learned_positions=True,
        ),
        _gpt2,
    ),
    ModelFamily(
        "falcon",
        ShapeRules(
            {
                "max_position_embeddings": 2048,
                "tie_word_embeddings": True,
                "bias": False,
                "multi_query": True,
                "parallel_attn": True,
                "new_decoder_architecture": False,
            },
            qkv_bias="bias",
            output_bias="bias",
            mlp_bias="bias",
            norms_per_layer=_falcon_norms,
            layer_norm=True,
            gated_mlp=False,
            width_key="ffn_hidden_size",
            num_kv_heads=_falcon_kv_heads,
        ),
        _falcon,
        # Falcon's first files leave out what RefinedWeb was: grouped KV heads, two norms in parallel (40B).
        other_names={"RefinedWeb": {"new_decoder_architecture": True}, "RefinedWebModel": {}},
    ),
    ModelFamily(
        "starcoder2",
        gguf=GgufRules(
            "starcoder2",
            stems=(*GGUF_NORMS, *GGUF_ATTENTION, "mlp.c_fc", "mlp.c_proj"),
            activations=("gelu_pytorch_tanh",),
            epsilon=("norm_epsilon", GGUF_LAYER_NORM),
            defaults={"norm_epsilon": 1e-5, "num_key_value_heads": 2},
            slides=True,
        ),
    ),
    ModelFamily(
        "phi3",
        ShapeRules({"max_position_embeddings": 4096}, sliding_everywhere),
        _phi3,
        gguf=GgufRules(
            "phi3",
            stems=(
                *GGUF_NORMS,
                *("self_attn.qkv_proj", "self_attn.o_proj"),
                *("mlp.gate_up_proj", "mlp.down_proj"),
            ),
            constants={"partial_rotary_factor": 1.0},
            defaults={"rms_norm_eps": 1e-5},
            slides=True,
        ),
    ),
    ModelFamily(
        "olmo2",
        QK_NORM,
        _olmo,
        gguf=GgufRules(
            "olmo2",
            stems=(
                *("post_attention_layernorm", "post_feedforward_layernorm"),
                *(*GGUF_ATTENTION, *GGUF_QK_NORMS, *GGUF_MLP),
            ),
            defaults={"rms_norm_eps": 1e-5},
        ),
        plain_tokenizer=True,
    ),
    ModelFamily("olmo3", QK_NORM, _olmo),
    ModelFamily("exaone4", ShapeRules(qk_norm=True), _exaone4),
    ModelFamily(
        "cohere",
        _COHERE_RULES,
        _cohere,
        gguf=GgufRules(
            "command-r",
            stems=("input_layernorm", *GGUF_ATTENTION, *GGUF_MLP),
            epsilon=("layer_norm_eps", GGUF_LAYER_NORM),
            keys={"logit_scale": "logit_scale"},
            constants={"use_qk_norm": False},
            defaults={"rope_theta": 500000.0, "layer_norm_eps": 1e-5, "logit_scale": 0.0625},
        ),
    ),
    ModelFamily("cohere2", _COHERE_RULES, _cohere),
)
