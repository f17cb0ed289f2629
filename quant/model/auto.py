"""transformers' config and auto class of a `config.json`; code of a checkpoint is run only if trusted."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import transformers
from packaging.version import Version
from transformers import AutoConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from ...base.errors import BadInput, reported_as

_GROUPS = {"bamba": "mamba_n_groups", "granitemoehybrid": "mamba_n_groups", "mamba2": "n_groups"}
"""Field with the number of groups of the gated Mamba norm, by model type."""
_GROUPED_NORM = Version("5.23")
"""First release of transformers whose modules of these types normalize each group by itself."""


def read_config(
    raw: Mapping[str, Any], folder: Path | None = None, *, trust_remote_code: bool = False
) -> Any:
    """transformers' config. BadInput: an unknown type, untrusted code, or a config that it refuses."""
    model_type = str(raw.get("model_type"))
    if model_type not in CONFIG_MAPPING:
        version = raw.get("transformers_version")
        written_by = f" (the config was written by {version})" if version else ""
        if not raw.get("auto_map"):
            raise BadInput(
                f"model type {model_type!r} is not known to the installed transformers "
                f"{transformers.__version__}{written_by}: upgrade it (pip install -U transformers)"
            )
        if not trust_remote_code:
            raise BadInput(
                f"model type {model_type!r} needs code that its checkpoint brings (auto_map): read that "
                "code, then give --trust-remote-code"
            )
        if folder is None:
            raise BadInput(
                f"model type {model_type!r} runs code of its checkpoint: give its folder"
            )
        with reported_as(f"{folder}: its code gives no config"):
            return AutoConfig.from_pretrained(folder, trust_remote_code=True)
    with reported_as(f"transformers refuses the {model_type} config"):
        return CONFIG_MAPPING[model_type].from_dict(_with_floats(dict(raw)))


def build_on_meta(
    config: Any, *, dtype: Any = None, trust_remote_code: bool = False, **options: Any
) -> Any:
    """A config's model with its head, without memory. BadInput: neither causal nor image-text, or unbuilt."""
    import torch

    config = copy.deepcopy(config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    auto = auto_class(config, trust_remote_code)
    options |= {"dtype": dtype or torch.float32, "trust_remote_code": trust_remote_code}
    refusal = f"transformers {transformers.__version__} does not build a {config.model_type}"
    with reported_as(refusal), torch.device("meta"):
        return auto.from_config(config, **options)


def auto_class(config: Any, trust_remote_code: bool = False) -> Any:
    """Auto class of a config with its language head. BadInput: neither a causal nor an image-text model."""
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    )

    if type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        return transformers.AutoModelForImageTextToText
    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        return transformers.AutoModelForCausalLM
    if trust_remote_code and getattr(config, "auto_map", None):
        return transformers.AutoModelForCausalLM
    raise BadInput(f"{config.model_type} is no causal or image-text model of transformers")


def check_grouped_norm(config: Any, where: str) -> None:
    """Raise BadInput, of folder `where`, for a grouped Mamba norm that transformers computes as one."""
    text = config.get_text_config(decoder=True)
    groups = getattr(text, _GROUPS.get(text.model_type, ""), 1)
    if groups > 1 and Version(transformers.__version__).release < _GROUPED_NORM.release:
        raise BadInput(
            f"{where}: transformers {transformers.__version__} computes the Mamba norm of {text.model_type} "
            f"over all channels instead of each of the {groups} groups: pip install "
            f"'transformers>={_GROUPED_NORM}'"
        )


def _with_floats(value: Any) -> Any:
    """A copy with the infinities that transformers writes as `{"__float__": "Infinity"}`."""
    if isinstance(value, Mapping):
        if set(value) == {"__float__"}:
            return float(value["__float__"])
        return {key: _with_floats(part) for key, part in value.items()}
    return [_with_floats(part) for part in value] if isinstance(value, list) else value
