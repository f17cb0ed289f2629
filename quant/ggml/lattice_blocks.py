"""Byte layout of ggml's IQ1, IQ2 and IQ3 blocks of 256 weights (`ggml-common.h`)."""

from __future__ import annotations

import torch

from .lattice_search import LatticeCodes, search_lattice
from .lattice_tables import LATTICES, points, sign_bytes
from .simple_blocks import pack_bits, read_half, unpack_bits

Fields = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor]


def quantize_lattice(
    blocks: torch.Tensor, type_name: str, importance: torch.Tensor | None
) -> torch.Tensor:
    """Blocks of weights, float32 `[n, 256]`, as bytes."""
    codes = search_lattice(blocks, type_name, importance)
    head = codes.head.view(torch.uint8)
    signs = pack_bits(codes.minus.to(torch.uint8))
    low = (codes.indices & 255).to(torch.uint8)
    if type_name in ("IQ1_S", "IQ1_M"):
        return _pack_one_bit(codes, type_name, head, low)
    if type_name in ("IQ2_XXS", "IQ3_XXS"):
        return torch.cat([head, *_with_signs(type_name, low, signs, codes.scales)], dim=-1)
    nibbles = (codes.scales[:, 0::2] | (codes.scales[:, 1::2] << 4)).to(torch.uint8)
    if type_name == "IQ2_XS":
        words = codes.indices | ((signs & 127).long() << 9)
        return torch.cat([head, _bytes(words, 2), nibbles], dim=-1)
    high = codes.indices >> 8
    bits = 1 if type_name == "IQ3_S" else 2
    shifts = torch.arange(0, 8, bits, device=high.device)
    packed = (high.unflatten(-1, (-1, 8 // bits)) << shifts).sum(dim=-1).to(torch.uint8)
    middle = [packed, signs] if type_name == "IQ3_S" else [signs, packed]
    return torch.cat([head, low, *middle, nibbles], dim=-1)


def dequantize_lattice(data: torch.Tensor, type_name: str) -> torch.Tensor:
    """Weights, float32 `[n, 256]`."""
    indices, signs, scales, head = lattice_fields(data, type_name)
    lattice = LATTICES[type_name]
    values = points(type_name, data.device)[indices].view(len(data), lattice.runs, -1)
    if signs is not None:
        minus = unpack_bits(signs).view_as(values)
        values = torch.where(minus == 1, -values, values)
    steps = head * (2 * scales.to(torch.float32) + 1) * lattice.unit
    return (steps.unsqueeze(-1) * values).view(-1, 256)


def lattice_fields(data: torch.Tensor, type_name: str) -> Fields:
    """Of blocks: indices of points, bytes of signs, scales `[n, runs]`, and d float32 `[n, 1]`."""
    if type_name == "IQ1_S":
        high = _words(data[:, 34:50], 2)
        third = (high.unsqueeze(-1) >> torch.tensor([0, 3, 6, 9], device=data.device)) & 7
        below = (high >> 15).repeat_interleave(4, dim=-1)
        indices = data[:, 2:34].long() | (third.flatten(1) << 8) | (below << 11)
        return indices, None, (high >> 12) & 7, read_half(data, 0)
    if type_name == "IQ1_M":
        nibbles = torch.stack([data[:, 32:48] & 15, data[:, 32:48] >> 4], dim=-1).flatten(1)
        words = _words(data[:, 48:56], 2)
        scales = (words.unsqueeze(-1) >> torch.tensor([0, 3, 6, 9], device=data.device)) & 7
        parts = (words >> 12) << torch.tensor([0, 4, 8, 12], device=data.device)
        head = _bytes(parts.sum(dim=-1, keepdim=True), 2)
        indices = data[:, :32].long() | (nibbles.long() << 8)
        return indices, None, scales.flatten(1), read_half(head, 0)
    head, device = read_half(data, 0), data.device
    if type_name in ("IQ2_XXS", "IQ3_XXS"):
        if type_name == "IQ2_XXS":
            pairs = data[:, 2:].reshape(len(data), 8, 8)
            indices, tail = pairs[:, :, :4].flatten(1), pairs[:, :, 4:].flatten(1)
        else:
            indices, tail = data[:, 2:66], data[:, 66:]
        words = _words(tail, 4)
        seven = (words.unsqueeze(-1) >> torch.tensor([0, 7, 14, 21], device=device)) & 127
        return indices.long(), sign_bytes(device)[seven.flatten(1)], words >> 28, head
    at = {"IQ2_XS": 66, "IQ2_S": 74, "IQ3_S": 106}[type_name]
    scales = torch.stack([data[:, at:] & 15, data[:, at:] >> 4], dim=-1).flatten(1)
    if type_name == "IQ2_XS":
        words = _words(data[:, 2:66], 2)
        return words & 511, sign_bytes(device)[words >> 9], scales, head
    if type_name == "IQ2_S":
        low, signs, packed, bits = data[:, 2:34], data[:, 34:66], data[:, 66:74], 2
    else:
        low, packed, signs, bits = data[:, 2:66], data[:, 66:74], data[:, 74:106], 1
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=device)
    high = ((packed.unsqueeze(-1) >> shifts) & (2**bits - 1)).flatten(1)
    return low.long() | (high.long() << 8), signs, scales, head


def _with_signs(
    type_name: str, low: torch.Tensor, signs: torch.Tensor, scales: torch.Tensor
) -> list[torch.Tensor]:
    """Indices, and for each run a word of four times seven signs and the scale."""
    seven = (signs & 127).long().view(-1, 8, 4)
    shifts = torch.tensor([0, 7, 14, 21], device=signs.device)
    words = _bytes((seven << shifts).sum(dim=-1) | (scales << 28), 4)
    if type_name == "IQ3_XXS":
        return [low, words]
    pairs = torch.cat([low.view(-1, 8, 4), words.view(-1, 8, 4)], dim=-1)
    return [pairs.flatten(1)]


def _pack_one_bit(
    codes: LatticeCodes, type_name: str, head: torch.Tensor, low: torch.Tensor
) -> torch.Tensor:
    """IQ1: indices of 11 bits, whose twelfth says that the delta is subtracted."""
    shifts = torch.tensor([0, 3, 6, 9], device=low.device)
    if type_name == "IQ1_S":
        high = ((codes.indices >> 8) & 7).view(-1, 8, 4)
        below = (codes.indices >> 11).view(-1, 8, 4)[:, :, 0]
        words = (high << shifts).sum(dim=-1) | (codes.scales << 12) | (below << 15)
        return torch.cat([head, low, _bytes(words, 2)], dim=-1)
    nibbles = (codes.indices >> 8).to(torch.uint8)
    pairs = nibbles[:, 0::2] | (nibbles[:, 1::2] << 4)
    bits = _words(head, 2)
    parts = (bits >> torch.tensor([0, 4, 8, 12], device=low.device)) & 15
    words = (codes.scales.view(-1, 4, 4) << shifts).sum(dim=-1) | (parts << 12)
    return torch.cat([low, pairs, _bytes(words, 2)], dim=-1)


def _bytes(words: torch.Tensor, size: int) -> torch.Tensor:
    """Whole numbers int64 `[n, k]` as little-endian bytes `[n, size k]`."""
    shifts = torch.arange(0, 8 * size, 8, device=words.device)
    return ((words.unsqueeze(-1) >> shifts) & 255).to(torch.uint8).flatten(1)


def _words(data: torch.Tensor, size: int) -> torch.Tensor:
    """Inverse of `_bytes`."""
    shifts = torch.arange(0, 8 * size, 8, device=data.device)
    return (data.unflatten(-1, (-1, size)).long() << shifts).sum(dim=-1)
