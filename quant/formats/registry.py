"""Weight formats by name, and reading quantized weights of any of them, as the engine's loader does too."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from importlib import import_module
from typing import Any

from ...base.errors import BadInput, reported_as
from ..base.scheme import Scheme
from ..kinds.base.format import CACHE_SCALES, WeightFormat
from ..kinds.base.kind import storage_of
from ..kinds.base.tensor import QuantizedTensor
from ..kinds.registry import KINDS, format_names, scheme_class
from ..model.checkpoint import Checkpoint


class _Formats(Mapping[str, WeightFormat]):
    """Weight formats by name; the modules of a format are imported when it is looked up."""

    def __getitem__(self, name: str) -> WeightFormat:
        kind = next((kind for kind, entry in KINDS.items() if name in entry.formats), None)
        if kind is not None:
            formats = storage_of(scheme_class(kind)).formats
            return next(weight_format for weight_format in formats if weight_format.name == name)
        if name not in format_names():
            raise KeyError(name)
        return import_module(f".{name.replace('-', '_')}", __package__).FORMAT

    def __iter__(self) -> Iterator[str]:
        return iter(format_names())

    def __len__(self) -> int:
        return len(format_names())


FORMATS = _Formats()
_NAMES = {"QUiP": "quip"}  # formats whose `quant_method` is not their name


def format_of(quantization_config: Mapping[str, Any]) -> WeightFormat:
    """The format of a `quantization_config`, by its `quant_method`; BadInput: an unknown `quant_method`."""
    method = quantization_config.get("quant_method")
    name = _NAMES.get(str(method), method)
    if name not in format_names() or FORMATS[name].quant_method != method:
        raise BadInput(
            f"quant_method {method!r} is not supported: this reads {', '.join(format_names())}"
        )
    return FORMATS[name]


_CODES = ("I8", "U8", "F8_E4M3", "F8_E5M2", "F8_E8M0")  # dtypes that only quantized weights have
_PACKED = ("_packed", ".qweight", ".qzeros")


def checkpoint_format(checkpoint: Checkpoint) -> WeightFormat:
    """Weight format of a quantized checkpoint. BadInput: it is not quantized, or unsupported."""
    config = checkpoint.quantization_config
    if config is None:
        raise BadInput(f"{checkpoint.path} is not quantized: its config has no quantization_config")
    with reported_as(str(checkpoint.path), BadInput):
        return format_of(config)


def marked_modules(checkpoint: Checkpoint, weight_format: WeightFormat) -> set[str]:
    marked = ((n, m) for m in weight_format.markers for n in checkpoint.names if n.endswith(m))
    return {name.removesuffix(marker) for name, marker in marked}


def quantized_modules(checkpoint: Checkpoint) -> set[str]:
    """Quantized linears by the files, empty for none. BadInput: unknown, unsupported, or contradictory."""
    if checkpoint.quantization_config is None:
        leaves = ((name, name.rpartition(".")[2]) for name in checkpoint.names)
        scale = next((name for name, leaf in leaves if "scale" in leaf), None)
        if scale is not None and any(checkpoint.dtype_name(n) in _CODES for n in checkpoint.names):
            raise BadInput(
                f"{checkpoint.path} holds codes with scales such as {scale}, but its config has no "
                "quantization_config that says what they mean"
            )
        return set()
    weight_format = checkpoint_format(checkpoint)
    modules = marked_modules(checkpoint, weight_format)
    if not modules:
        markers = " or ".join(map(repr, weight_format.markers))
        raise BadInput(
            f"{checkpoint.path} says quant_method {weight_format.name!r}, but no tensor in it ends "
            f"in {markers}"
        )
    with reported_as(str(checkpoint.path), BadInput):
        weight_format.check_config(checkpoint.quantization_config, modules)
    _refuse_unread(checkpoint, modules)
    return modules


def _refuse_unread(checkpoint: Checkpoint, modules: set[str]) -> None:
    """Raise BadInput for tensors of quantized weights that no reader takes, such as `pre_quant_scale`."""
    taken = {name for module in modules for name in tensor_names(checkpoint, module)}
    for name in checkpoint.names:
        if name in taken or name.endswith((*CACHE_SCALES, ".g_idx")):
            continue
        dtype, module = checkpoint.dtype_name(name), name.removesuffix(".weight")
        if dtype in _CODES and module != name:
            raise BadInput(
                f"{checkpoint.path}: {name} holds {dtype} codes, but its scales are missing: the "
                "checkpoint is incomplete"
            )
        if dtype in _CODES or name.endswith(_PACKED):
            raise BadInput(
                f"{checkpoint.path}: {name} holds {dtype} codes of shape {checkpoint.shape(name)}, which no "
                "reader here takes: fused experts are read with a linear for each expert alone"
            )
        parts = name.split(".")
        owner = next(
            (o for n in range(1, len(parts)) if (o := ".".join(parts[:n])) in modules), None
        )
        if owner is not None and name != f"{owner}.bias":
            raise BadInput(
                f"{checkpoint.path}: {name} belongs to the quantized {owner}, and nothing here reads it"
            )


def module_scheme(checkpoint: Checkpoint, module: str) -> Scheme:
    """The scheme of a quantized module, from the config; BadInput: a scheme that cannot be read here."""
    weight_format = checkpoint_format(checkpoint)
    with reported_as(str(checkpoint.path), BadInput):
        return weight_format.scheme(checkpoint.quantization_config or {}, module)


def tensor_names(checkpoint: Checkpoint, module: str) -> set[str]:
    names = (module + suffix for suffix in checkpoint_format(checkpoint).suffixes)
    return {name for name in names if name in checkpoint}


def names_with_weights(checkpoint: Checkpoint, modules: Collection[str]) -> list[str]:
    """Names of all tensors, with `weight` in place of those of a quantized linear."""
    stored = {name for module in modules for name in tensor_names(checkpoint, module)}
    plain = [name for name in checkpoint.names if name not in stored]
    return plain + [f"{module}.weight" for module in modules]


def read_quantized(checkpoint: Checkpoint, module: str) -> QuantizedTensor:
    """The packed weight of one module. BadInput: a tensor is missing, or misshapen by the config."""
    config = checkpoint.quantization_config or {}
    return checkpoint_format(checkpoint).unpack(module, checkpoint, config)
