"""Row-wise int8 of LLM.int8(), as bitsandbytes has it (arXiv:2208.07339): tensor, grid, rounding, kind."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from ....base.errors import BadInput
from ..base.grid import Affine, Parameters, ScalarGrid
from ..base.kind import Kind, Rounding
from ..base.tensor import QuantizedTensor
from .scheme import VectorwiseScheme


@dataclass(frozen=True, slots=True)
class VectorwiseTensor(QuantizedTensor):
    """`w = code * absmax / 127`: codes int8 `[out, in]`, largest magnitudes of rows float32 `[out]`."""

    by_row: ClassVar[tuple[str, ...]] = ("codes", "absmax")

    codes: torch.Tensor
    absmax: torch.Tensor
    scheme: VectorwiseScheme

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return (self.codes.to(torch.float32) * (self.absmax[:, None] / 127)).to(dtype)


_LARGEST = 127


class VectorwiseGrid(ScalarGrid):
    """int8 rows; its parameters are the absmax of each, float32 `[out, 1]`."""

    def __init__(self, scheme: VectorwiseScheme, in_features: int):
        self.scheme, self.group = scheme, in_features

    def fit(self, values: torch.Tensor, importance: torch.Tensor | None = None) -> Parameters:
        return (values.to(torch.float16).to(torch.float32).abs().amax(dim=-1),)

    def affine(self, parameters: Parameters) -> Affine:
        step = parameters[0].unsqueeze(-1) / _LARGEST
        return Affine(torch.where(step > 0, step, 1.0), None, -_LARGEST, _LARGEST)

    def coded(self, levels: torch.Tensor, parameters: Parameters) -> VectorwiseTensor:
        return VectorwiseTensor(levels.to(torch.int8), parameters[0].squeeze(1), self.scheme)


class VectorwiseKind(Kind[VectorwiseScheme]):
    """Rows of int8."""

    def blank(
        self, out_features: int, in_features: int, scale_dtype: torch.dtype
    ) -> VectorwiseTensor:
        codes = torch.zeros(out_features, in_features, dtype=torch.int8)
        return VectorwiseTensor(codes, torch.ones(out_features), self.scheme)

    def rounded(self, weight: torch.Tensor, how: Rounding) -> VectorwiseTensor:
        """Quantize float16 `[out, in]`: `round(w * 127 / absmax)`, 0 in zero rows."""
        halves = weight.to(torch.float16).to(torch.float32)
        if not bool(torch.isfinite(halves).all()):
            why = "too large for float16, in which int8 rows are computed"
            raise BadInput(f"{how.name} holds values {why}")
        absmax = halves.abs().amax(dim=1)
        factors = torch.where(absmax > 0, 127.0 / absmax, 0.0)
        codes = torch.round(halves * factors.unsqueeze(1)).to(torch.int8)
        return VectorwiseTensor(codes, absmax, self.scheme)

    def grid_for(self, shape: tuple[int, ...], how: Rounding) -> VectorwiseGrid:
        return VectorwiseGrid(self.scheme, shape[1])


KIND = VectorwiseKind
