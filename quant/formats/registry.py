"""Weight formats and their second readers, by name: those of single kinds, and those that hold several."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..base.errors import BadInput
from ..kinds.base.format import WeightFormat
from ..kinds.base.kind import Reader, storage_of
from ..kinds.registry import SCHEMES
from .bitsandbytes import BitsAndBytesFormat, read_bitsandbytes
from .compressed_tensors import CompressedTensorsFormat, read_compressed_tensors
from .modelopt import ModelOptFormat, read_modelopt

_STORAGES = [storage_of(scheme) for scheme in SCHEMES]
_ALL: list[WeightFormat] = [
    BitsAndBytesFormat(),
    CompressedTensorsFormat(),
    ModelOptFormat(),
    *(weight_format for storage in _STORAGES for weight_format in storage.formats),
]
FORMATS: dict[str, WeightFormat] = {
    weight_format.name: weight_format for weight_format in sorted(_ALL, key=lambda one: one.name)
}
READERS: dict[str, Reader] = {
    "bitsandbytes": read_bitsandbytes,
    "compressed-tensors": read_compressed_tensors,
    "modelopt": read_modelopt,
}
for _storage in _STORAGES:
    READERS |= _storage.readers


def format_of(quantization_config: dict[str, Any]) -> WeightFormat:
    """The format of a `quantization_config`, by its `quant_method`.

    Raises:
        BadInput: an unknown `quant_method`.
    """
    method = quantization_config.get("quant_method")
    found = next((one for one in FORMATS.values() if one.quant_method == method), None)
    if found is None:
        raise BadInput(
            f"quant_method {method!r} is not supported: this reads {', '.join(sorted(FORMATS))}"
        )
    return found


def config_files(quantization_config: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """JSON files that a format has beside `config.json`, by name."""
    return format_of(quantization_config).config_files(quantization_config)


def completed_config(quantization_config: dict[str, Any], folder: Path) -> dict[str, Any]:
    """A `quantization_config` with what it says of the shards in its folder, for formats that list them."""
    return format_of(quantization_config).completed_config(quantization_config, folder)
