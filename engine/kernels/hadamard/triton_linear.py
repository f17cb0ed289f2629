"""Linears with trellis and E8P codes on Triton: codes are decoded in registers, transforms go to activations.

Three launches for trellis codes (EXL3), five where QuIP#'s transforms of whole widths take two each. For many
tokens the codes are dequantized to 16 bits, still between their transforms, and cuBLAS multiplies.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch.nn import functional

from ....quant.kinds.base.tensor import QuantizedTensor
from ....quant.kinds.e8p.kind import E8pTensor
from ....quant.kinds.trellis.kind import TrellisTensor
from ..common.triton_crossover import TOKENS, crossover_tokens
from .triton_code_gemm import RUN, code_gemm, dequantize_codes, e8p_tiles, trellis_tiles
from .triton_transform import TransformedRows, stages_of


class TritonTransformedLinear:
    """Fused GEMM of codes up to the crossover, dequantize + cuBLAS above it."""

    def __init__(self, weight: QuantizedTensor, dtype: torch.dtype) -> None:
        assert isinstance(weight, TrellisTensor | E8pTensor)
        is_trellis = isinstance(weight, TrellisTensor)
        self.tiles = tiles = trellis_tiles(weight) if is_trellis else e8p_tiles(weight)
        self._dtype, sides, device = dtype, weight.transforms, tiles.words.device
        inputs = stages_of(sides.turn_inputs, tiles.in_features, device)
        inputs[0] = replace(inputs[0], before=sides.inputs)
        inputs[-1] = replace(inputs[-1], places=tiles.places, stored=tiles.num_runs * RUN)
        self._inputs = TransformedRows(inputs, dtype)
        outputs = stages_of(sides.turn_outputs, tiles.out_features, device, backward=True)
        outputs[-1] = replace(outputs[-1], after=sides.outputs)
        self._outputs = TransformedRows(outputs, dtype)
        self.weight_bytes = tiles.nbytes + self._inputs.nbytes + self._outputs.nbytes
        name = f"{weight.scheme.label}, {tiles.out_features} x {tiles.in_features}, {dtype}"
        ones = torch.ones(max(TOKENS), tiles.num_runs * RUN, dtype=dtype, device=device)
        self._crossover = crossover_tokens(
            name,
            ones,
            lambda x: self._outputs(self._fused(x), dtype),
            lambda x: self._outputs(self._as_floats(x), dtype),
        )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._multiply(x, x.dtype)

    def in_float32(self, x: torch.Tensor) -> torch.Tensor:
        """The result before it is rounded to the inputs' dtype."""
        return self._multiply(x, torch.float32)

    def fuse_bias(self, bias: torch.Tensor) -> None:
        """Add `bias [out]` to every row, in float32, before the cast to the output dtype."""
        self._outputs.fuse_bias(bias)
        self.weight_bytes += 4 * len(bias)

    def _multiply(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        product = self._fused if len(x) <= self._crossover else self._as_floats
        return self._outputs(product(self._inputs(x, self._dtype)), dtype)

    def _fused(self, x: torch.Tensor) -> torch.Tensor:
        return code_gemm(x, self.tiles)

    def _as_floats(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, dequantize_codes(self.tiles, self._dtype))
