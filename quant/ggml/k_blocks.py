"""Byte layout of ggml's K-quant super-blocks (256 weights): Q4_K, Q5_K, Q6_K (`ggml-common.h`)."""

from __future__ import annotations

import torch

from .simple_blocks import read_half

WIDTH = 256


def pack_affine(
    scales: torch.Tensor, codes: torch.Tensor, lows: torch.Tensor, heads: torch.Tensor, bits: int
) -> torch.Tensor:
    """Q4_K and Q5_K: `w = d * scale * code - dmin * minimum` for each of eight sub-blocks of 32.

    Args:
        scales, lows: scales and minimums, uint8 `[n, 8]`, 6 bits each.
        codes: uint8 `[n, 8, 32]`.
        heads: float16 `[n, 2]`: d and dmin.
        bits: 4 or 5.

    Returns:
        uint8 `[n, 144]` or `[n, 176]`.
    """
    first, last = slice(0, 4), slice(4, 8)
    packed = torch.cat(
        [
            scales[:, first] | (scales[:, last] >> 4) << 6,
            lows[:, first] | (lows[:, last] >> 4) << 6,
            (scales[:, last] & 15) | (lows[:, last] & 15) << 4,
        ],
        dim=-1,
    )
    parts = [heads.contiguous().view(torch.uint8), packed]
    if bits == 5:
        shifts = torch.arange(8, dtype=torch.uint8, device=codes.device).view(8, 1)
        parts.append(((codes >> 4) << shifts).sum(dim=1, dtype=torch.uint8))
    nibbles = (codes & 15).view(-1, 4, 2, 32)
    parts.append((nibbles[:, :, 0] | (nibbles[:, :, 1] << 4)).flatten(1))
    return torch.cat(parts, dim=-1)


def affine_fields(data: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Inverse of `pack_affine`, without the heads: codes `[n, 8, 32]`, scales, minimums `[n, 8]`, uint8."""
    nibbles = data[:, -128:].reshape(-1, 4, 1, 32)
    codes = torch.cat([nibbles & 15, nibbles >> 4], dim=2).view(-1, 8, 32)
    if bits == 5:
        shifts = torch.arange(8, dtype=torch.uint8, device=data.device).view(8, 1)
        codes = codes | ((data[:, None, 16:48] >> shifts) & 1) << 4
    return codes, *affine_scales(data)


def affine_scales(data: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and minimums of `affine_fields`."""
    first, second, third = data[:, 4:8], data[:, 8:12], data[:, 12:16]
    scales = torch.cat([first & 63, (third & 15) | (first >> 6) << 4], dim=-1)
    lows = torch.cat([second & 63, (third >> 4) | (second >> 6) << 4], dim=-1)
    return scales, lows


def dequantize_affine(data: torch.Tensor, bits: int) -> torch.Tensor:
    """Weights, float32 `[n, 256]`, of Q4_K (`bits` 4) or Q5_K blocks."""
    codes, scales, lows = affine_fields(data, bits)
    steps = (read_half(data, 0) * scales.to(torch.float32)).unsqueeze(-1)
    offsets = (read_half(data, 2) * lows.to(torch.float32)).unsqueeze(-1)
    return (steps * codes.to(torch.float32) - offsets).view(-1, WIDTH)


def pack_signed(scales: torch.Tensor, codes: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
    """Q6_K: `w = d * scale * (code - 32)` for each of sixteen sub-blocks of 16.

    Args:
        scales: int8 `[n, 16]`.
        codes: uint8 `[n, 256]`, 6 bits each.
        head: float16 `[n, 1]`: d.

    Returns:
        uint8 `[n, 210]`.
    """
    quarters = codes.view(-1, 2, 4, 32)  # of each half of the block
    nibbles, high = quarters & 15, quarters >> 4
    low_bytes = nibbles[:, :, :2] | (nibbles[:, :, 2:] << 4)
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8, device=codes.device).view(4, 1)
    high_bytes = (high << shifts).sum(dim=2, dtype=torch.uint8)
    parts = [low_bytes.flatten(1), high_bytes.flatten(1), scales.view(torch.uint8)]
    return torch.cat([*parts, head.view(torch.uint8)], dim=-1)


def signed_fields(data: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Inverse of `pack_signed`, without the head: codes uint8 `[n, 16, 16]`, scales int8 `[n, 16]`."""
    low_bytes, high_bytes = data[:, :128].reshape(-1, 2, 2, 32), data[:, 128:192]
    nibbles = torch.cat([low_bytes & 15, low_bytes >> 4], dim=2)
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8, device=data.device).view(4, 1)
    high = (high_bytes.reshape(-1, 2, 1, 32) >> shifts) & 3
    codes = (nibbles | (high << 4)).view(-1, 16, 16)
    return codes, signed_scales(data)


def signed_scales(data: torch.Tensor) -> torch.Tensor:
    """Scales of `signed_fields`."""
    return data[:, 192:208].contiguous().view(torch.int8)


def dequantize_signed(data: torch.Tensor) -> torch.Tensor:
    """Weights, float32 `[n, 256]`, of Q6_K blocks."""
    codes, scales = signed_fields(data)
    steps = (read_half(data, 208) * scales.to(torch.float32)).unsqueeze(-1)
    return (steps * (codes.to(torch.float32) - 32)).view(-1, WIDTH)
