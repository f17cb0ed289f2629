"""e4m3 weights with a scale per tensor, output channel or 128 × 128 block: tensor, grid, rounding, kind."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch.nn import functional

from ...base.scheme import E4M3_MAX
from ..base.grid import Affine, Parameters, ScalarGrid
from ..base.kind import Kind, Rounding
from ..base.tensor import QuantizedTensor
from .scheme import BLOCK, FloatScheme


@dataclass(frozen=True, slots=True)
class Fp8Tensor(QuantizedTensor):
    has_open_dtype: ClassVar[bool] = True
    by_row: ClassVar[tuple[str, ...]] = ("values",)

    values: torch.Tensor
    scales: torch.Tensor
    scheme: FloatScheme
    input_scale: torch.Tensor | None = None

    def __post_init__(self) -> None:
        if self.values.dtype != torch.float8_e4m3fn:
            raise ValueError(f"values are float8_e4m3fn, not {self.values.dtype}")
        expected = self.scheme.scale_shape(*self.shape)
        if tuple(self.scales.shape) != expected:
            raise ValueError(f"scales have shape {tuple(self.scales.shape)}, expected {expected}")

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        scales = self.scales.to(torch.float32)
        if self.scheme.granularity == "block":
            scales = scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
            scales = scales[: self.out_features, : self.in_features]
        return (self.values.to(torch.float32) * scales).to(dtype)

    def forms(self) -> Iterator[Fp8Tensor]:
        yield self
        if self.scheme.granularity == "tensor":
            for granularity in ("channel", "block"):
                scheme = replace(self.scheme, granularity=granularity)
                scales = self.scales.expand(scheme.scale_shape(*self.shape)).contiguous()
                yield replace(self, scales=scales, scheme=scheme)

    def rows(self, rows: slice) -> Fp8Tensor:
        scales = self.scales
        if self.scheme.granularity == "channel":
            scales = scales[rows]
        elif self.scheme.granularity == "block":
            start, stop, _ = rows.indices(self.out_features)
            scales = scales[start // BLOCK : -(-stop // BLOCK)]
        return replace(self, values=self.values[rows], scales=scales)


class FloatGrid(ScalarGrid):
    """e4m3, with a scale for each output channel, tensor or block of 128; its parameters are the scales.
    Blocks of all rows are fitted together; a row or tensor is one group, as is a row with a smaller block."""

    def __init__(self, scheme: FloatScheme, shape: tuple[int, ...], how: Rounding):
        self.scheme, self._shape, self._how = scheme, shape, how
        whole = scheme.granularity == "block" and shape[1] % BLOCK == 0
        self.group = BLOCK if whole else shape[1]
        self.rows_alone = scheme.granularity == "channel"

    def fit(self, values: torch.Tensor, importance: torch.Tensor | None = None) -> Parameters:
        """Scales as they are stored, `max|w| / 448`, of zeros 1; infinite where they overflow their dtype."""
        weight = values.flatten(1)
        out_features, in_features = weight.shape
        rows, columns = self.scheme.scale_shape(out_features, in_features)
        if self.scheme.granularity == "block":
            padding = (0, columns * BLOCK - in_features, 0, rows * BLOCK - out_features)
            blocks = functional.pad(weight, padding).view(rows, BLOCK, columns, BLOCK)
            largest = blocks.abs().amax(dim=(1, 3))
        else:
            largest = weight.abs().view(rows, -1).amax(dim=1, keepdim=True)
        scales = (largest / E4M3_MAX).to(self._how.scale_dtype)
        return (torch.where(scales == 0, torch.ones_like(scales), scales),)

    def affine(self, parameters: Parameters) -> Affine:
        scales = parameters[0].to(torch.float32)
        if self.scheme.granularity == "block":
            out_features, in_features = self._shape
            scales = scales.repeat_interleave(BLOCK, 0)[:out_features]
            if self.group != BLOCK:
                scales = scales.repeat_interleave(BLOCK, 1)[:, :in_features]
                return Affine(scales.unsqueeze(1))
        return Affine(scales.unsqueeze(-1))

    def snap(self, scaled: torch.Tensor, affine: Affine) -> None:
        # e4m3fn has no infinity: a cast from beyond its range gives NaN.
        scaled.copy_(scaled.clamp_(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn))

    def coded(self, levels: torch.Tensor, parameters: Parameters) -> Fp8Tensor:
        values, input_scale = levels.to(torch.float8_e4m3fn), self._how.input_scale
        return Fp8Tensor(values, parameters[0], self.scheme, input_scale)


class FloatKind(Kind[FloatScheme]):
    """e4m3 floats."""

    def blank(self, out_features: int, in_features: int, scale_dtype: torch.dtype) -> Fp8Tensor:
        values = torch.zeros(out_features, in_features).to(torch.float8_e4m3fn)
        scales = torch.ones(self.scheme.scale_shape(out_features, in_features), dtype=scale_dtype)
        input_scale = torch.ones(1) if self.scheme.has_static_inputs else None
        return Fp8Tensor(values, scales, self.scheme, input_scale)

    def grid_for(self, shape: tuple[int, ...], how: Rounding) -> FloatGrid:
        return FloatGrid(self.scheme, shape, how)


KIND = FloatKind
