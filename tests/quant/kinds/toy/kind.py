"""The toy kind's tensor, grid and rounding."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from llmopt.quant.kinds.base.grid import Affine, Grid, Parameters, ScalarGrid
from llmopt.quant.kinds.base.kind import Kind, Rounding
from llmopt.quant.kinds.base.tensor import QuantizedTensor

from .scheme import ToyScheme


@dataclass(frozen=True, slots=True)
class ToyTensor(QuantizedTensor):
    """`w = sign * magnitude`: signs int8 `[out, in]`, magnitude float16 `[out]`."""

    signs: torch.Tensor
    magnitude: torch.Tensor
    scheme: ToyScheme

    @property
    def shape(self) -> tuple[int, int]:
        return self.signs.shape[0], self.signs.shape[1]

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return (self.signs.float() * self.magnitude.float()[:, None]).to(dtype)

    def rows(self, rows: slice) -> ToyTensor:
        return replace(self, signs=self.signs[rows], magnitude=self.magnitude[rows])


class ToyGrid(ScalarGrid):
    def __init__(self, scheme: ToyScheme, in_features: int):
        self.scheme, self.group = scheme, in_features

    def fit(self, values: torch.Tensor, importance: torch.Tensor | None = None) -> Parameters:
        return (values.abs().mean(dim=-1).to(torch.float16),)

    def affine(self, parameters: Parameters) -> Affine:
        step = parameters[0].float().unsqueeze(-1)
        return Affine(torch.where(step == 0, 1.0, step))

    def snap(self, scaled: torch.Tensor, affine: Affine) -> None:
        scaled.copy_(torch.where(scaled < 0, -1.0, 1.0))

    def coded(self, levels: torch.Tensor, parameters: Parameters) -> ToyTensor:
        return ToyTensor(levels.to(torch.int8), parameters[0].flatten(), self.scheme)


class ToyKind(Kind[ToyScheme]):
    def blank(
        self, out_features: int, in_features: int, scale_dtype: torch.dtype
    ) -> QuantizedTensor:
        signs = torch.ones(out_features, in_features, dtype=torch.int8)
        return ToyTensor(signs, torch.ones(out_features).half(), self.scheme)

    def grid_for(self, shape: tuple[int, ...], how: Rounding) -> Grid:
        return ToyGrid(self.scheme, shape[1])


KIND = ToyKind
