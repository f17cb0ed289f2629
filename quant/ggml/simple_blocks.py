"""ggml's simple blocks of 32 weights with one scale: Q8_0, Q4_0, Q4_1, Q5_0, Q5_1.

Codes and bytes are those of ggml's reference quantizers (`ggml-quants.c`): `d` is rounded to float16 for
storage, but codes are chosen with the unrounded one.
"""

from __future__ import annotations

import torch

from .fit import error_weights, extremes_of, fit_affine, fit_signed, half, reciprocal, whole

WIDTH = 32
_POWERS = tuple(1 << bit for bit in range(8))


def quantize_simple(
    blocks: torch.Tensor, type_name: str, importance: torch.Tensor | None
) -> torch.Tensor:
    """Blocks of weights, float32 `[n, 32]`, as bytes, uint8 `[n, block bytes]`.

    Without importance from the range alone, to ggml's bytes; with it, of least weighted error (not Q8_0).
    """
    if importance is not None and type_name != "Q8_0":
        return _quantize_weighted(blocks, type_name, error_weights(blocks.unsqueeze(1), importance))
    if type_name == "Q8_0":
        scale = blocks.abs().amax(dim=-1, keepdim=True) / 127
        scaled = blocks * reciprocal(scale)
        # Half away from zero, as C's roundf; torch.round goes to even.
        whole = scaled.abs().floor()
        codes = scaled.sign() * (whole + (2 * (scaled.abs() - whole)).floor())
        return pack_simple(type_name, codes, scale)
    levels = 16 if type_name[1] == "4" else 32
    if type_name.endswith("_0"):
        largest = blocks.gather(-1, blocks.abs().argmax(dim=-1, keepdim=True))
        scale = largest / (-levels / 2)
        codes, low = blocks * reciprocal(scale) + (levels / 2 + 0.5), None
    else:
        low, high = (edge.unsqueeze(-1) for edge in blocks.aminmax(dim=-1))
        scale = (high - low) / (levels - 1)
        codes = (blocks - low) * reciprocal(scale) + 0.5
    return pack_simple(type_name, codes.trunc().clamp(0, levels - 1), scale, low)


def _quantize_weighted(blocks: torch.Tensor, type_name: str, weights: torch.Tensor) -> torch.Tensor:
    """Codes on the stored grid of the search; after ggml's `quantize_row_q4_0_impl` and its like."""
    levels = 16 if type_name[1] == "4" else 32
    x, middle = blocks.unsqueeze(1), levels // 2
    if type_name.endswith("_0"):
        steps = half(fit_signed(x, weights, whole(middle), extremes_of(middle)))
        codes, low = (blocks * reciprocal(steps)).round() + middle, None
    else:
        steps, offsets = (half(part) for part in fit_affine(x, weights, levels - 1))
        codes, low = ((blocks + offsets) * reciprocal(steps)).round(), -offsets
    return pack_simple(type_name, codes.clamp(0, levels - 1), steps, low)


def pack_simple(
    type_name: str, codes: torch.Tensor, scale: torch.Tensor, low: torch.Tensor | None = None
) -> torch.Tensor:
    """Blocks as bytes, uint8 `[n, block bytes]`.

    Args:
        codes: whole numbers `[n, 32]`: signed of Q8_0, unsigned of the others.
        scale, low: `[n, 1]`; `low` of Q4_1 and Q5_1.
    """
    head = [_half(scale)] if low is None else [_half(scale), _half(low)]
    if type_name == "Q8_0":
        return torch.cat([*head, codes.to(torch.int8).view(torch.uint8)], dim=-1)
    codes = codes.to(torch.uint8)
    if type_name[1] == "5":
        head.append(pack_bits(codes >> 4))
        codes = codes & 15
    return torch.cat([*head, codes[:, :16] | (codes[:, 16:] << 4)], dim=-1)


def dequantize_simple(data: torch.Tensor, type_name: str) -> torch.Tensor:
    """Dequantize bytes `[n, block bytes]` to float32 `[n, 32]`."""
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


def pack_bits(bits: torch.Tensor) -> torch.Tensor:
    """uint8 `[n, 8 k]` of zeros and ones as bytes `[n, k]`, the first in the lowest bit."""
    powers = torch.tensor(_POWERS, dtype=torch.uint8, device=bits.device)
    return (bits.unflatten(-1, (-1, 8)) * powers).sum(dim=-1, dtype=torch.uint8)


def unpack_bits(data: torch.Tensor) -> torch.Tensor:
    """Inverse of `pack_bits`."""
    shifts = torch.arange(8, dtype=torch.uint8, device=data.device)
    return ((data.unsqueeze(-1) >> shifts) & 1).flatten(-2)


def read_half(data: torch.Tensor, start: int) -> torch.Tensor:
    """The float16 at byte `start` of each block, float32 `[n, 1]`."""
    return data[:, start : start + 2].contiguous().view(torch.float16).to(torch.float32)


def _half(values: torch.Tensor) -> torch.Tensor:
    """float32 `[n, 1]` as the two bytes of a float16."""
    return values.to(torch.float16).view(torch.uint8)
