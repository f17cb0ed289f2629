"""Row-wise int8 as in bitsandbytes' LLM.int8() (Dettmers et al., 2022, arXiv:2208.07339)."""

from __future__ import annotations

import torch

from ..base.errors import BadInput
from ..kinds.vectorwise.scheme import VectorwiseScheme
from ..tensors.vectorwise import VectorwiseTensor
from .base import Parameters
from .scalar_grid import Affine, ScalarGrid, snap_to_integers

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

    def snap(self, scaled: torch.Tensor, affine: Affine) -> None:
        snap_to_integers(scaled, affine)

    def tensor(self, values: torch.Tensor, parameters: Parameters) -> VectorwiseTensor:
        codes = self.levels(values, parameters).to(torch.int8)
        return VectorwiseTensor(codes, parameters[0].squeeze(1), self.scheme)


def round_to_rows(
    weight: torch.Tensor, scheme: VectorwiseScheme, *, name: str = "weight"
) -> VectorwiseTensor:
    """Quantize a weight `[out, in]`: `code = round(w * 127 / absmax)` of the weight in float16.

    A row of zeros gets zero codes and absmax 0.

    Raises:
        BadInput: the weight does not fit into float16.
    """
    halves = weight.to(torch.float16).to(torch.float32)
    if not bool(torch.isfinite(halves).all()):
        raise BadInput(
            f"{name} holds values too large for float16, in which int8 rows are computed"
        )
    absmax = halves.abs().amax(dim=1)
    factors = torch.where(absmax > 0, 127.0 / absmax, 0.0)
    codes = torch.round(halves * factors.unsqueeze(1)).to(torch.int8)
    return VectorwiseTensor(codes, absmax, scheme)
