"""RMSNorm and LayerNorm, with fused residual add and activation quantization."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch.nn import functional

from ...kernels.elementwise.dispatch import NORM, RowKernelQuery
from ...kernels.elementwise.reference import (
    ActivationQuant,
    FusesNormQuant,
    NormKernel,
    Rows,
    TakesWideWeights,
)
from .projection import Weights


@dataclass(frozen=True, slots=True)
class Norm(Weights):
    """RMS norm (Zhang and Sennrich, 2019), or with `centered` layer norm; weight, bias [size] or None. With a
    weight of a wider dtype than the input the whole norm is computed in it, as Gemma's is."""

    size: int
    eps: float
    weight: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    centered: bool = False
    _kernel: NormKernel | None = field(init=False, default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.weight is not None and not self.centered:
            kernel_query = RowKernelQuery(self.weight.device.type, self.weight.dtype, self.size)
            kernel = NORM.select(kernel_query).run(self.weight, self.eps)
            object.__setattr__(self, "_kernel", kernel)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._kernel is not None and self._takes(x):
            return self._kernel(x)[1]
        if self.centered:
            return functional.layer_norm(x, (self.size,), self.weight, self.bias, self.eps)
        if self.weight is None or self.weight.dtype is x.dtype:
            return functional.rms_norm(x, (self.size,), self.weight, self.eps)
        wide = x.to(self.weight.dtype)
        return functional.rms_norm(wide, (self.size,), self.weight, self.eps).to(x.dtype)

    def of_sum(
        self,
        x: torch.Tensor,
        added: torch.Tensor | None,
        activation_quant: ActivationQuant | None = None,
    ) -> tuple[torch.Tensor, Rows]:
        """`x + added` and its norm, quantized by `activation_quant` where the kernel fuses that."""
        if self._kernel is not None and self._takes(x):
            if activation_quant is not None and isinstance(self._kernel, FusesNormQuant):
                return self._kernel.quantized(x, added, activation_quant)
            return self._kernel(x, added)
        total = x if added is None else x + added
        return total, self(total)

    def _takes(self, x: torch.Tensor) -> bool:
        """True if the kernel selected for the weight supports these rows: 2-D, of its dtype or narrower."""
        if self.weight is None or x.dim() != 2:
            return False
        wide = self.weight.dtype is torch.float32 and isinstance(self._kernel, TakesWideWeights)
        return x.dtype is self.weight.dtype or wide


@dataclass(frozen=True, slots=True)
class ShardedNorm(Weights):
    """RMS norm of a column-parallel linear's outputs: `total` sums the squares of all ranks. All ranks have
    `width` outputs, each on `copies` of them; `weight` is of this rank's."""

    weight: torch.Tensor
    eps: float
    width: int
    copies: int
    total: Callable[[torch.Tensor], torch.Tensor]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        squares = self.total(wide.square().sum(dim=-1, keepdim=True)) / self.copies
        normed = wide * torch.rsqrt(squares / self.width + self.eps)
        return normed.to(x.dtype) * self.weight
