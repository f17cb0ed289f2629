"""Reading quantized weights from a checkpoint of any supported format; used by the engine's loader."""

from __future__ import annotations

from ..base.errors import BadInput
from ..base.scheme import Scheme
from ..formats.registry import format_of
from ..kinds.base.format import WeightFormat
from ..kinds.base.tensor import QuantizedTensor
from ..model.checkpoint import Checkpoint

_CODES = ("I8", "U8", "F8_E4M3")  # dtypes that only quantized weights have


def checkpoint_format(checkpoint: Checkpoint) -> WeightFormat:
    """The weight format of a quantized checkpoint.

    Raises:
        BadInput: the checkpoint is not quantized, or in a way that is not supported.
    """
    config = checkpoint.quantization_config
    if config is None:
        raise BadInput(f"{checkpoint.path} is not quantized: its config has no quantization_config")
    try:
        return format_of(config)
    except BadInput as error:
        raise BadInput(f"{checkpoint.path}: {error}") from error


def quantized_modules(checkpoint: Checkpoint) -> set[str]:
    """Names of the quantized linears; empty for an unquantized checkpoint.

    The files decide: a module that the config ignores has a plain weight.

    Raises:
        BadInput: an unknown `quant_method`, an unsupported scheme, or a config that declares
            quantized weights where the files hold none.
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
            f"{checkpoint.path} says quant_method {weight_format.name!r}, but no tensor in it ends "
            f"in {marker_list}"
        )
    module_scheme(checkpoint, min(modules))
    _refuse_codes_without_scales(checkpoint, modules)
    return modules


def _refuse_codes_without_scales(checkpoint: Checkpoint, modules: set[str]) -> None:
    """Raises BadInput for quantized weights without scales."""
    for name in checkpoint.names:
        module = name.removesuffix(".weight")
        if module != name and module not in modules and checkpoint.dtype_name(name) in _CODES:
            raise BadInput(
                f"{checkpoint.path}: {name} holds {checkpoint.dtype_name(name)} codes, but its "
                "scales are missing: the checkpoint is incomplete"
            )


def module_scheme(checkpoint: Checkpoint, module: str) -> Scheme:
    """The scheme of a quantized module, from the config.

    Raises:
        BadInput: a scheme that cannot be read here.
    """
    weight_format = checkpoint_format(checkpoint)
    try:
        return weight_format.scheme(checkpoint.quantization_config or {}, module)
    except BadInput as error:
        raise BadInput(f"{checkpoint.path}: {error}") from error


def tensor_names(checkpoint: Checkpoint, module: str) -> set[str]:
    """Names of the tensors that store a quantized module's weight (without the bias)."""
    names = {module + suffix for suffix in checkpoint_format(checkpoint).suffixes}
    return names.intersection(checkpoint.names)


def read_quantized(checkpoint: Checkpoint, module: str) -> QuantizedTensor:
    """The packed weight of one module, as a `QuantizedTensor`.

    Raises:
        BadInput: a tensor is missing, or its shape contradicts the config.
    """
    weight_format = checkpoint_format(checkpoint)
    return weight_format.unpack(module, checkpoint, checkpoint.quantization_config or {})
