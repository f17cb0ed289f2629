"""ggml's K-quants: byte layout of super-blocks of 256 weights (`ggml-common.h`), and quantization to them.

`w = d * scale * code - dmin * minimum` in Q4_K and Q5_K (eight sub-blocks of 32, with 6-bit scales) and Q2_K
(sixteen of 16, 4 bits); `w = d * scale * (code - middle)` in Q3_K and Q6_K (sixteen of 16, 6 and 8 bits).
Codes are uint8 `[n, runs, width]` or `[n, 256]`; scales and minimums `[n, runs]`, uint8, or without minimums
int8; heads (d, or d and dmin) float16 `[n, heads]`; packed blocks uint8 `[n, block bytes]`.
"""

from __future__ import annotations

import torch

from .fit import error_weights, search_affine, search_whole
from .small_blocks import read_half, shifts

K_WIDTH = 256  # weights in a superblock: `QK_K` of ggml


def pack_affine(
    scales: torch.Tensor, codes: torch.Tensor, lows: torch.Tensor, heads: torch.Tensor, bits: int
) -> torch.Tensor:
    first, last = slice(0, 4), slice(4, 8)
    packed = [
        scales[:, first] | (scales[:, last] >> 4) << 6,
        lows[:, first] | (lows[:, last] >> 4) << 6,
        (scales[:, last] & 15) | (lows[:, last] & 15) << 4,
    ]
    parts = [heads.contiguous().view(torch.uint8), *packed]
    if bits == 5:
        high = (codes >> 4) << shifts(1, codes.device).view(8, 1)
        parts.append(high.sum(dim=1, dtype=torch.uint8))
    nibbles = (codes & 15).view(-1, 4, 2, 32)
    parts.append((nibbles[:, :, 0] | (nibbles[:, :, 1] << 4)).flatten(1))
    return torch.cat(parts, dim=-1)


