"""Quantized weights out of a checkpoint, whoever wrote it. The engine's loader reads through this."""

from __future__ import annotations

from .checkpoint import Checkpoint
from .errors import BadInput
from .formats.base import WeightFormat
from .formats.registry import format_of
from .scheme import QuantScheme
from .tensor import QuantizedTensor


def format_and_scheme(checkpoint: Checkpoint) -> tuple[WeightFormat, QuantScheme]:
    """How the quantized modules of a checkpoint are stored.

    Raises:
        BadInput: the checkpoint is not quantized, or in a way that is not supported.
    """
    config = checkpoint.quantization_config
    if config is None:
        raise BadInput(
            f"{checkpoint.folder} is not quantized: its config has no quantization_config"
        )
    try:
        weight_format = format_of(config)
        return weight_format, weight_format.scheme(config)
    except BadInput as error:
        raise BadInput(f"{checkpoint.folder}: {error}") from error


def quantized_modules(checkpoint: Checkpoint) -> set[str]:
    """Names of the linears whose weights are stored as codes; empty for a plain checkpoint.

    What counts is what the files hold: a module that the config ignores simply has a plain weight.

    Raises:
        BadInput: an unknown `quant_method`, an unsupported scheme, or a config that promises codes
            where the files hold none.
    """
    if checkpoint.quantization_config is None:
        return set()
    weight_format, _ = format_and_scheme(checkpoint)
    marker = weight_format.suffixes[0]
    modules = {name.removesuffix(marker) for name in checkpoint.names if name.endswith(marker)}
    if not modules:
        raise BadInput(
            f"{checkpoint.folder} says quant_method {weight_format.name!r}, but no tensor in it ends "
            f"in {marker!r}"
        )
    return modules


def tensor_names(checkpoint: Checkpoint, module: str) -> set[str]:
    """The tensors on disk that together make the weight of a quantized module (its bias is not one)."""
    weight_format, _ = format_and_scheme(checkpoint)
    names = {module + suffix for suffix in weight_format.suffixes}
    return names.intersection(checkpoint.names)


def read_quantized(checkpoint: Checkpoint, module: str) -> QuantizedTensor:
    """The codes, scales and zeros of one module.

    Raises:
        BadInput: a tensor is missing, or its shape contradicts the config.
    """
    weight_format, scheme = format_and_scheme(checkpoint)
    return weight_format.unpack(module, checkpoint.tensor, scheme)
