"""Quantized weights out of a checkpoint, whoever wrote it. The engine's loader reads through this."""

from __future__ import annotations

from ..base.errors import BadInput
from ..base.scheme import Scheme
from ..formats.base import WeightFormat
from ..formats.registry import format_of
from ..model.checkpoint import Checkpoint
from ..tensors.base import QuantizedTensor

_CODES = ("I8", "U8", "F8_E4M3")  # dtypes in which no plain weight is stored


def checkpoint_format(checkpoint: Checkpoint) -> WeightFormat:
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
        return format_of(config)
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
    weight_format = checkpoint_format(checkpoint)
    modules = {
        name.removesuffix(marker)
        for marker in weight_format.markers
        for name in checkpoint.names
        if name.endswith(marker)
    }
    if not modules:
        marker_list = " or ".join(repr(marker) for marker in weight_format.markers)
        raise BadInput(
            f"{checkpoint.folder} says quant_method {weight_format.name!r}, but no tensor in it ends "
            f"in {marker_list}"
        )
    module_scheme(checkpoint, min(modules))
    _refuse_codes_without_scales(checkpoint, modules)
    return modules


def _refuse_codes_without_scales(checkpoint: Checkpoint, modules: set[str]) -> None:
    """Raises BadInput for a weight that is stored as codes, but lacks what tells so."""
    for name in checkpoint.names:
        module = name.removesuffix(".weight")
        if module != name and module not in modules and checkpoint.dtype_name(name) in _CODES:
            raise BadInput(
                f"{checkpoint.folder}: {name} holds {checkpoint.dtype_name(name)} codes, but its "
                "scales are missing: the checkpoint is incomplete"
            )


def module_scheme(checkpoint: Checkpoint, module: str) -> Scheme:
    """The scheme that the config gives a quantized module.

    Raises:
        BadInput: a scheme that cannot be read here.
    """
    weight_format = checkpoint_format(checkpoint)
    try:
        return weight_format.scheme(checkpoint.quantization_config or {}, module)
    except BadInput as error:
        raise BadInput(f"{checkpoint.folder}: {error}") from error


def tensor_names(checkpoint: Checkpoint, module: str) -> set[str]:
    """The tensors on disk that together make the weight of a quantized module (its bias is not one)."""
    names = {module + suffix for suffix in checkpoint_format(checkpoint).suffixes}
    return names.intersection(checkpoint.names)


def read_quantized(checkpoint: Checkpoint, module: str) -> QuantizedTensor:
    """The weight of one module, still as codes.

    Raises:
        BadInput: a tensor is missing, or its shape contradicts the config.
    """
    weight_format = checkpoint_format(checkpoint)
    return weight_format.unpack(module, checkpoint, checkpoint.quantization_config or {})
