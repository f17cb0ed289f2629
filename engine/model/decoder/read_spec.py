"""Reading a raw `config.json` as the `ModelSpec` of the native decoder, by its family's file.

`ModelShape` has all sizes; the family adds the architecture choices, and raises `NotCovered` for features
that the decoder does not implement.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ....quant.base.errors import BadInput
from ....quant.families.config import complete, current_names, is_classifier
from ....quant.families.registry import all_families, model_family, type_of
from ....quant.families.spec_parts import CLAMPED_SWIGLU, Names, NotCovered
from ..layers.mlp import ACTIVATIONS
from ..spec import ModelSpec

Config = Mapping[str, Any]
_PLACEHOLDERS = ("image_token_id", "video_token_id", "audio_token_id")


def supported_model_types() -> tuple[str, ...]:
    """The model types that the native decoder runs."""
    return tuple(family.name for family in all_families() if family.choices is not None)


def model_spec(raw: Config) -> ModelSpec:
    """Parse a raw `config.json`; of a multimodal one its text model.

    Raises:
        NotCovered: an unsupported model type or feature.
        BadInput: an invalid value, or a missing key.
    """
    raw = current_names(raw)
    multimodal = isinstance(raw.get("text_config"), Mapping)
    config = text_config(raw) if multimodal else raw
    family = model_family(type_of(config))
    if family is None or family.rules is None or family.choices is None:
        raise NotCovered(
            f"config.json: model_type {config.get('model_type')!r} is not one of the decoder's own "
            f"({', '.join(supported_model_types())})"
        )
    try:
        if family.rules.defaults is not None:
            _, config = complete(config)
        elif not multimodal:
            config = text_config(config)
        config = family.prepare(config)
        shape = family.shape(config)
        dtype = config.get("dtype") or config.get("torch_dtype")
        defaults: dict[str, Any] = {
            "shape": shape,
            "names": Names(),
            "dtype": str(dtype or "float32"),
            "norm_eps": float(config.get("rms_norm_eps", 1e-6)),
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


def text_config(raw: Config) -> dict[str, Any]:
    """The config of a checkpoint's text model, with every default of its class and the usual field names.

    A multimodal checkpoint's `tie_word_embeddings` is the outer one: transformers reads no other. Its
    placeholder tokens are `placeholder_token_ids`; a text model has none.

    Raises:
        NotCovered: the installed transformers does not know the type.
        BadInput: its class refuses the config.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    from ....quant.model.auto import read_config

    if type_of(raw) not in CONFIG_MAPPING:
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


def _check_attention(config: Config) -> None:
    """Raise `NotCovered` where a token of text attends to later ones (PaliGemma's prefix)."""
    if config.get("use_bidirectional_attention") not in (None, False, "vision"):
        raise NotCovered("config.json: use_bidirectional_attention is not supported")
    if not isinstance(type_of(config), str):
        raise BadInput("config.json: the text model has no model_type")
