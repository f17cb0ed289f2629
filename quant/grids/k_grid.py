"""K-quants as grids: super-blocks of 256 weights, fitted together, with a step for each sub-block."""

from __future__ import annotations

import torch

from ..base.scheme import GgufScheme
from ..ggml.fit import error_weights, extremes_of, whole
from ..ggml.k_blocks import WIDTH, pack_affine, pack_signed
from ..ggml.k_search import search_affine, search_signed
from ..tensors.gguf import GgufTensor
from .base import Parameters
from .scalar_grid import Affine, ScalarGrid, snap_to_integers

_SCALE_LEVELS = 63
"""The largest 6-bit code of a scale or minimum (Q4_K, Q5_K)."""
_SCALE_MIDDLE = 128
"""Half the codes of an 8-bit scale (Q6_K)."""


class KAffineGrid(ScalarGrid):
    """Q4_K and Q5_K: `d * scale * code - dmin * minimum`.

    Its parameters: 6-bit scales and minimums of the sub-blocks, float32 `[out, groups, 8]`, and heads (d and
    dmin), float16 `[out, groups, 2]`.
    """

    group = WIDTH

    def __init__(self, scheme: GgufScheme):
        self.scheme = scheme

    def fit(self, values: torch.Tensor, importance: torch.Tensor | None = None) -> Parameters:
        blocks = values.reshape(-1, 8, WIDTH // 8)
        if importance is None:
            weights = error_weights(blocks, None)
        else:
            weights = importance.expand(values.shape).reshape(blocks.shape)
        fitted = search_affine(blocks, weights, 2**self.scheme.bits - 1, _SCALE_LEVELS, rounds=1)
        parts = fitted.scales, fitted.lows, fitted.heads
        return tuple(part.view(*values.shape[:2], -1) for part in parts)

    def affine(self, parameters: Parameters) -> Affine:
        scales, lows, heads = parameters
        step = heads[..., :1].to(torch.float32) * scales
        offset = heads[..., 1:].to(torch.float32) * lows
        flat = step == 0
        high = torch.where(flat, 0.0, 2.0**self.scheme.bits - 1)
        return Affine(torch.where(flat, 1.0, step), -offset, torch.zeros_like(high), high)

    def snap(self, scaled: torch.Tensor, affine: Affine) -> None:
        snap_to_integers(scaled, affine)

    def tensor(self, values: torch.Tensor, parameters: Parameters) -> GgufTensor:
        scales, lows, heads = (part.flatten(0, 1) for part in parameters)
        codes = self.levels(values, parameters).view(-1, 8, WIDTH // 8).to(torch.uint8)
        data = pack_affine(
            scales.to(torch.uint8), codes, lows.to(torch.uint8), heads, self.scheme.bits
        )
        return GgufTensor(data.view(values.shape[0], -1), self.scheme)


class KSignedGrid(ScalarGrid):
    """Q6_K: `d * scale * code`.

    Its parameters: 8-bit scales of the sub-blocks, float32 `[out, groups, 16]`, and d, float32
    `[out, groups, 1]`.
    """

    group = WIDTH

    def __init__(self, scheme: GgufScheme):
        self.scheme = scheme

    def fit(self, values: torch.Tensor, importance: torch.Tensor | None = None) -> Parameters:
        blocks = values.reshape(-1, 16, WIDTH // 16)
        if importance is None:
            weights = blocks.square()
        else:
            weights = importance.expand(values.shape).reshape(blocks.shape)
        fitted = search_signed(blocks, weights, whole(32), extremes_of(32), _SCALE_MIDDLE)
        parts = fitted.scales, fitted.head.to(torch.float32)
        return tuple(part.view(*values.shape[:2], -1) for part in parts)

    def affine(self, parameters: Parameters) -> Affine:
        scales, head = parameters
        step = head * scales
        return Affine(torch.where(step == 0, 1.0, step), None, *_edges(step == 0, 32))

    def snap(self, scaled: torch.Tensor, affine: Affine) -> None:
        snap_to_integers(scaled, affine)

    def tensor(self, values: torch.Tensor, parameters: Parameters) -> GgufTensor:
        scales, head = (part.flatten(0, 1) for part in parameters)
        codes = self.levels(values, parameters).add_(32).view(-1, WIDTH).to(torch.uint8)
        data = pack_signed(scales.to(torch.int8), codes, head.to(torch.float16))
        return GgufTensor(data.view(values.shape[0], -1), self.scheme)


def _edges(flat: torch.Tensor, middle: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The least and the largest signed level; both 0 where the step is."""
    return torch.where(flat, 0.0, -float(middle)), torch.where(flat, 0.0, middle - 1.0)
