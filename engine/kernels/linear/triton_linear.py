"""Linears on Triton's products: inputs in floats, or rounded to 8 bits as their scheme says."""

from __future__ import annotations

import torch
from torch.nn import functional

from ....quant.tensors.base import QuantizedTensor
from ..activations.activations import round_inputs
from ..activations.rounded_rows import RoundedRows, Rounding, Rows
from ..activations.triton_round_rows import round_rows
from .triton_border import TOKENS, most_tokens
from .triton_product import multiply
from .triton_tile_values import dequantize
from .triton_tile_weight import TileWeight


class FloatInputLinear:
    """A weight as codes, and inputs in floats; for many tokens it is made floats before each product."""

    def __init__(self, weight: QuantizedTensor, tiles: TileWeight, dtype: torch.dtype) -> None:
        self._scheme, self._input_scale = weight.scheme, weight.parts().get("input_scale")
        self.tiles, self._dtype = tiles, dtype
        self.rounds = weight.scheme.activations is not None
        self.weight_bytes = tiles.weight_bytes
        name = f"{self._scheme.label}, {tiles.out_features} x {tiles.in_features}, {dtype}"
        self._most_fused = most_tokens(name, _tried(tiles, dtype), self._fused, self._as_floats)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        x = round_inputs(x, self._scheme, self._input_scale)
        return (self._fused if len(x) <= self._most_fused else self._as_floats)(x)

    def _fused(self, x: torch.Tensor) -> torch.Tensor:
        return multiply(x, self.tiles, self._dtype)

    def _as_floats(self, x: torch.Tensor) -> torch.Tensor:
        if self.tiles.order is not None:
            x = x.index_select(1, self.tiles.order)
        return functional.linear(x, dequantize(self.tiles, self._dtype))


class RoundedInputLinear:
    """A weight of whole numbers or of e4m3 floats, and inputs rounded to the same kind of number.

    Many tokens by e4m3 with a scale for each channel and token is torch's own product, in bfloat16.
    """

    def __init__(self, weight: QuantizedTensor, tiles: TileWeight, dtype: torch.dtype) -> None:
        activations, scale = weight.scheme.activations, weight.parts().get("input_scale")
        self.rounding = Rounding(activations, None if scale is None else scale.to(torch.float32))
        self.tiles, self._dtype = tiles, dtype
        self.weight_bytes = tiles.weight_bytes
        self._row_scales: torch.Tensor | None = None
        is_plain = tiles.group == 0 and activations.granularity != "group128"
        is_fp8 = tiles.codes.dtype is torch.float8_e4m3fn
        if is_fp8 and is_plain and dtype is torch.bfloat16:
            self._row_scales = tiles.scales.to(torch.float32)
            name = f"{weight.scheme.label}, {tiles.out_features} x {tiles.in_features}, {dtype}"
            scales = self._row_scales
            self._most_fused = most_tokens(
                name,
                _tried(tiles, dtype),
                lambda x: self._fused(round_rows(x, self.rounding)),
                lambda x: self._scaled(round_rows(x, self.rounding), scales),
            )

    def __call__(self, x: Rows) -> torch.Tensor:
        rows = x if isinstance(x, RoundedRows) else round_rows(x, self.rounding)
        if self._row_scales is None or len(rows.codes) <= self._most_fused:
            return self._fused(rows)
        return self._scaled(rows, self._row_scales)

    def _fused(self, rows: RoundedRows) -> torch.Tensor:
        return multiply(rows.codes, self.tiles, self._dtype, rows.scales)

    def _scaled(self, rows: RoundedRows, scales: torch.Tensor) -> torch.Tensor:
        y = torch.ops.aten._scaled_mm(
            rows.codes, self.tiles.codes.t(), rows.scales, scales, out_dtype=self._dtype
        )
        return y[:, : self.tiles.out_features]


def _tried(tiles: TileWeight, dtype: torch.dtype) -> torch.Tensor:
    """Inputs to measure with."""
    return torch.ones(max(TOKENS), tiles.in_features, dtype=dtype, device=tiles.codes.device)
