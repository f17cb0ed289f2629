"""The text model's config as its transformers class completes it: defaults, layer types, RoPE parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ....quant.base.errors import BadInput
from .spec import NotCovered

_PLACEHOLDERS = ("image_token_id", "video_token_id", "audio_token_id")


def text_config(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The config of a checkpoint's text model, with every default of its class and the usual field names.

    A multimodal checkpoint's `tie_word_embeddings` is the outer one: transformers reads no other. Its
    placeholder tokens are `placeholder_token_ids`; a text model has none.

    Raises:
        NotCovered: the installed transformers does not know the type.
        BadInput: its class refuses the config.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    from ....quant.model.auto import read_config

    if raw.get("model_type") not in CONFIG_MAPPING:
        raise NotCovered(
            f"config.json: model_type {raw.get('model_type')!r} is unknown to transformers"
        )
    outer = read_config(raw)
    inner = outer.get_text_config(decoder=True)
    config = inner.to_dict()
    for usual, name in getattr(inner, "attribute_map", {}).items():
        config.setdefault(usual, getattr(inner, name, None))
    if (tied := getattr(outer, "tie_word_embeddings", None)) is not None:
        config["tie_word_embeddings"] = tied
    placeholders = () if outer is inner else (getattr(outer, name, None) for name in _PLACEHOLDERS)
    config["placeholder_token_ids"] = tuple(token for token in placeholders if token is not None)
    _check_attention(config)
    return {**config, "dtype": config.get("dtype") or raw.get("dtype") or raw.get("torch_dtype")}


def _check_attention(config: Mapping[str, Any]) -> None:
    """Raise `NotCovered` where a token of text attends to later ones (PaliGemma's prefix)."""
    if config.get("use_bidirectional_attention") not in (None, False, "vision"):
        raise NotCovered("config.json: use_bidirectional_attention is not supported")
    if not isinstance(config.get("model_type"), str):
        raise BadInput("config.json: the text model has no model_type")
