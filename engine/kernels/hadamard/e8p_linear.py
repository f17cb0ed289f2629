"""Linears with E8P codes: transforms go to the activations, rows of codes are decoded as they are read.

`y = ((x ⊙ su) U Qᵀ Vᵀ) ⊙ sv`, with Hadamard transforms `U` and `V` of whole widths: the weight stays packed.
In torch on every device.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from ....quant.tensors.base import QuantizedTensor
from ....quant.tensors.e8p import E8pTensor


class E8pLinear:
    """Transform inputs, decode `TILE_ROWS` rows of codes at a time, transform outputs."""

    TILE_ROWS = 1024

    def __init__(self, weight: QuantizedTensor, dtype: torch.dtype) -> None:
        assert isinstance(weight, E8pTensor)
        self._weight, self._transforms = weight, weight.transforms
        self.weight_bytes = weight.nbytes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.in_float32(x).to(x.dtype)

    def in_float32(self, x: torch.Tensor) -> torch.Tensor:
        """The result before it is rounded to the inputs' dtype."""
        weight, sides = self._weight, self._transforms
        inputs = sides.turn_inputs.forward(x.float() * sides.inputs)
        tiles = [
            functional.linear(inputs, weight.inner(slice(begin, begin + self.TILE_ROWS)))
            for begin in range(0, weight.out_features, self.TILE_ROWS)
        ]
        return sides.turn_outputs.backward(torch.cat(tiles, dim=-1)) * sides.outputs
