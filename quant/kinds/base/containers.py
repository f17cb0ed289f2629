"""The parts of a kind in formats that hold several kinds: compressed-tensors, ModelOpt and bitsandbytes.

The format itself (`quant/formats`) finds a part by scheme, layout or algorithm.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from typing import Any

import torch

from ....base.errors import BadInput
from ...base.scheme import Activations, Scheme
from .format import Config, Stored
from .raw import Entries, Raw
from .tensor import SCALE_DTYPES, QuantizedTensor


class Container(ABC):
    """A kind's part of a format that several kinds share."""

    def check(self, module: str, out_features: int, in_features: int, scheme: Any) -> None:
        return

    @abstractmethod
    def pack(self, module: str, tensor: Any) -> dict[str, torch.Tensor]:
        """Pack one module; tensors by full name."""


class CompressedLayouts(Container):
    """The layouts of a kind in compressed-tensors."""

    layouts: tuple[str, ...]
    naive: str | None = None
    """The layout of files of `naive-quantized`, an older name; None: there are none."""

    @abstractmethod
    def describes(self, weights: Config) -> bool:
        """True if the `weights` of an entry of `config_groups` are of this kind."""

    @abstractmethod
    def layout_of(self, scheme: Any) -> str | None:
        """The layout for a scheme; None: none stores it."""

    @abstractmethod
    def weights(self, scheme: Any) -> dict[str, Any]:
        """The fields of `weights` in an entry of `config_groups`, but for the bits."""

    def inputs(self, activations: Activations) -> dict[str, Any]:
        """The `input_activations` of such an entry; here those of 8 bits."""
        grouped = activations.granularity == "group128"
        return {
            "num_bits": 8,
            "type": "int" if activations.kind == "int8" else "float",
            "symmetric": True,
            "strategy": "group" if grouped else activations.granularity,
            "dynamic": activations.dynamic,
        } | ({"group_size": 128} if grouped else {})

    @abstractmethod
    def scheme(self, layout: str, group: Config) -> Scheme:
        """The scheme of an entry; BadInput where it is not supported."""

    @abstractmethod
    def unpack(self, stored: Stored, layout: str, scheme: Any) -> QuantizedTensor:
        """Unpack one module."""

    @abstractmethod
    def read_raw(self, entries: Entries, module: str, layout: str | None, group: Any) -> Raw:
        """Read one module a second time, with numpy alone."""


class ModelOptAlgorithms(Container):
    """The algorithms of a kind in ModelOpt: schemes by `quant_algo`, and safetensors' dtype of `weight`."""

    algorithms: Mapping[str, Scheme]
    raw_dtype: str

    def group_size(self, scheme: Any) -> dict[str, int]:
        return {}

    @abstractmethod
    def unpack(self, stored: Stored, scheme: Any) -> QuantizedTensor:
        """Unpack one module."""

    @abstractmethod
    def read_raw(self, entries: Entries, module: str, config: dict[str, Any]) -> Raw:
        """Read one module a second time, with numpy alone."""


class BitsAndBytesCodes(Container):
    bits: int
    marker: str
    suffixes: tuple[str, ...]

    @abstractmethod
    def fields(self, scheme: Any) -> dict[str, Any]:
        """The fields of the `quantization_config` that depend on the scheme."""

    @abstractmethod
    def scheme(self, config: Config) -> Scheme:
        """The scheme of a `quantization_config`; BadInput where it is not supported."""

    @abstractmethod
    def unpack(self, stored: Stored, config: Config) -> QuantizedTensor:
        """Unpack one module."""

    @abstractmethod
    def read_raw(self, entries: Entries, module: str) -> Raw:
        """Read one module a second time, with numpy alone."""


def unsupported(what: str) -> BadInput:
    return BadInput(f"quant_method compressed-tensors with {what} is not supported")


def read_weights(
    layout: str, group: Config, type_name: str, widths: Collection[int]
) -> tuple[Config, str, Activations | None]:
    """Weights, strategy and 8-bit inputs of an entry of `config_groups`. Raises BadInput: not supported."""
    weights = group.get("weights") or {}
    kind, bits = weights.get("type", "int"), weights.get("num_bits", 8)
    if kind != type_name or bits not in widths:
        raise unsupported(f"{bits}-bit {kind} weights in the layout {layout}")
    if group.get("output_activations"):
        raise unsupported("quantized outputs")
    if not weights.get("symmetric", True) and type_name == "float":
        raise unsupported("asymmetric float weights")
    activations = _read_activations(group.get("input_activations"))
    strategy = weights.get("strategy") or ("group" if weights.get("group_size") else "channel")
    return weights, strategy, activations


def _read_activations(record: Config | None) -> Activations | None:
    if not record:
        return None
    kind = "int8" if record.get("type", "int") == "int" else "fp8"
    if record.get("num_bits", 8) != 8 or not record.get("symmetric", True):
        raise unsupported("activations that are not 8 bits and symmetric")
    strategy, dynamic = record.get("strategy") or "tensor", record.get("dynamic", False)
    if strategy == "group" and record.get("group_size") == 128:
        return Activations(kind, "group128", bool(dynamic))
    if strategy not in ("token", "tensor"):
        raise unsupported(f"activations with the {strategy!r} strategy")
    return Activations(kind, strategy, bool(dynamic))


def read_scales(stored: Stored, shape: tuple[int, int]) -> torch.Tensor:
    return spread_over_rows(stored, "weight_scale", *SCALE_DTYPES, shape=shape)


def spread_over_rows(
    stored: Stored, ending: str, *dtypes: torch.dtype, shape: tuple[int, int]
) -> torch.Tensor:
    """A matrix of `shape`; a stored scalar or vector of rows is expanded to it."""
    tensor = stored.tensor(ending, *dtypes)
    if tensor.numel() == 1:
        return tensor.reshape(1, 1).expand(shape).contiguous()
    if tensor.shape == (shape[0],) and shape[1] == 1:
        return tensor.reshape(shape)
    return stored.tensor(ending, shape=shape)


def input_scale_part(module: str, scale: torch.Tensor | None) -> dict[str, torch.Tensor]:
    return {} if scale is None else {f"{module}.input_scale": scale.reshape(1)}


def read_input_scale(
    stored: Stored, activations: Activations | None, ending: str = "input_scale"
) -> torch.Tensor | None:
    """The scale of static activations, float32 `[1]`."""
    if activations is None or activations.dynamic:
        return None
    scale = stored.tensor(ending, *SCALE_DTYPES)
    if scale.numel() != 1:
        raise BadInput(
            f"{stored.module}.{ending} has shape {tuple(scale.shape)}: only a per-tensor scale is "
            "supported"
        )
    return scale.to(torch.float32).reshape(1)


def one_number(stored: Stored, ending: str) -> torch.Tensor:
    """A scale of a whole tensor, float32 `[1]`; BadInput where it is no positive number."""
    name, scale = f"{stored.module}.{ending}", stored.tensor(ending, torch.float32)
    if scale.numel() != 1:
        raise BadInput(f"{name} has shape {tuple(scale.shape)}: only one scale is supported")
    if not float(scale) > 0 or not bool(torch.isfinite(scale)):
        raise BadInput(f"{name} is {float(scale):g}, and a scale is a positive number")
    return scale.reshape(1)
