"""The formats there are, by name."""

from __future__ import annotations

from typing import Any

from ..errors import BadInput
from .awq import AwqFormat
from .base import WeightFormat
from .compressed_tensors import CompressedTensorsFormat

FORMATS: dict[str, WeightFormat] = {
    weight_format.name: weight_format for weight_format in (AwqFormat(), CompressedTensorsFormat())
}


def format_of(quantization_config: dict[str, Any]) -> WeightFormat:
    """The format that a `quantization_config` names.

    Raises:
        BadInput: an unknown `quant_method`.
    """
    method = quantization_config.get("quant_method")
    if method not in FORMATS:
        raise BadInput(
            f"quant_method {method!r} is not supported: this reads {', '.join(sorted(FORMATS))}"
        )
    return FORMATS[method]
