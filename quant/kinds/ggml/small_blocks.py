"""ggml's blocks with one scale for 32 weights: Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, and tables of 16 values.

Tables are those of IQ4_NL, IQ4_XS and MXFP4 (`ggml-common.h`). Codes and bytes are those of ggml's reference
(`ggml-quants.c`): `d` is stored as float16, but codes are chosen with the unrounded one.
"""

from __future__ import annotations

from functools import cache

import torch
from torch.nn import functional as F

from ...base.sums import folded
from ..base.grid import where
from .fit import (
    SignedCodes,
    error_weights,
    extremes_of,
    fit_affine,
    fit_signed,
    half,
    outermost,
    reciprocal,
    search_signed,
    search_table,
    whole,
)

WIDTH = 32  # weights in a block: `QK4_0` and its like in ggml
_AT_ONCE = 8  # blocks that the compiled search takes together


def quantize_simple(
    blocks: torch.Tensor, type_name: str, importance: torch.Tensor | None
) -> torch.Tensor:
    """Blocks float32 `[n, 32]` as bytes uint8 `[n, block bytes]`, to ggml's bytes without importance. With
    it, of least weighted error (not Q8_0), after ggml's `quantize_row_q4_0_impl` and its like."""
    if type_name == "Q8_0":
        scale = blocks.abs().amax(dim=-1, keepdim=True) / 127
        scaled = blocks * reciprocal(scale)
        # Half away from zero, as C's roundf; torch.round goes to even.
        floor = scaled.abs().floor()
        codes = scaled.sign() * (floor + (2 * (scaled.abs() - floor)).floor())
        return pack_simple(type_name, codes, scale)
    levels = 16 if type_name[1] == "4" else 32
    if importance is not None:
        x, middle = blocks.unsqueeze(1), levels // 2
        weights = error_weights(x, importance)
        if type_name.endswith("_0"):
            steps = half(fit_signed(x, weights, whole(middle), extremes_of(middle)))
            codes, low = (blocks * reciprocal(steps)).round() + middle, None
        else:
            steps, offsets = (half(part) for part in fit_affine(x, weights, levels - 1))
            codes, low = ((blocks + offsets) * reciprocal(steps)).round(), -offsets
        return pack_simple(type_name, codes.clamp(0, levels - 1), steps, low)
    if type_name.endswith("_0"):
        largest = blocks.gather(-1, blocks.abs().argmax(dim=-1, keepdim=True))
        scale = largest / (-levels / 2)
        codes, low = blocks * reciprocal(scale) + (levels / 2 + 0.5), None
    else:
        low, high = (edge.unsqueeze(-1) for edge in blocks.aminmax(dim=-1))
        scale = (high - low) / (levels - 1)
        codes = (blocks - low) * reciprocal(scale) + 0.5
    return pack_simple(type_name, codes.trunc().clamp(0, levels - 1), scale, low)


def pack_simple(
    type_name: str, codes: torch.Tensor, scale: torch.Tensor, low: torch.Tensor | None = None
) -> torch.Tensor:
    """Blocks as bytes, of whole numbers `[n, 32]`, signed for Q8_0, and numbers `[n, 1]`."""
    head = [_half(scale)] if low is None else [_half(scale), _half(low)]
    if type_name == "Q8_0":
        return torch.cat([*head, codes.to(torch.int8).view(torch.uint8)], dim=-1)
    codes = codes.to(torch.uint8)
    if type_name[1] == "5":
        head.append(pack_bits(codes >> 4))
        codes = codes & 15
    return torch.cat([*head, codes[:, :16] | (codes[:, 16:] << 4)], dim=-1)


def dequantize_simple(data: torch.Tensor, type_name: str) -> torch.Tensor:
    scale = read_half(data, 0)
    if type_name == "Q8_0":
        return data[:, 2:].contiguous().view(torch.int8).to(torch.float32) * scale
    codes = simple_codes(data, type_name)
    if type_name.endswith("_1"):
        return codes.to(torch.float32) * scale + read_half(data, 2)
    middle = 8 if type_name[1] == "4" else 16
    return (codes.to(torch.float32) - middle) * scale


def simple_codes(data: torch.Tensor, type_name: str) -> torch.Tensor:
    """The unsigned codes, uint8 `[n, 32]`, of 4- and 5-bit blocks."""
    nibbles = torch.empty(len(data), 32, dtype=torch.uint8, device=data.device)
    torch.bitwise_and(data[:, -16:], 15, out=nibbles[:, :16])
    torch.bitwise_right_shift(data[:, -16:], 4, out=nibbles[:, 16:])
    if type_name[1] == "4":
        return nibbles
    return nibbles | (unpack_bits(data[:, -20:-16]) << 4)


