"""Normalisation over the last axis: by the root mean square, or centred as well."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class Norm:
    """RMS norm (Zhang and Sennrich, 2019), or with `centered` layer norm (Ba et al., 2016).

    `weight` and `bias` are [size] or None. A weight in a wider dtype than the input makes the whole norm
    compute in it, as Gemma's does.
    """

    size: int
    eps: float
    weight: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    centered: bool = False

    @property
    def weight_bytes(self) -> int:
        """Bytes of weight and bias."""
        return sum(part.nbytes for part in (self.weight, self.bias) if part is not None)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.centered:
            return functional.layer_norm(x, (self.size,), self.weight, self.bias, self.eps)
        if self.weight is None or self.weight.dtype is x.dtype:
            return functional.rms_norm(x, (self.size,), self.weight, self.eps)
        wide = x.to(self.weight.dtype)
        return functional.rms_norm(wide, (self.size,), self.weight, self.eps).to(x.dtype)
