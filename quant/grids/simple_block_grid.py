"""ggml's blocks of 32 weights as grids: a float16 scale, and an offset in the types that end in `_1`."""

from __future__ import annotations

import torch

from ..ggml.simple_blocks import WIDTH, pack_simple
from ..kinds.ggml.scheme import GgufScheme
from ..tensors.gguf import GgufTensor
from .base import Parameters
from .range_search import RangedGrid, fitted_line, fitted_steps
from .scalar_grid import Affine, snap_to_integers

SIMPLE = ("Q8_0", "Q4_0", "Q5_0", "Q4_1", "Q5_1")


class SimpleBlockGrid(RangedGrid):
    """Q8_0, Q4_0, Q5_0, Q4_1, Q5_1.

    Its parameters are the scales and the offsets (zeros where the type has none), float16 `[out, groups]`.
    """

    group = WIDTH

    def __init__(self, scheme: GgufScheme):
        self.scheme = scheme
        self._levels = 2**scheme.bits
        self.two_ends = not self.symmetric

    @property
    def symmetric(self) -> bool:
        """Whether the type has no offset."""
        return self.scheme.type.endswith("_0")

    def fit(self, values: torch.Tensor, importance: torch.Tensor | None = None) -> Parameters:
        if importance is not None:
            return self.searched(values, importance)
        return self.ranges(*values.aminmax(dim=-1))

    def ranges(self, low: torch.Tensor, high: torch.Tensor) -> Parameters:
        if not self.symmetric:
            scale = (high - low) / (self._levels - 1)
            return scale.to(torch.float16), low.to(torch.float16)
        if self.scheme.type == "Q8_0":
            scale = torch.maximum(-low, high) / 127
        else:  # the value of largest magnitude takes the least code
            scale = torch.where(-low >= high, low, high) / (-self._levels / 2)
        return scale.to(torch.float16), torch.zeros_like(scale, dtype=torch.float16)

    def refitted(
        self, values: torch.Tensor, importance: torch.Tensor, parameters: Parameters
    ) -> Parameters:
        levels = self.levels(values, parameters)
        scale, low = (part.to(torch.float32) for part in parameters)
        if self.symmetric:
            return fitted_steps(values, levels, importance, scale).to(torch.float16), parameters[1]
        scale, low = fitted_line(values, levels, importance, scale, low)
        return scale.to(torch.float16), low.to(torch.float16)

    def affine(self, parameters: Parameters) -> Affine:
        scale, low = (part.to(torch.float32).unsqueeze(-1) for part in parameters)
        scale = torch.where(scale == 0, 1.0, scale)
        if not self.symmetric:
            return Affine(scale, low, 0, self._levels - 1)
        if self.scheme.type == "Q8_0":
            return Affine(scale, None, -127, 127)
        return Affine(scale, None, -self._levels // 2, self._levels // 2 - 1)

    def snap(self, scaled: torch.Tensor, affine: Affine) -> None:
        snap_to_integers(scaled, affine)

    def tensor(self, values: torch.Tensor, parameters: Parameters) -> GgufTensor:
        codes = self.levels(values, parameters).view(-1, WIDTH)
        scale, low = (part.reshape(-1, 1) for part in parameters)
        if self.scheme.type in ("Q4_0", "Q5_0"):
            codes += self._levels // 2
        data = pack_simple(self.scheme.type, codes, scale, None if self.symmetric else low)
        return GgufTensor(data.view(values.shape[0], -1), self.scheme)