def shifts(bits: int, device: torch.device) -> torch.Tensor:
    return torch.arange(0, 8, bits, dtype=torch.uint8, device=device)


def pack_bits(bits: torch.Tensor) -> torch.Tensor:
    """uint8 `[n, 8 k]` of zeros and ones as bytes `[n, k]`, the first in the lowest bit."""
    return (bits.unflatten(-1, (-1, 8)) << shifts(1, bits.device)).sum(dim=-1, dtype=torch.uint8)


def unpack_bits(data: torch.Tensor) -> torch.Tensor:
    return ((data.unsqueeze(-1) >> shifts(1, data.device)) & 1).flatten(-2)


def read_half(data: torch.Tensor, start: int) -> torch.Tensor:
    """The float16 at byte `start` of each block, float32 `[n, 1]`."""
    return data[:, start : start + 2].contiguous().view(torch.float16).to(torch.float32)


def _half(values: torch.Tensor) -> torch.Tensor:
    return values.to(torch.float16).view(torch.uint8)


# ggml's `kvalues_iq4nl`, and e2m1's values doubled.
IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
MXFP4_VALUES = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
_MAGNITUDES = MXFP4_VALUES[:8]
_FIRST_HALF, _LAST_HALF = 2 * IQ4_VALUES[0], 2 * IQ4_VALUES[-1]
# Values that the largest weight is tried as, at either end of the table.
_EXTREMES = tuple(float(end + step) for end in (-127, 113) for step in range(-7, 8))


def quantize_table(
    blocks: torch.Tensor, type_name: str, importance: torch.Tensor | None
) -> torch.Tensor:
    """Blocks of weights, float32 `[n, width]`, as bytes; `importance` is positive."""
    if type_name == "IQ4_XS":
        x = blocks.view(-1, 8, 32)
        fitted = fit_xs(x, error_weights(x, importance))
        return pack_xs(fitted.scales, fitted.values.flatten(1), fitted.head)
    weights = error_weights(blocks.unsqueeze(1), importance).squeeze(1)
    if type_name == "MXFP4":
        return _quantize_mxfp4(blocks, weights)
    step = fit_nl(blocks, weights)
    return pack_nl(step, nearest_iq4(blocks * reciprocal(step)))


