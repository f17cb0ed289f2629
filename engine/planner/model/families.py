"""Config defaults per model type: transformers' class defaults, key synonyms and layer patterns.

Files on the hub omit whatever equals the default of their transformers config class, so the same missing
key means different things: no `tie_word_embeddings` is "tied" for Gemma and "untied" for Llama. Model
types that are not listed here are rejected, because assumed defaults would be wrong silently.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from ....quant.base.errors import BadInput
from .config_check import check_kinds, check_nulls

Config = Mapping[str, Any]
Windows = tuple[int | None, ...]


def _full(config: Config) -> Windows:
    return (None,) * config["num_hidden_layers"]


def _sliding_everywhere(config: Config) -> Windows:
    return (config.get("sliding_window"),) * config["num_hidden_layers"]


def _sliding_if_used(config: Config) -> Windows:
    """Qwen: `sliding_window` counts only with `use_sliding_window`, and only past `max_window_layers`."""
    window = config.get("sliding_window") if config.get("use_sliding_window") else None
    first = config.get("max_window_layers", 28)
    return tuple(window if i >= first else None for i in range(config["num_hidden_layers"]))


def _sliding_everywhere_if_used(config: Config) -> Windows:
    """Qwen3-MoE: as Qwen, but in every layer."""
    window = config.get("sliding_window") if config.get("use_sliding_window") else None
    return (window,) * config["num_hidden_layers"]


def _full_every(default: int, window_key: str, *interval_keys: str) -> Callable[[Config], Windows]:
    """Full attention in layer i if (i + 1) is a multiple of the interval, else sliding-window attention."""

    def windows(config: Config) -> Windows:
        intervals = [config[key] for key in interval_keys if config.get(key)]
        interval = intervals[0] if intervals else default
        return tuple(
            None if (i + 1) % interval == 0 else config[window_key]
            for i in range(config["num_hidden_layers"])
        )

    return windows


def _llama4_windows(config: Config) -> Windows:
    """Chunked attention in layers with RoPE; full attention in those without (NoPE)."""
    if rotary := config.get("no_rope_layers"):
        return tuple(config["attention_chunk_size"] if flag else None for flag in rotary)
    return _full_every(4, "attention_chunk_size", "no_rope_layer_interval")(config)


def _none_dense(config: Config) -> tuple[int, ...]:
    return ()


def _qwen_dense(config: Config) -> tuple[int, ...]:
    step, only = config["decoder_sparse_step"], config.get("mlp_only_layers") or ()
    layers = range(config["num_hidden_layers"])
    return tuple(i for i in layers if i in only or (i + 1) % step != 0)


def _deepseek_dense(config: Config) -> tuple[int, ...]:
    return tuple(range(min(config["first_k_dense_replace"], config["num_hidden_layers"])))


def _llama4_dense(config: Config) -> tuple[int, ...]:
    step, layers = config["interleave_moe_layer_step"], range(config["num_hidden_layers"])
    sparse = config.get("moe_layers") or range(step - 1, config["num_hidden_layers"], step)
    return tuple(i for i in layers if i not in sparse)


@dataclass(frozen=True, slots=True)
class Family:
    """Architecture of one `model_type`, as far as it affects parameters, KV cache or FLOP.

    `qkv_bias`, `output_bias` and `mlp_bias` are a config key or a constant.
    """

    defaults: Mapping[str, Any] = field(default_factory=dict)
    windows: Callable[[Config], Windows] = _full
    dense_layers: Callable[[Config], tuple[int, ...]] = _none_dense
    qkv_bias: str | bool = False
    output_bias: str | bool = False
    mlp_bias: str | bool = False
    expert_bias: bool = False
    norms_per_layer: int = 2
    layer_norm: bool = False  # weight and bias; RMSNorm has only a weight
    qk_norm: bool = False
    gated_mlp: bool = True
    sinks: bool = False


_QWEN_WINDOW = {"use_sliding_window": False, "max_window_layers": 28}
_GEMMA = {"tie_word_embeddings": True, "head_dim": 256, "attention_bias": False}
_MLA = {
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "attention_bias": False,
}

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "llama": Family(
            {"max_position_embeddings": 2048, "attention_bias": False, "mlp_bias": False},
            qkv_bias="attention_bias",
            output_bias="attention_bias",
            mlp_bias="mlp_bias",
        ),
        "mistral": Family(
            {"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
            _sliding_everywhere,
        ),
        "mixtral": Family(
            {
                "max_position_embeddings": 131072,
                "num_key_value_heads": 8,
                "num_local_experts": 8,
                "num_experts_per_tok": 2,
            },
            _sliding_everywhere,
        ),
        "qwen2": Family(
            {"max_position_embeddings": 32768, **_QWEN_WINDOW}, _sliding_if_used, qkv_bias=True
        ),
        "qwen3": Family(
            {
                "max_position_embeddings": 32768,
                "head_dim": 128,
                "attention_bias": False,
                **_QWEN_WINDOW,
            },
            _sliding_if_used,
            qkv_bias="attention_bias",
            output_bias="attention_bias",
            qk_norm=True,
        ),
        "qwen3_moe": Family(
            {
                "max_position_embeddings": 32768,
                "num_key_value_heads": 4,
                "moe_intermediate_size": 768,
                "num_local_experts": 128,
                "num_experts_per_tok": 8,
                "decoder_sparse_step": 1,
                "attention_bias": False,
                **_QWEN_WINDOW,
            },
            _sliding_everywhere_if_used,
            _qwen_dense,
            qkv_bias="attention_bias",
            output_bias="attention_bias",
            qk_norm=True,
        ),
        "gemma2": Family(
            {
                **_GEMMA,
                "max_position_embeddings": 8192,
                "vocab_size": 256000,
                "sliding_window": 4096,
            },
            _full_every(2, "sliding_window", "sliding_window_pattern"),
            qkv_bias="attention_bias",
            output_bias="attention_bias",
            norms_per_layer=4,
        ),
        "gemma3_text": Family(
            {
                **_GEMMA,
                "max_position_embeddings": 131072,
                "vocab_size": 262208,
                "sliding_window": 4096,
                "num_attention_heads": 8,
                "num_key_value_heads": 4,
            },
            _full_every(6, "sliding_window", "sliding_window_pattern"),
            qkv_bias="attention_bias",
            output_bias="attention_bias",
            norms_per_layer=4,
            qk_norm=True,
        ),
        "phi3": Family({"max_position_embeddings": 4096}, _sliding_everywhere),
        "gpt_oss": Family(
            {
                "max_position_embeddings": 131072,
                "head_dim": 64,
                "num_key_value_heads": 8,
                "num_local_experts": 128,
                "num_experts_per_tok": 4,
                "sliding_window": 128,
                "attention_bias": True,
            },
            _full_every(2, "sliding_window"),
            qkv_bias="attention_bias",
            output_bias="attention_bias",
            expert_bias=True,
            sinks=True,
        ),
        "gpt2": Family(
            {"max_position_embeddings": 1024, "tie_word_embeddings": True},
            qkv_bias=True,
            output_bias=True,
            mlp_bias=True,
            layer_norm=True,
            gated_mlp=False,
        ),
        "falcon": Family(
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
            layer_norm=True,
            gated_mlp=False,
        ),
        "deepseek_v2": Family(
            {
                **_MLA,
                "max_position_embeddings": 2048,
                "first_k_dense_replace": 0,
                "n_shared_experts": 2,
                "n_routed_experts": 64,
                "moe_intermediate_size": 1407,
            },
            dense_layers=_deepseek_dense,
        ),
        "deepseek_v3": Family(
            {
                **_MLA,
                "max_position_embeddings": 4096,
                "first_k_dense_replace": 3,
                "n_shared_experts": 1,
                "n_routed_experts": 256,
                "num_experts_per_tok": 8,
                "moe_intermediate_size": 2048,
            },
            dense_layers=_deepseek_dense,
        ),
        "llama4_text": Family(
            {
                "max_position_embeddings": 131072,
                "head_dim": 128,
                "num_key_value_heads": 8,
                "intermediate_size_mlp": 16384,
                "num_local_experts": 16,
                "num_experts_per_tok": 1,
                "attention_chunk_size": 8192,
                "interleave_moe_layer_step": 1,
                "attention_bias": False,
            },
            _llama4_windows,
            _llama4_dense,
            qkv_bias="attention_bias",
            output_bias="attention_bias",
        ),
    }
)

# Config key synonyms: the planner reads the first.
_SYNONYMS = {
    "hidden_size": ("n_embd", "d_model"),
    "num_hidden_layers": ("n_layer", "n_layers"),
    "num_attention_heads": ("n_head", "n_heads"),
    "num_key_value_heads": ("num_kv_heads", "n_head_kv"),
    "intermediate_size": ("n_inner", "ffn_hidden_size"),
    "max_position_embeddings": ("n_positions",),
    "num_local_experts": ("num_experts", "n_routed_experts"),
    "num_experts_per_tok": ("experts_per_token",),
}

# Models around a text model: the default of their own `tie_word_embeddings`.
_TIED_WRAPPERS = {
    "gemma3": True,
    "internvl": True,
    "kimi_k25": True,
    "llama4": False,
    "mistral3": True,
}

# Other names of an architecture: Falcon's first files, and DeepSeek-V3's code under Kimi's name.
_OTHER_NAMES = {"RefinedWeb": "falcon", "RefinedWebModel": "falcon", "kimi_k2": "deepseek_v3"}

_WINDOW_KEYS = {
    "full_attention": None,
    "sliding_attention": "sliding_window",
    "chunked_attention": "attention_chunk_size",
}


def current_names(raw: Config) -> Config:
    """The config with the architecture's own name; Falcon's first files leave out what RefinedWeb was."""
    legacy = raw.get("model_type")
    if not isinstance(legacy, str) or legacy not in _OTHER_NAMES:
        return raw
    renamed = {**raw, "model_type": _OTHER_NAMES[legacy]}
    if legacy == "RefinedWeb":  # Falcon-40B: grouped KV heads, two norms in parallel
        renamed.setdefault("new_decoder_architecture", True)
    return renamed


def has_table_rule(raw: Config) -> bool:
    """Whether the table has this config's architecture: the text model alone, of a type that is listed."""
    raw = current_names(raw)
    nested = raw.get("text_config")
    if not isinstance(nested, Mapping):
        return raw.get("model_type") in FAMILIES
    if raw.get("vision_config") or raw.get("audio_config"):
        return False
    return f"{raw.get('model_type')}_text" in FAMILIES


