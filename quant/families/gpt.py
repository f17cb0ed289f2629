"""GPT-2, Falcon and StarCoder2: layer norms, MLPs without a gate."""

from __future__ import annotations

from .choices import same_rope
from .family import GGUF_ATTENTION, GGUF_LAYER_NORM, GGUF_NORMS, Choices, GgufRules, ModelFamily
from .shape_rules import Config, ShapeRules
from .shapes import ModelShape
from .spec_parts import Names, NotCovered


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


GPT2 = ModelFamily(
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
)


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


FALCON = ModelFamily(
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
)

STARCODER2 = ModelFamily(
    "starcoder2",
    gguf=GgufRules(
        "starcoder2",
        stems=(*GGUF_NORMS, *GGUF_ATTENTION, "mlp.c_fc", "mlp.c_proj"),
        activations=("gelu_pytorch_tanh",),
        epsilon=("norm_epsilon", GGUF_LAYER_NORM),
        slides=True,
    ),
)

FAMILIES = (GPT2, FALCON, STARCODER2)