def fit_nl(blocks: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The step of each block `[n, 32]`, float32 `[n, 1]`, as stored; `weights` are of the squared errors."""
    rest = -len(blocks) % _AT_ONCE
    x, w = (F.pad(part, (0, 0, 0, rest)).view(-1, _AT_ONCE, WIDTH) for part in (blocks, weights))
    if (codes := search_table(x, w, table(blocks.device), _EXTREMES, 0)) is not None:
        return codes.head.view(-1, 1)[: len(blocks)].to(torch.float32)
    step = half(fit_signed(blocks, weights, nearest_iq4, _EXTREMES, folded).unsqueeze(-1))
    values = nearest_iq4(blocks * reciprocal(step))
    weighted = weights * values
    squares = folded(weighted * values)
    refitted = folded(weighted * blocks) / squares
    refitted = half(torch.where(squares > 0, refitted, step))
    others = nearest_iq4(blocks * reciprocal(refitted))
    before, after = (
        folded(weights * (nearest * scale - blocks).square())
        for nearest, scale in ((values, step), (others, refitted))
    )
    return torch.where(after < before, refitted, step)


def pack_nl(step: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    return torch.cat([_half(step), pack_codes(_indices(values))], dim=-1)


def dequantize_iq4_nl(data: torch.Tensor) -> torch.Tensor:
    return read_half(data, 0) * table(data.device)[table_codes(data, 2).long()]


def dequantize_iq4_xs(data: torch.Tensor) -> torch.Tensor:
    values = table(data.device)[table_codes(data, 8).long()].view(-1, 8, 32)
    steps = read_half(data, 0) * iq4_xs_scales(data).to(torch.float32)
    return (steps.unsqueeze(-1) * values).view(-1, 256)


def iq4_xs_scales(data: torch.Tensor) -> torch.Tensor:
    """The scale of each run of 32 in units of the block's float16, int8 `[n, 8]`."""
    low = torch.stack([data[:, 4:8] & 15, data[:, 4:8] >> 4], dim=-1).flatten(1)
    high = ((data[:, 2:4].unsqueeze(-1) >> shifts(2, data.device)) & 3).flatten(1)
    return (low | (high << 4)).to(torch.int8) - 32


def dequantize_mxfp4(data: torch.Tensor) -> torch.Tensor:
    values = torch.tensor(MXFP4_VALUES, dtype=torch.float32, device=data.device)
    return mxfp4_steps(data) * values[table_codes(data, 1).long()]


def mxfp4_steps(data: torch.Tensor) -> torch.Tensor:
    """`2 ** (e - 128)` of each block's first byte `e`, float32 `[n, 1]`; the smallest two are subnormal."""
    exponents = data[:, :1].to(torch.int32)
    bits = torch.where(exponents < 2, 0x00200000 << exponents.clamp(max=1), (exponents - 1) << 23)
    return bits.to(torch.int32).view(torch.float32)


def table_codes(data: torch.Tensor, start: int) -> torch.Tensor:
    """The 4-bit codes behind byte `start`, uint8 `[n, width]`: 16 low nibbles, then 16 high ones."""
    nibbles = data[:, start:].reshape(len(data), -1, 1, 16)
    return torch.cat([nibbles & 15, nibbles >> 4], dim=2).flatten(1)


@cache
def table(device: torch.device) -> torch.Tensor:
    return torch.tensor(IQ4_VALUES, dtype=torch.float32, device=device)


@cache
def _nearest_to_halves(device: torch.device) -> torch.Tensor:
    # Middles between neighbours are whole or half numbers, so that a weight goes where the next half does.
    halves = torch.arange(_FIRST_HALF, _LAST_HALF + 1, dtype=torch.float32, device=device) / 2
    return table(device)[_indices(halves)]


def nearest_iq4(scaled: torch.Tensor) -> torch.Tensor:
    """The table's nearest values, looked up by half steps: ten times as fast as a search."""
    halves = (scaled * 2).ceil_().nan_to_num_(0).clamp_(_FIRST_HALF, _LAST_HALF)
    rows = halves.sub_(_FIRST_HALF).to(torch.int32).flatten()
    return _nearest_to_halves(scaled.device).index_select(0, rows).view(scaled.shape)


def _indices(scaled: torch.Tensor) -> torch.Tensor:
    values = table(scaled.device)
    return torch.bucketize(scaled, (values[1:] + values[:-1]) / 2)


def pack_codes(codes: torch.Tensor) -> torch.Tensor:
    nibbles = codes.to(torch.uint8).view(len(codes), -1, 2, 16)
    return (nibbles[:, :, 0] | (nibbles[:, :, 1] << 4)).flatten(1)


def fit_xs(x: torch.Tensor, weights: torch.Tensor) -> SignedCodes:
    """Scales, values and heads of blocks `[n, 8, 32]`; `weights` are of the squared errors."""
    codes = search_table(x, weights, table(x.device), _EXTREMES, 32)
    if codes is not None:
        return codes
    x, weights = outermost(x, weights)
    return search_signed(x, weights, nearest_iq4, _EXTREMES, 32)


def pack_xs(scales: torch.Tensor, values: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
    """IQ4_XS's bytes for codes of scales `[n, 8]`, values of the table `[n, 256]` and d `[n, 1]`."""
    six = (scales + 32).to(torch.uint8)
    fields = (six >> 4).view(-1, 2, 4) << shifts(2, scales.device)
    high = fields.sum(dim=-1, dtype=torch.uint8)
    low = (six[:, 0::2] & 15) | ((six[:, 1::2] & 15) << 4)
    return torch.cat([_half(head), high, low, pack_codes(_indices(values))], dim=-1)


def _quantize_mxfp4(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The exponent of the largest weight, one less or one more: what errs least."""
    largest = x.abs().amax(dim=-1, keepdim=True)
    base = (torch.frexp(largest).exponent - 3 + 127).clamp(0, 254)
    base = torch.where(largest > 0, base, 0)
    values = torch.tensor(_MAGNITUDES, dtype=torch.float32, device=x.device)
    middles = (values[1:] + values[:-1]) / 2
    best = torch.full_like(largest, torch.inf), base, torch.zeros_like(x, dtype=torch.int64)
    for shift in (0, -1, 1):
        tried = (base + shift).clamp(0, 254)
        step = mxfp4_steps(tried.to(torch.uint8))
        levels = torch.bucketize(x.abs() / step, middles)
        error = (weights * (values[levels] * step - x.abs()).square()).sum(dim=-1, keepdim=True)
        best = where(error < best[0], (error, tried, levels), best)
    _, exponents, codes = best
    codes = torch.where((x < 0) & (codes > 0), codes + 8, codes)
    return torch.cat([exponents.to(torch.uint8), pack_codes(codes)], dim=-1)
