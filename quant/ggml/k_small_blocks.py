"""Byte layout of Q2_K and Q3_K super-blocks: 256 weights in runs of 16 (`ggml-common.h`)."""

from __future__ import annotations

import torch

from .k_blocks import WIDTH
from .simple_blocks import read_half

_SHIFTS = (0, 2, 4, 6)


def pack_q2(
    scales: torch.Tensor, codes: torch.Tensor, lows: torch.Tensor, heads: torch.Tensor
) -> torch.Tensor:
    """Q2_K: `w = d * scale * code - dmin * minimum`.

    Args:
        scales, lows: scales and minimums, uint8 `[n, 16]`, 4 bits each.
        codes: uint8 `[n, 16, 16]`, 2 bits each.
        heads: float16 `[n, 2]`: d and dmin.

    Returns:
        uint8 `[n, 84]`.
    """
    parts = [scales | (lows << 4), _pack_pairs(codes.flatten(1))]
    return torch.cat([*parts, heads.contiguous().view(torch.uint8)], dim=-1)


def q2_fields(data: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Inverse of `pack_q2`, without the heads: codes `[n, 16, 16]`, scales, minimums `[n, 16]`, uint8."""
    fields = data[:, :16]
    return _unpack_pairs(data[:, 16:80]).view(-1, 16, 16), fields & 15, fields >> 4


def dequantize_q2(data: torch.Tensor) -> torch.Tensor:
    """Weights, float32 `[n, 256]`, of Q2_K blocks."""
    codes, scales, lows = q2_fields(data)
    steps = (read_half(data, 80) * scales.to(torch.float32)).unsqueeze(-1)
    offsets = (read_half(data, 82) * lows.to(torch.float32)).unsqueeze(-1)
    return (steps * codes.to(torch.float32) - offsets).view(-1, WIDTH)


def pack_q3(scales: torch.Tensor, codes: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
    """Q3_K: `w = d * scale * (code - 4)`.

    Args:
        scales: int8 `[n, 16]`, -32 .. 31.
        codes: uint8 `[n, 256]`, 3 bits each; the high bits lie apart.
        head: float16 `[n, 1]`: d.

    Returns:
        uint8 `[n, 110]`.
    """
    shifts = torch.arange(8, dtype=torch.uint8, device=codes.device).view(8, 1)
    high = ((codes >> 2).view(-1, 8, 32) << shifts).sum(dim=1, dtype=torch.uint8)
    six = (scales + 32).view(torch.uint8)
    low_scales = (six[:, :8] & 15) | ((six[:, 8:] & 15) << 4)
    pairs = torch.tensor(_SHIFTS, dtype=torch.uint8, device=codes.device).view(4, 1)
    high_scales = ((six >> 4).view(-1, 4, 4) << pairs).sum(dim=1, dtype=torch.uint8)
    parts = [high, _pack_pairs(codes & 3), low_scales, high_scales]
    return torch.cat([*parts, head.contiguous().view(torch.uint8)], dim=-1)


def q3_fields(data: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Inverse of `pack_q3`, without the head: codes uint8 `[n, 16, 16]`, scales int8 `[n, 16]`."""
    shifts = torch.arange(8, dtype=torch.uint8, device=data.device).view(8, 1)
    high = ((data[:, None, :32] >> shifts) & 1).view(-1, 16, 16)
    codes = _unpack_pairs(data[:, 32:96]).view(-1, 16, 16) | (high << 2)
    return codes, q3_scales(data)


def q3_scales(data: torch.Tensor) -> torch.Tensor:
    """Scales of `q3_fields`."""
    low_scales = torch.cat([data[:, 96:104] & 15, data[:, 96:104] >> 4], dim=-1)
    pairs = torch.tensor(_SHIFTS, dtype=torch.uint8, device=data.device).view(4, 1)
    high_scales = ((data[:, None, 104:108] >> pairs) & 3).flatten(1)
    return (low_scales | (high_scales << 4)).view(torch.int8) - 32


def dequantize_q3(data: torch.Tensor) -> torch.Tensor:
    """Weights, float32 `[n, 256]`, of Q3_K blocks."""
    codes, scales = q3_fields(data)
    steps = (read_half(data, 108) * scales.to(torch.float32)).unsqueeze(-1)
    return (steps * (codes.to(torch.float32) - 4)).view(-1, WIDTH)


def _pack_pairs(codes: torch.Tensor) -> torch.Tensor:
    """Codes of 2 bits, uint8 `[n, 256]`, as bytes `[n, 64]`: four quarters of each half side by side."""
    shifts = torch.tensor(_SHIFTS, dtype=torch.uint8, device=codes.device).view(4, 1)
    return (codes.view(-1, 2, 4, 32) << shifts).sum(dim=2, dtype=torch.uint8).flatten(1)


def _unpack_pairs(data: torch.Tensor) -> torch.Tensor:
    """Inverse of `_pack_pairs`."""
    shifts = torch.tensor(_SHIFTS, dtype=torch.uint8, device=data.device).view(4, 1)
    return ((data.reshape(-1, 2, 1, 32) >> shifts) & 3).flatten(1)
