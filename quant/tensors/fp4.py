"""4-bit floating-point (e2m1) weights with block scales: NVFP4 and MXFP4.

Source: OCP Microscaling Formats 1.0, sections 5.3.3 and 5.4 (e2m1, E8M0 scales); NVIDIA's e4m3 scales with a
global scale as compressed-tensors and ModelOpt store them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from ..kinds.fp4.scheme import Fp4Scheme
from .base import QuantizedTensor

# Sign, two bits of exponent, one of mantissa.
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1_TABLE = (*_MAGNITUDES, *(-value for value in _MAGNITUDES))
E2M1_MAX = 6.0
E8M0_BIAS = 127


def e2m1_table() -> torch.Tensor:
    """The 16 values, float32 `[16]`, by code."""
    return torch.tensor(E2M1_TABLE, dtype=torch.float32)


def fp4_factors(scales: torch.Tensor, global_scale: torch.Tensor | None) -> torch.Tensor:
    """What the stored scales of blocks multiply their values by, float32 of the same shape.

    Args:
        global_scale: of NVFP4, whose scales are e4m3; None: the scales are MXFP4's exponents.
    """
    if global_scale is not None:
        return scales.to(torch.float32) / global_scale
    # An exponent is the exponent of a float32, in place; its 0 would be a zero there, not 2**-127.
    exponents = scales.to(torch.int32)
    powers = (exponents << 23).view(torch.float32)
    return torch.where(exponents == 0, 2.0**-E8M0_BIAS, powers)


@dataclass(frozen=True, slots=True)
class Fp4Tensor(QuantizedTensor):
    """`w = e2m1(code) * (scale / global_scale)` (NVFP4) or `e2m1(code) * 2 ** (scale - 127)` (MXFP4).

    Attributes:
        codes: uint8 `[out, in]`, 0..15.
        scales: `[out, in / block]`: float8_e4m3fn (NVFP4), or uint8 exponents of two, biased by 127
            (MXFP4).
        scheme: NVFP4 or MXFP4, and the inputs.
        global_scale: float32 `[1]`, a divisor of the scales; NVFP4 only.
        input_scale: float32 `[1]`, the global scale of quantized inputs, a divisor too; NVFP4 W4A4 only.

    Raises:
        ValueError: shapes or dtypes disagree.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    scheme: Fp4Scheme
    global_scale: torch.Tensor | None = None
    input_scale: torch.Tensor | None = None

    def __post_init__(self) -> None:
        nvidia = self.scheme.kind == "nvfp4"
        expected = torch.float8_e4m3fn if nvidia else torch.uint8
        if self.codes.dtype != torch.uint8 or self.scales.dtype != expected:
            raise ValueError(
                f"codes are uint8 and scales {expected}, not {self.codes.dtype} and {self.scales.dtype}"
            )
        shape = (self.out_features, self.in_features // self.scheme.block_size)
        if self.in_features % self.scheme.block_size or tuple(self.scales.shape) != shape:
            raise ValueError(
                f"scales {tuple(self.scales.shape)} do not fit {tuple(self.codes.shape)} weights in "
                f"blocks of {self.scheme.block_size}"
            )
        if (self.global_scale is not None) != nvidia:
            raise ValueError("a global scale belongs to nvfp4, and to no other")

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1]

    def block_scales(self) -> torch.Tensor:
        """The factor of each block, float32 `[out, in / block]`."""
        return fp4_factors(self.scales, self.global_scale)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        table = e2m1_table().to(self.codes.device)
        values = table.index_select(0, self.codes.flatten().to(torch.int32))
        blocks = values.view(self.out_features, -1, self.scheme.block_size)
        return blocks.mul_(self.block_scales().unsqueeze(-1)).view(self.shape).to(dtype)

    def rows(self, rows: slice) -> Fp4Tensor:
        return replace(self, codes=self.codes[rows], scales=self.scales[rows])
