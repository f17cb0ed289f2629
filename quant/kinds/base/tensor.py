"""`QuantizedTensor`: the interface of all quantized weights."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any, ClassVar, Self, TypeVar

import torch

from ....base.errors import BadInput


class QuantizedTensor(ABC):
    """The weight of one linear layer, `[out, in]`, as codes; a frozen dataclass with tensors as fields."""

    __slots__ = ()
    scheme: Any
    """The `Scheme` of this kind of tensor."""
    by_row: ClassVar[tuple[str, ...]] = ("codes",)
    """Fields with a row for each output channel, the first of the weight's shape."""

    @property
    def shape(self) -> tuple[int, int]:
        """`(out_features, in_features)`."""
        out_features, in_features = getattr(self, self.by_row[0]).shape
        return out_features, in_features

    @abstractmethod
    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The dequantized weight `[out, in]`, computed in float32."""

    def rows(self, rows: slice) -> Self:
        """The weight of some output channels; `rows` starts at a multiple of 128."""
        named: Any = self
        return replace(named, **{name: getattr(self, name)[rows] for name in self.by_row})

    @property
    def out_features(self) -> int:
        return self.shape[0]

    @property
    def in_features(self) -> int:
        return self.shape[1]

    def forms(self) -> Iterator[QuantizedTensor]:
        """The weight and its exact equivalents on other grids, the simplest first."""
        yield self

    def without_activations(self) -> Self:
        """The same weight with 16-bit activations, where inputs are quantized apart from the weight."""
        named: Any = self
        held = {field.name for field in fields(self.scheme)}
        if "activations" not in held or self.scheme.activations is None:
            return self
        scheme = replace(self.scheme, activations=None)
        return replace(named, scheme=scheme, input_scale=None)

    def stored_as(
        self, dtype_of: Callable[[torch.dtype], torch.dtype] | None, inverts: bool
    ) -> Self:
        """The weight with its scales as a format stores them; BadInput where that changes one.

        Args:
            dtype_of: the stored dtype of scales that have a dtype; None: any dtype is stored.
            inverts: whether the reciprocals of scales of whole weights are stored.
        """
        return self

    def parts(self) -> dict[str, torch.Tensor]:
        """All component tensors by name; a reader must restore them bit-identically."""
        named: Any = self
        values = {field.name: getattr(named, field.name) for field in fields(named)}
        return {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}

    @property
    def nbytes(self) -> int:
        """Bytes of all parts in memory."""
        return sum(part.nbytes for part in self.parts().values())

    def to(self, device: torch.device | str) -> Self:
        """The same weight on another device."""
        named: Any = self
        return replace(named, **{name: part.to(device) for name, part in self.parts().items()})


_SCALE_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def require_scales(tensor: QuantizedTensor, module: str) -> None:
    """Raises BadInput naming the module whose weights are too large for the dtype of its scales."""
    for part in tensor.parts().values():
        if part.dtype in _SCALE_DTYPES and not bool(torch.isfinite(part).all()):
            raise BadInput(f"{module} holds values too large for {part.dtype} scales")


def edges(weight: torch.Tensor) -> tuple[float, float]:
    """The least and largest value in one pass without temporaries, NaN where there is one; 0 of no values."""
    if not weight.numel():
        return 0.0, 0.0
    low, high = torch.stack(weight.aminmax()).tolist()
    return low, high


def require_finite(weight: torch.Tensor, module: str) -> None:
    """Raises BadInput naming the module whose weight holds NaN or infinity."""
    if not all(map(math.isfinite, edges(weight))):
        raise BadInput(f"{module} holds NaN or infinite values: the checkpoint is damaged")


# Rows below this share of the largest weight are below the noise of 16-bit activations.
_NEGLIGIBLE = 2.0**-16
# Only rows whose largest weight is below this, or a share of the whole weight's, may have a scale of zero.
_SMALL = 2.0**-10


def zeroed_rows(weight: torch.Tensor, tensor: QuantizedTensor, module: str) -> int:
    """Count the rows that are not zero in a weight `[out, in]` and are all zeros as codes.

    Their scales are too small for the dtype that they are stored in.

    Raises:
        BadInput: naming the module, where such a row is not negligible next to the largest weight.
    """
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


TensorT = TypeVar("TensorT", bound=QuantizedTensor)


def with_scale_dtype(
    tensor: TensorT, scales: torch.Tensor, dtype_of: Callable[[torch.dtype], torch.dtype] | None
) -> TensorT:
    """A weight with its `scales` in another dtype; BadInput where that changes one."""
    if dtype_of is None:
        return tensor
    dtype = dtype_of(scales.dtype)
    cast = scales.to(dtype)
    if not torch.equal(cast.to(torch.float32), scales.to(torch.float32)):
        theirs, ours = (str(kind).removeprefix("torch.") for kind in (scales.dtype, dtype))
        raise BadInput(f"its {theirs} scales are not exact in the format's {ours}")
    named: Any = tensor
    return replace(named, scales=cast)
