"""ggml's K-quants: byte layout of super-blocks of 256 weights (`ggml-common.h`), and quantization to them."""

from __future__ import annotations

import torch

from .fit import error_weights, search_affine, search_whole
from .small_blocks import read_half

K_WIDTH = 256


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
    return (steps * codes.to(torch.float32) - offsets).view(-1, K_WIDTH)


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
    return (steps * (codes.to(torch.float32) - 32)).view(-1, K_WIDTH)


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
    return (steps * codes.to(torch.float32) - offsets).view(-1, K_WIDTH)


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
    return (steps * (codes.to(torch.float32) - 4)).view(-1, K_WIDTH)


def _pack_pairs(codes: torch.Tensor) -> torch.Tensor:
    """Codes of 2 bits, uint8 `[n, 256]`, as bytes `[n, 64]`: four quarters of each half side by side."""
    shifts = torch.tensor(_SHIFTS, dtype=torch.uint8, device=codes.device).view(4, 1)
    return (codes.view(-1, 2, 4, 32) << shifts).sum(dim=2, dtype=torch.uint8).flatten(1)


def _unpack_pairs(data: torch.Tensor) -> torch.Tensor:
    """Inverse of `_pack_pairs`."""
    shifts = torch.tensor(_SHIFTS, dtype=torch.uint8, device=data.device).view(4, 1)
    return ((data.reshape(-1, 2, 1, 32) >> shifts) & 3).flatten(1)


# Runs of a block, the largest code, and the largest code of a scale.
AFFINE = {"Q2_K": (16, 3, 15), "Q4_K": (8, 15, 63), "Q5_K": (8, 31, 63)}
# Half the codes, and half the codes of a scale.
SIGNED = {"Q3_K": (4, 32), "Q6_K": (32, 128)}


def quantize_k(
    blocks: torch.Tensor, type_name: str, importance: torch.Tensor | None
) -> torch.Tensor:
    """K-quant blocks.

    Args:
        blocks: float32 `[n, 256]`.
        importance: positive float32 `[n, 256]`, weight of each squared error; None derives it from
            the weights.

    Returns:
        uint8 `[n, block bytes]`.
    """
    if type_name in SIGNED:
        middle, scale_middle = SIGNED[type_name]
        x, weights = blocks.view(-1, 16, 16), None
        if importance is not None and type_name == "Q6_K":
            weights = importance.view_as(x)
        elif importance is not None:
            weights = error_weights(x, importance)
        fitted = search_whole(x, weights, middle, scale_middle)
        codes = (fitted.values + middle).to(torch.uint8).flatten(1)
        pack = pack_q3 if type_name == "Q3_K" else pack_signed
        return pack(fitted.scales, codes, fitted.head)
    runs, levels, scale_levels = AFFINE[type_name]
    x = blocks.view(-1, runs, 256 // runs)
    weights = None if importance is None else error_weights(x, importance)
    rounds = 2 if type_name == "Q2_K" else 1
    parts = search_affine(x, weights, levels, scale_levels, rounds)
    return pack_q2(*parts) if type_name == "Q2_K" else pack_affine(*parts, int(type_name[1]))
