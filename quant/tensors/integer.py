"""Integer weights on a uniform grid (GPTQ, AWQ, RTN, ...)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from ..kinds.integer.scheme import IntScheme
from .base import QuantizedTensor


@dataclass(frozen=True, slots=True)
class IntTensor(QuantizedTensor):
    """The weight of one linear layer as integer codes: `w = (code - zero) * scale`.

    Attributes:
        codes: uint8 `[out, in]`, unsigned, `0 .. 2**bits - 1`.
        scales: `[out, groups]` in the dtype that is stored (float16, bfloat16 or float32).
        zeros: uint8 `[out, groups]`; all `2**(bits-1)` in a symmetric scheme.
        scheme: the scheme that the three follow.
        group_index: int32 `[in]`, the group of each input channel, where the scheme is permuted.
        input_scale: float32 `[1]`, where the scheme has static activations.

    Raises:
        ValueError: they disagree in shape or dtype, or with the scheme.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor
    scheme: IntScheme
    group_index: torch.Tensor | None = None
    input_scale: torch.Tensor | None = None

    def __post_init__(self) -> None:
        if self.codes.dtype != torch.uint8 or self.zeros.dtype != torch.uint8:
            raise ValueError(
                f"codes and zeros are uint8, not {self.codes.dtype}/{self.zeros.dtype}"
            )
        expected = (self.out_features, self.scheme.num_groups(self.in_features))
        for name, tensor in (("scales", self.scales), ("zeros", self.zeros)):
            if tuple(tensor.shape) != expected:
                raise ValueError(f"{name} have shape {tuple(tensor.shape)}, expected {expected}")
        if (self.group_index is not None) != self.scheme.permuted:
            raise ValueError("a group index belongs to a permuted scheme, and to no other")

    @property
    def shape(self) -> tuple[int, int]:
        """`(out_features, in_features)`."""
        return self.codes.shape[0], self.codes.shape[1]

    @property
    def num_groups(self) -> int:
        """Groups per row."""
        return self.scales.shape[1]

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The dequantized weight `[out, in]`, computed in float32."""
        scales, zeros = self.scales.to(torch.float32), self.zeros.to(torch.float32)
        if self.group_index is not None:
            index = self.group_index.long()
            weight = self.codes.to(torch.float32).sub_(zeros[:, index]).mul_(scales[:, index])
            return weight.to(dtype)
        grouped = self.codes.view(self.out_features, self.num_groups, -1).to(torch.float32)
        weight = grouped.sub_(zeros.unsqueeze(-1)).mul_(scales.unsqueeze(-1))
        return weight.view(self.shape).to(dtype)

    def rows(self, rows: slice) -> IntTensor:
        return replace(
            self, codes=self.codes[rows], scales=self.scales[rows], zeros=self.zeros[rows]
        )

    @staticmethod
    def concat(tensors: Sequence[IntTensor]) -> IntTensor:
        """Concatenate linears that share their input along `out`, for a fused projection.

        Raises:
            ValueError: the schemes differ, or there are group indices or input scales.
        """
        first = tensors[0]
        if len({tensor.scheme for tensor in tensors}) != 1:
            raise ValueError("only weights of one scheme can be stacked")
        if len(tensors) > 1 and (first.group_index is not None or first.input_scale is not None):
            raise ValueError("weights with a group index or an input scale cannot be stacked")
        return replace(
            first,
            codes=torch.cat([tensor.codes for tensor in tensors]),
            scales=torch.cat([tensor.scales for tensor in tensors]),
            zeros=torch.cat([tensor.zeros for tensor in tensors]),
        )
