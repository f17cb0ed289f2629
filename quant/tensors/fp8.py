"""fp8 (e4m3) weights with per-tensor, per-channel or block scales."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from ..kinds.fp8.scheme import FloatScheme
from .base import QuantizedTensor

E4M3_MAX = 448.0
BLOCK = 128


@dataclass(frozen=True, slots=True)
class Fp8Tensor(QuantizedTensor):
    """`w = value * scale`.

    Attributes:
        values: float8_e4m3fn `[out, in]`.
        scales: `[1, 1]`, `[out, 1]` or one for each 128 × 128 block; float32, or the model's dtype,
            depending on the format.
        scheme: the granularity.
        input_scale: float32 `[1]`, where the scheme has static activations.

    Raises:
        ValueError: shapes or dtypes disagree.
    """

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

    @property
    def shape(self) -> tuple[int, int]:
        return self.values.shape[0], self.values.shape[1]

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        scales = self.scales.to(torch.float32)
        if self.scheme.granularity == "block":
            scales = scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
            scales = scales[: self.out_features, : self.in_features]
        return (self.values.to(torch.float32) * scales).to(dtype)

    def rows(self, rows: slice) -> Fp8Tensor:
        scales = self.scales
        if self.scheme.granularity == "channel":
            scales = scales[rows]
        elif self.scheme.granularity == "block":
            start, stop, _ = rows.indices(self.out_features)
            scales = scales[start // BLOCK : -(-stop // BLOCK)]
        return replace(self, values=self.values[rows], scales=scales)