def complete(raw: Config) -> tuple[str, Family, dict[str, Any]]:
    """Model type, family, and the text model's config with defaults filled in.

    Raises:
        BadInput: no `model_type`, or an unsupported one.
    """
    raw = current_names(raw)
    check_kinds(raw)
    config: dict[str, Any] = dict(raw)
    if isinstance(nested := raw.get("text_config"), Mapping):
        outer = raw.get("model_type")
        config = {"model_type": f"{outer}_text", **nested}
        # transformers reads the outer flag alone, whatever the text config says.
        tied = raw.get("tie_word_embeddings", _TIED_WRAPPERS.get(str(outer)))
        if tied is not None:
            config["tie_word_embeddings"] = tied
        check_kinds(config)
    model_type = config.get("model_type")
    if not model_type or not isinstance(model_type, str):
        raise BadInput("config.json has no model_type: it does not say which architecture it is")
    if model_type not in FAMILIES:
        raise BadInput(
            f"model type {model_type!r} is not known here, nor its attention pattern; "
            f"known: {', '.join(sorted(FAMILIES))}"
        )
    family = FAMILIES[model_type]
    for name, synonyms in _SYNONYMS.items():
        values = [config[key] for key in (name, *synonyms) if config.get(key) is not None]
        if values:
            config[name] = values[0]
    filled = {**family.defaults, **config}
    if "n_routed_experts" in family.defaults:
        filled.setdefault("num_local_experts", filled["n_routed_experts"])
    check_nulls(filled, family.defaults)
    return model_type, family, filled


