"""Weights in ggml's quantization blocks, with the bytes of a GGUF file."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from ..ggml.blocks import dequantize_blocks
from ..kinds.ggml.scheme import GgufScheme
from .base import QuantizedTensor


@dataclass(frozen=True, slots=True)
class GgufTensor(QuantizedTensor):
    """Rows of blocks.

    Attributes:
        data: uint8 `[out, row bytes]`, whole blocks one after another.
        scheme: which block type.

    Raises:
        ValueError: rows that are no whole blocks.
    """

    data: torch.Tensor
    scheme: GgufScheme

    def __post_init__(self) -> None:
        if self.data.dtype != torch.uint8 or self.data.shape[1] % self.scheme.block[1]:
            raise ValueError(
                f"{self.scheme.type} rows are bytes in blocks of {self.scheme.block[1]}, not "
                f"{self.data.dtype} {tuple(self.data.shape)}"
            )

    @property
    def shape(self) -> tuple[int, int]:
        """`(out_features, in_features)`."""
        width, block_bytes = self.scheme.block
        return self.data.shape[0], self.data.shape[1] // block_bytes * width

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The dequantized weight `[out, in]`, bit-identical to ggml's dequantization."""
        return dequantize_blocks(self.data, self.scheme.type).to(dtype)

    def rows(self, rows: slice) -> GgufTensor:
        return replace(self, data=self.data[rows])
