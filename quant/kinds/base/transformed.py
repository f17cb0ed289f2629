"""Codes between the transforms of incoherence processing: their tensor, the grid of one weight, their kind.

GPTQ's error feedback over such a grid, a vector of input channels at a time, is block LDLQ (QuIP#, QTIP).
What a code stands for cannot be told from the values alone, so that the grid keeps codes while it is solved
over; the weights are transformed already (`incoherence.py`), so that nothing is fitted.
"""

from __future__ import annotations

import zlib
from abc import abstractmethod
from typing import Any, Generic, Self, TypeVar

import torch

from ...base.scheme import Scheme
from .grid import Grid, Parameters
from .incoherence import Incoherence
from .kind import Kind, Rounding
from .tensor import QuantizedTensor


class TransformedTensor(QuantizedTensor):
    """`w = diag(sv) V Q Uᵀ diag(su)`, `Q` `[out, in]` the values of the codes, `U` and `V` Hadamard."""

    __slots__ = ()

    @property
    @abstractmethod
    def transforms(self) -> Incoherence:
        """The transforms around the quantized values."""

    @abstractmethod
    def inner(self) -> torch.Tensor:
        """The quantized values, float32 `[out, in]`."""

    @abstractmethod
    def with_scales(self, inputs: torch.Tensor, outputs: torch.Tensor) -> Self:
        """The same codes with other scales `[in]` and `[out]`, signs included."""

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return self.transforms.backward(self.inner()).to(dtype)


SchemeT = TypeVar("SchemeT", bound=Scheme)
TensorT = TypeVar("TensorT", bound=TransformedTensor)


class TransformedGrid(Grid, Generic[SchemeT, TensorT]):
    """The grid of one weight `[out, in]`, as its transforms leave it."""

    rows_alone = False

    def __init__(self, scheme: SchemeT, transforms: Incoherence):
        self.scheme, self.transforms = scheme, transforms
        self.group = len(transforms.inputs)

    @classmethod
    @abstractmethod
    def of(cls, weight: torch.Tensor, scheme: SchemeT, name: str) -> Self:
        """The grid of a weight `[out, in]`; its name seeds the signs of the transforms.

        Raises:
            BadInput: a width that the codes or the transforms do not divide.
        """

    @abstractmethod
    def tensor(self, values: torch.Tensor, parameters: Parameters) -> TensorT:
        """The codes that were kept last, with the transforms."""

    @abstractmethod
    def nearest_values(self, targets: torch.Tensor, first: int) -> torch.Tensor:
        """The values nearest to `targets` `[channels, out]` from channel `first` on; keeps their codes."""

    def fit(self, values: torch.Tensor, importance: torch.Tensor | None = None) -> Parameters:
        return ()

    def columns(self, parameters: Parameters) -> Self:
        return self

    def errors(
        self, targets: torch.Tensor, weights: torch.Tensor, first: int, *, out: torch.Tensor
    ) -> None:
        """Round vectors of columns and keep their codes, as `Columns.errors` says."""
        torch.sub(weights, self.nearest_values(targets, first), out=out)

    def round(self, values: torch.Tensor, parameters: Parameters) -> torch.Tensor:
        return self.nearest_values(values.flatten(1).T, 0).T.unflatten(1, values.shape[1:])

    def nearest(self, weight: torch.Tensor, importance: torch.Tensor | None = None) -> TensorT:
        """Transform the weight and round it to the nearest values, without data."""
        values = self.transforms.forward(weight).unsqueeze(1)
        return self.tensor(self.round(values, ()).flatten(1), ())

    def yardstick(self, weight: torch.Tensor) -> torch.Tensor:
        """The weight with which errors are compared: rounded to nearest."""
        return self.nearest(weight).dequantize()


def seed_of(name: str) -> int:
    """The seed of the signs of a weight's transforms."""
    return zlib.crc32(name.encode())


class TransformedKind(Kind[SchemeT]):
    """A kind whose grids belong to one weight, with its transforms."""

    @abstractmethod
    def grid_of(self, weight: torch.Tensor, name: str) -> TransformedGrid[SchemeT, Any]:
        """The grid of a weight `[out, in]`; its name seeds the signs of the transforms.

        Raises:
            BadInput: a width that the codes or the transforms do not divide.
        """

    def rounded(self, weight: torch.Tensor, how: Rounding) -> TransformedTensor:
        return self.grid_of(weight, how.name).nearest(weight)
