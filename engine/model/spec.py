"""What a decoder is made of, read from a Hugging Face `config.json`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...quant.errors import BadInput
from .rope import RopeSpec

SUPPORTED_MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Shapes and choices of a decoder-only transformer. Sizes are in elements.

    Attributes:
        windows: per layer, how many tokens a token sees, itself included; None sees all before it.
        qk_norm: RMS norm over each head of queries and keys before the rotation (Qwen3).
        qkv_bias, output_bias, mlp_bias: which projections add a bias.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_model_len: int
    rms_norm_eps: float
    rope: RopeSpec
    windows: tuple[int | None, ...]
    qk_norm: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    tie_word_embeddings: bool
    dtype: str

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise BadInput(
                f"config.json: {self.num_heads} attention heads do not divide among "
                f"{self.num_kv_heads} key-value heads"
            )

    @property
    def attention_scale(self) -> float:
        return 1.0 / math.sqrt(self.head_dim)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> ModelSpec:
        """Read a raw `config.json`, with the defaults of its model type.

        Raises:
            BadInput: a model type or a feature that this decoder does not cover, or a missing key.
        """
        model_type = config.get("model_type")
        if model_type not in SUPPORTED_MODEL_TYPES:
            raise BadInput(
                f"config.json: model_type {model_type!r} is not supported "
                f"(supported: {', '.join(SUPPORTED_MODEL_TYPES)})"
            )
        if config.get("hidden_act", "silu") != "silu":
            raise BadInput(f"config.json: hidden_act {config['hidden_act']!r} is not supported")
        try:
            heads = int(config["num_attention_heads"])
            hidden = int(config["hidden_size"])
            layers = int(config["num_hidden_layers"])
            attention_bias = bool(config.get("attention_bias", False))
            return cls(
                model_type=model_type,
                vocab_size=int(config["vocab_size"]),
                hidden_size=hidden,
                intermediate_size=int(config["intermediate_size"]),
                num_layers=layers,
                num_heads=heads,
                num_kv_heads=int(config.get("num_key_value_heads") or heads),
                head_dim=int(
                    config.get("head_dim") or _default_head_dim(model_type, hidden, heads)
                ),
                max_model_len=int(config["max_position_embeddings"]),
                rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
                rope=RopeSpec.from_config(config),
                windows=_windows(model_type, config, layers),
                qk_norm=model_type == "qwen3",
                qkv_bias=True if model_type == "qwen2" else attention_bias,
                output_bias=False if model_type == "qwen2" else attention_bias,
                mlp_bias=bool(config.get("mlp_bias", False)),
                tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
                dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32"),
            )
        except KeyError as error:
            raise BadInput(f"config.json lacks {error.args[0]!r}") from error
        except (TypeError, ValueError) as error:
            raise BadInput(f"config.json: {error}") from error


def _default_head_dim(model_type: str, hidden: int, heads: int) -> int:
    return 128 if model_type == "qwen3" else hidden // heads


def _windows(model_type: str, config: Mapping[str, Any], layers: int) -> tuple[int | None, ...]:
    """Sliding windows by layer. Absent keys mean what the model type's own class means by them."""
    window = config.get("sliding_window")
    if model_type == "mistral":
        # Mistral's class defaults to a window of 4096 where the key is absent; null means none.
        return (config.get("sliding_window", 4096),) * layers
    if (
        model_type not in ("qwen2", "qwen3")
        or not config.get("use_sliding_window", False)
        or not window
    ):
        return (None,) * layers
    kinds = config.get("layer_types")
    if kinds is None:
        first = int(config.get("max_window_layers", 28))
        kinds = ["sliding_attention" if i >= first else "full_attention" for i in range(layers)]
    return tuple(int(window) if kind == "sliding_attention" else None for kind in kinds)
