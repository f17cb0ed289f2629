"""Row-wise int8 weights of LLM.int8(), as bitsandbytes stores them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from ..kinds.vectorwise.scheme import VectorwiseScheme
from .base import QuantizedTensor


@dataclass(frozen=True, slots=True)
class VectorwiseTensor(QuantizedTensor):
    """`w = code * absmax / 127`.

    Attributes:
        codes: int8 `[out, in]`, -127..127.
        absmax: float32 `[out]`, the largest magnitude of each row.
        scheme: with the outlier threshold, which acts on the inputs.
    """

    codes: torch.Tensor
    absmax: torch.Tensor
    scheme: VectorwiseScheme

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1]

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return (self.codes.to(torch.float32) * (self.absmax[:, None] / 127)).to(dtype)

    def rows(self, rows: slice) -> VectorwiseTensor:
        return replace(self, codes=self.codes[rows], absmax=self.absmax[rows])
