"""`QuantizedTensor`: the interface of all quantized weights."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import fields, replace
from typing import Any, Self

import torch


class QuantizedTensor(ABC):
    """The weight of one linear layer, `[out, in]`, as codes; a frozen dataclass with tensors as fields."""

    __slots__ = ()
    scheme: Any
    """The `Scheme` of this kind of tensor."""

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int]:
        """`(out_features, in_features)`."""

    @abstractmethod
    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The dequantized weight `[out, in]`, computed in float32."""

    @abstractmethod
    def rows(self, rows: slice) -> Self:
        """The weight of some output channels; `rows` starts at a multiple of 128."""

    @property
    def out_features(self) -> int:
        return self.shape[0]

    @property
    def in_features(self) -> int:
        return self.shape[1]

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