def has_chunks(config: Config) -> bool:
    """Whether windowed layers use chunked (non-overlapping) attention instead of sliding windows."""
    kinds = config.get("layer_types") or ()
    return "chunked_attention" in kinds or (not kinds and "attention_chunk_size" in config)


def layer_windows(config: Config, family: Family) -> Windows:
    """Attention window of each layer in tokens; None for full attention.

    Raises:
        BadInput: `layer_types` has an unsupported attention type, or lists more or fewer layers than the
            model has.
    """
    kinds = config.get("layer_types")
    if not kinds:
        return family.windows(config)
    if len(kinds) != config["num_hidden_layers"]:
        raise BadInput(
            f"layer_types lists {len(kinds)} layers, num_hidden_layers says "
            f"{config['num_hidden_layers']}"
        )
    for kind in kinds:
        if kind not in _WINDOW_KEYS:
            raise BadInput(
                f"layer_types holds {kind!r}, which is not supported "
                f"(supported: {', '.join(_WINDOW_KEYS)})"
            )
        key = _WINDOW_KEYS[kind]
        if key is not None and config.get(key) is None:
            raise BadInput(f"layer_types holds {kind!r}, but the config has no {key}")
    keys = (_WINDOW_KEYS[kind] for kind in kinds)
    return tuple(None if key is None else config[key] for key in keys)
