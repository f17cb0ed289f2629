"""`TransformedTensor`: codes between the transforms of incoherence processing."""

from __future__ import annotations

from abc import abstractmethod
from typing import Self

import torch

from ..trellis.incoherence import Incoherence
from .base import QuantizedTensor


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
