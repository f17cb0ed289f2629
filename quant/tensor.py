"""The one in-memory form of a quantized weight; every method makes it and every format stores it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .scheme import QuantScheme


@dataclass(frozen=True, slots=True)
class QuantizedTensor:
    """The weight of one linear layer as integer codes: `w = (code - zero) * scale`.

    Attributes:
        codes: uint8 `[out, in]`, unsigned, `0 .. 2**bits - 1`.
        scales: `[out, groups]` in the dtype that is stored (float16, bfloat16 or float32).
        zeros: uint8 `[out, groups]`; all `2**(bits-1)` in a symmetric scheme.
        scheme: the scheme that the three follow.

    Raises:
        ValueError: the three disagree in shape or dtype.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor
    scheme: QuantScheme

    def __post_init__(self) -> None:
        if self.codes.dtype != torch.uint8 or self.zeros.dtype != torch.uint8:
            raise ValueError(
                f"codes and zeros are uint8, not {self.codes.dtype}/{self.zeros.dtype}"
            )
        expected = (self.out_features, self.scheme.num_groups(self.in_features))
        for name, tensor in (("scales", self.scales), ("zeros", self.zeros)):
            if tuple(tensor.shape) != expected:
                raise ValueError(f"{name} have shape {tuple(tensor.shape)}, expected {expected}")

    @property
    def shape(self) -> tuple[int, int]:
        """`(out_features, in_features)`."""
        return self.codes.shape[0], self.codes.shape[1]

    @property
    def out_features(self) -> int:
        return self.codes.shape[0]

    @property
    def in_features(self) -> int:
        return self.codes.shape[1]

    @property
    def num_groups(self) -> int:
        """Groups per row."""
        return self.scales.shape[1]

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The weight `[out, in]` that the codes stand for, computed in float32."""
        grouped = self.codes.view(self.out_features, self.num_groups, -1).to(torch.float32)
        centred = grouped - self.zeros.to(torch.float32).unsqueeze(-1)
        weight = centred * self.scales.to(torch.float32).unsqueeze(-1)
        return weight.view(self.shape).to(dtype)

    @staticmethod
    def concat(tensors: Sequence[QuantizedTensor]) -> QuantizedTensor:
        """Stack linears that share their input along `out`, as a fused projection wants them.

        Raises:
            ValueError: the schemes differ.
        """
        if len({tensor.scheme for tensor in tensors}) != 1:
            raise ValueError("only weights of one scheme can be stacked")
        return QuantizedTensor(
            codes=torch.cat([tensor.codes for tensor in tensors]),
            scales=torch.cat([tensor.scales for tensor in tensors]),
            zeros=torch.cat([tensor.zeros for tensor in tensors]),
            scheme=tensors[0].scheme,
        )
