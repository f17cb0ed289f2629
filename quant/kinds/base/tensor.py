"""`QuantizedTensor`: the interface of all quantized weights."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any, ClassVar, Self

import torch

from ....base.errors import BadInput


class QuantizedTensor(ABC):
    """The weight of one linear layer, `[out, in]`, as codes; a frozen dataclass with tensors as fields."""

    __slots__ = ()
    scheme: Any
    """The `Scheme` of this kind of tensor."""
    has_open_dtype: ClassVar[bool] = False
    """True if the format decides the dtype of `scales`."""
    by_row: ClassVar[tuple[str, ...]] = ("codes",)
    """Fields with a row for each output channel, the first of the weight's shape."""

    @property
    def shape(self) -> tuple[int, int]:
        out_features, in_features = getattr(self, self.by_row[0]).shape
        return out_features, in_features

    @abstractmethod
    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The dequantized weight `[out, in]`, computed in float32."""

    def rows(self, rows: slice) -> Self:
        named: Any = self
        return replace(named, **{name: getattr(self, name)[rows] for name in self.by_row})

    @property
    def out_features(self) -> int:
        return self.shape[0]

    @property
    def in_features(self) -> int:
        return self.shape[1]

    def forms(self) -> Iterator[QuantizedTensor]:
        yield self

    def without_activations(self) -> Self:
        """The same weight with 16-bit activations, where inputs are quantized apart from the weight."""
        named: Any = self
        names = {field.name for field in fields(self.scheme)}
        if "activations" not in names or self.scheme.activations is None:
            return self
        return replace(named, scheme=replace(self.scheme, activations=None), input_scale=None)

    def stored_as(
        self, dtype_of: Callable[[torch.dtype], torch.dtype] | None, inverts: bool
    ) -> Self:
        """The weight with its scales as a format stores them; BadInput where that changes one. `dtype_of` is
        the stored dtype, None: any; `inverts`: reciprocals of whole weights' scales are stored."""
        if dtype_of is None or not self.has_open_dtype:
            return self
        named: Any = self
        scales: torch.Tensor = named.scales
        stored = scales.to(dtype_of(scales.dtype))
        if not torch.equal(stored.to(torch.float32), scales.to(torch.float32)):
            theirs, ours = (str(part.dtype).removeprefix("torch.") for part in (scales, stored))
            raise BadInput(f"its {theirs} scales are not exact in the format's {ours}")
        return replace(named, scales=stored)

    def parts(self) -> dict[str, torch.Tensor]:
        """All component tensors by name; a reader must restore them bit-identically."""
        named: Any = self
        values = {field.name: getattr(named, field.name) for field in fields(named)}
        return {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts().values())

    def to(self, device: torch.device | str) -> Self:
        named: Any = self
        return replace(named, **{name: part.to(device) for name, part in self.parts().items()})


SCALE_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def require_scales(tensor: QuantizedTensor, module: str) -> None:
    """Raises BadInput naming the module whose weights are too large for the dtype of its scales."""
    for part in tensor.parts().values():
        if part.dtype in SCALE_DTYPES and not bool(torch.isfinite(part).all()):
            raise BadInput(f"{module} holds values too large for {part.dtype} scales")


def edges(weight: torch.Tensor) -> tuple[float, float]:
    """The least and largest value in one pass without temporaries, NaN where there is one; 0 of no values."""
    if not weight.numel():
        return 0.0, 0.0
    low, high = torch.stack(weight.aminmax()).tolist()
    return low, high


def require_finite(weight: torch.Tensor, module: str) -> None:
    if not all(map(math.isfinite, edges(weight))):
        raise BadInput(f"{module} holds NaN or infinite values: the checkpoint is damaged")


# Rows below this share of the largest weight are below the noise of 16-bit activations.
_NEGLIGIBLE = 2.0**-16
# Only rows whose largest weight is below this, or a share of the whole weight's, may have a scale of zero.
_SMALL = 2.0**-10


def zeroed_rows(weight: torch.Tensor, tensor: QuantizedTensor, module: str) -> int:
    """Count rows that become zeros, as their scales are too small; BadInput: one is not negligible."""
    rows = weight.abs().amax(dim=1)
    whole = float(rows.max())
    small = (rows > 0) & (rows < max(_SMALL, _SMALL * whole))
    if not bool(small.any()):
        return 0
    lost = small & ~tensor.dequantize().to(rows.device).any(dim=1)
    largest = float(rows[lost].max()) if bool(lost.any()) else 0.0
    if largest > _NEGLIGIBLE * whole:
        raise BadInput(
            f"{module}: {int(lost.sum())} of {len(rows)} rows would become zeros: weights up to "
            f"{largest:.1e} are too small for the scales of {tensor.scheme.label}; leave it out with "
            "--ignore, or choose --format compressed-tensors, whose scales have the model's dtype"
        )
    return int(lost.sum())
