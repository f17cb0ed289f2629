"""Registry of weight formats."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..base.errors import BadInput
from .awq import AwqFormat
from .base import WeightFormat
from .bitsandbytes import BitsAndBytesFormat
from .compressed_tensors import CompressedTensorsFormat
from .exl3 import CONFIG_FILE, Exl3Format, with_stored_tensors
from .fp8 import Fp8Format
from .gguf import GgufFormat
from .gptq import GptqFormat
from .modelopt import HF_QUANT_CONFIG, ModelOptFormat, hf_quant_config
from .quip import QUANT_METHOD as QUIP_METHOD
from .quip import QuipFormat
from .squeezellm import SqueezeLlmFormat

_ALL: tuple[WeightFormat, ...] = (
    AwqFormat(),
    BitsAndBytesFormat(),
    CompressedTensorsFormat(),
    Exl3Format(),
    Fp8Format(),
    GgufFormat(),
    GptqFormat(),
    ModelOptFormat(),
    QuipFormat(),
    SqueezeLlmFormat(),
)
FORMATS: dict[str, WeightFormat] = {weight_format.name: weight_format for weight_format in _ALL}


def config_files(quantization_config: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """JSON files that a format has beside `config.json`, by name."""
    method = quantization_config.get("quant_method")
    if method in (Exl3Format.name, QUIP_METHOD):
        return {CONFIG_FILE: quantization_config}
    if method != ModelOptFormat.name:
        return {}
    return {HF_QUANT_CONFIG: hf_quant_config(quantization_config)}


def completed_config(quantization_config: dict[str, Any], folder: Path) -> dict[str, Any]:
    """A `quantization_config` with what it says of the shards in its folder, for formats that list them."""
    if quantization_config.get("quant_method") == Exl3Format.name:
        return with_stored_tensors(quantization_config, folder)
    return quantization_config


def format_of(quantization_config: dict[str, Any]) -> WeightFormat:
    """The format of a `quantization_config`, by its `quant_method`.

    Raises:
        BadInput: an unknown `quant_method`.
    """
    method = quantization_config.get("quant_method")
    name = QuipFormat.name if method == QUIP_METHOD else method
    if name not in FORMATS:
        raise BadInput(
            f"quant_method {method!r} is not supported: this reads {', '.join(sorted(FORMATS))}"
        )
    return FORMATS[name]