def affine_fields(data: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    nibbles = data[:, -128:].reshape(-1, 4, 1, 32)
    codes = torch.cat([nibbles & 15, nibbles >> 4], dim=2).view(-1, 8, 32)
    if bits == 5:
        high = data[:, None, 16:48] >> shifts(1, data.device).view(8, 1)
        codes = codes | (high & 1) << 4
    return codes, *affine_scales(data)


def affine_scales(data: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    first, second, third = data[:, 4:8], data[:, 8:12], data[:, 12:16]
    scales = torch.cat([first & 63, (third & 15) | (first >> 6) << 4], dim=-1)
    lows = torch.cat([second & 63, (third >> 4) | (second >> 6) << 4], dim=-1)
    return scales, lows


def pack_signed(scales: torch.Tensor, codes: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
    quarters = codes.view(-1, 2, 4, 32)  # of each half of the block
    nibbles, high = quarters & 15, quarters >> 4
    low_bytes = nibbles[:, :, :2] | (nibbles[:, :, 2:] << 4)
    high_bytes = (high << shifts(2, codes.device).view(4, 1)).sum(dim=2, dtype=torch.uint8)
    parts = [low_bytes.flatten(1), high_bytes.flatten(1), scales.view(torch.uint8)]
    return torch.cat([*parts, head.view(torch.uint8)], dim=-1)


def signed_fields(data: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    low_bytes, high_bytes = data[:, :128].reshape(-1, 2, 2, 32), data[:, 128:192]
    nibbles = torch.cat([low_bytes & 15, low_bytes >> 4], dim=2)
    high = (high_bytes.reshape(-1, 2, 1, 32) >> shifts(2, data.device).view(4, 1)) & 3
    return (nibbles | (high << 4)).view(-1, 16, 16), signed_scales(data)


def signed_scales(data: torch.Tensor) -> torch.Tensor:
    return data[:, 192:208].contiguous().view(torch.int8)


def pack_q2(
    scales: torch.Tensor, codes: torch.Tensor, lows: torch.Tensor, heads: torch.Tensor
) -> torch.Tensor:
    parts = [scales | (lows << 4), _pack_pairs(codes.flatten(1))]
    return torch.cat([*parts, heads.contiguous().view(torch.uint8)], dim=-1)


def q2_fields(data: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    fields = data[:, :16]
    return _unpack_pairs(data[:, 16:80]).view(-1, 16, 16), fields & 15, fields >> 4


def pack_q3(scales: torch.Tensor, codes: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
    """Blocks of Q3_K, in which the high bits of the codes lie apart."""
    high = (codes >> 2).view(-1, 8, 32) << shifts(1, codes.device).view(8, 1)
    six = (scales + 32).view(torch.uint8)
    low_scales = (six[:, :8] & 15) | ((six[:, 8:] & 15) << 4)
    high_scales = (six >> 4).view(-1, 4, 4) << shifts(2, codes.device).view(4, 1)
    high_bytes, scale_bytes = (p.sum(dim=1, dtype=torch.uint8) for p in (high, high_scales))
    parts = [high_bytes, _pack_pairs(codes & 3), low_scales, scale_bytes]
    return torch.cat([*parts, head.contiguous().view(torch.uint8)], dim=-1)


def q3_fields(data: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    high = ((data[:, None, :32] >> shifts(1, data.device).view(8, 1)) & 1).view(-1, 16, 16)
    return _unpack_pairs(data[:, 32:96]).view(-1, 16, 16) | (high << 2), q3_scales(data)


def q3_scales(data: torch.Tensor) -> torch.Tensor:
    low_scales = torch.cat([data[:, 96:104] & 15, data[:, 96:104] >> 4], dim=-1)
    high_scales = (data[:, None, 104:108] >> shifts(2, data.device).view(4, 1)) & 3
    return (low_scales | (high_scales.flatten(1) << 4)).view(torch.int8) - 32


def _pack_pairs(codes: torch.Tensor) -> torch.Tensor:
    quarters = codes.view(-1, 2, 4, 32) << shifts(2, codes.device).view(4, 1)
    return quarters.sum(dim=2, dtype=torch.uint8).flatten(1)


def _unpack_pairs(data: torch.Tensor) -> torch.Tensor:
    return ((data.reshape(-1, 2, 1, 32) >> shifts(2, data.device).view(4, 1)) & 3).flatten(1)


def dequantize_k(data: torch.Tensor, type_name: str) -> torch.Tensor:
    """Weights, float32 `[n, 256]`, of K-quant blocks."""

    def steps(at: int, scales: torch.Tensor) -> torch.Tensor:
        return (read_half(data, at) * scales.to(torch.float32)).unsqueeze(-1)

    if type_name in SIGNED:
        codes, scales = q3_fields(data) if type_name == "Q3_K" else signed_fields(data)
        head = steps(108 if type_name == "Q3_K" else 208, scales)
        return (head * (codes.to(torch.float32) - SIGNED[type_name][0])).view(-1, K_WIDTH)
    is_q2 = type_name == "Q2_K"
    codes, scales, lows = q2_fields(data) if is_q2 else affine_fields(data, int(type_name[1]))
    at = 80 if is_q2 else 0
    return (steps(at, scales) * codes.to(torch.float32) - steps(at + 2, lows)).view(-1, K_WIDTH)


# Runs of a block, the largest code, and the largest code of a scale.
AFFINE = {"Q2_K": (16, 3, 15), "Q4_K": (8, 15, 63), "Q5_K": (8, 31, 63)}
# Half the codes, and half the codes of a scale.
SIGNED = {"Q3_K": (4, 32), "Q6_K": (32, 128)}


def quantize_k(
    blocks: torch.Tensor, type_name: str, importance: torch.Tensor | None
) -> torch.Tensor:
    """Blocks of weights float32 `[n, 256]`; `importance` of their errors, positive, None: by the weights."""
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
