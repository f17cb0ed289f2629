"""4-bit codebook weights: bitsandbytes' nf4 and fp4 (Dettmers et al., QLoRA, 2023)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from ..kinds.codebook.scheme import CodebookScheme
from .base import QuantizedTensor

# Quantiles of a normal distribution, scaled to [-1, 1], with an exact zero: bitsandbytes' float32 values.
NF4_TABLE = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
# Sign, then three bits of magnitude over a largest value of 12.
_FP4_MAGNITUDES = (0.0, 0.0052083333, 0.6666666667, 1.0, 0.3333333333, 0.5, 0.1666666667, 0.25)
FP4_TABLE = (*_FP4_MAGNITUDES, *(-value for value in _FP4_MAGNITUDES))
_TABLES = {"nf4": NF4_TABLE, "fp4": FP4_TABLE}

NESTED_BLOCK = 256


def codebook(kind: str) -> torch.Tensor:
    """The codebook's 16 values, float32 `[16]`, by code."""
    return torch.tensor(_TABLES[kind], dtype=torch.float32)


@dataclass(frozen=True, slots=True)
class CodebookTensor(QuantizedTensor):
    """`w = table[code] * absmax`, one absmax per `block_size` weights in row-major order.

    Attributes:
        codes: uint8 `[out, in]`, 0..15.
        absmax: `[blocks]`: float32, or with double quantization uint8 codes into `nested_map`.
        scheme: table, block size, single or double.
        nested_absmax: float32 `[ceil(blocks / 256)]`, double quantization only.
        nested_map: float32 `[256]`, double quantization only.
        nested_offset: float32 `[1]`, the mean subtracted from the absmax values, double quantization only.
    """

    codes: torch.Tensor
    absmax: torch.Tensor
    scheme: CodebookScheme
    nested_absmax: torch.Tensor | None = None
    nested_map: torch.Tensor | None = None
    nested_offset: torch.Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1]

    def magnitudes(self) -> torch.Tensor:
        """The absmax values, dequantized to float32 `[blocks]`."""
        if self.nested_absmax is None:
            return self.absmax
        assert self.nested_map is not None and self.nested_offset is not None
        values = self.nested_map[self.absmax.long()]
        outer = self.nested_absmax.repeat_interleave(NESTED_BLOCK)[: values.numel()]
        return values * outer + self.nested_offset

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        table = codebook(self.scheme.kind).to(self.codes.device)
        values = table.index_select(0, self.codes.flatten().to(torch.int32))
        magnitudes, size = self.magnitudes(), self.scheme.block_size
        whole = values.numel() // size
        values[: whole * size].view(whole, size).mul_(magnitudes[:whole].unsqueeze(1))
        if whole < magnitudes.numel():
            values[whole * size :].mul_(magnitudes[-1])
        return values.view(self.shape).to(dtype)

    def rows(self, rows: slice) -> CodebookTensor:
        start, stop, _ = rows.indices(self.out_features)
        size = self.scheme.block_size
        if start * self.in_features % size or (
            stop * self.in_features % size and stop < self.out_features
        ):
            raise ValueError("rows of a codebook tensor begin and end with a block")
        blocks = slice(start * self.in_features // size, -(-stop * self.in_features // size))
        plain = replace(self.scheme, double_quant=False)
        return CodebookTensor(self.codes[rows], self.magnitudes()[blocks], plain)
