"""K-quants as grids: super-blocks of 256 weights, fitted together, with a step for each sub-block."""

from __future__ import annotations

import torch

from ..ggml.fit import error_weights, extremes_of, in_chunks, whole
from ..ggml.k_blocks import WIDTH, pack_affine, pack_signed
from ..ggml.k_quants import AFFINE, SIGNED
from ..ggml.k_search import AffineCodes, SignedCodes, search_affine, search_signed
from ..ggml.k_small_blocks import pack_q2, pack_q3
from ..kinds.ggml.scheme import GgufScheme
from ..tensors.gguf import GgufTensor
from .base import Parameters
from .scalar_grid import Affine, ScalarGrid, snap_to_integers

K_AFFINE, K_SIGNED = tuple(AFFINE), tuple(SIGNED)


class KAffineGrid(ScalarGrid):
    """Q2_K, Q4_K and Q5_K: `d * scale * code - dmin * minimum`.

    Its parameters: codes of the scales and minimums of the sub-blocks, float32 `[out, groups, runs]`, and
    heads (d and dmin), float16 `[out, groups, 2]`.
    """

    group = WIDTH

    def __init__(self, scheme: GgufScheme):
        self.scheme = scheme
        self._runs, self._levels, self._scale_levels = AFFINE[scheme.type]

    def fit(self, values: torch.Tensor, importance: torch.Tensor | None = None) -> Parameters:
        blocks = values.reshape(-1, self._runs, WIDTH // self._runs)
        if importance is None:
            weights = error_weights(blocks, None)
        else:
            weights = importance.expand(values.shape).reshape(blocks.shape)

        def search(x: torch.Tensor, weights: torch.Tensor) -> AffineCodes:
            return search_affine(x, weights, self._levels, self._scale_levels, rounds=1)

        scales, _, lows, heads = in_chunks(search, blocks, weights)
        return tuple(part.view(*values.shape[:2], -1) for part in (scales, lows, heads))

    def affine(self, parameters: Parameters) -> Affine:
        scales, lows, heads = parameters
        step = heads[..., :1].to(torch.float32) * scales
        offset = heads[..., 1:].to(torch.float32) * lows
        flat = step == 0
        high = torch.where(flat, 0.0, float(self._levels))
        return Affine(torch.where(flat, 1.0, step), -offset, torch.zeros_like(high), high)

    def snap(self, scaled: torch.Tensor, affine: Affine) -> None:
        snap_to_integers(scaled, affine)

    def tensor(self, values: torch.Tensor, parameters: Parameters) -> GgufTensor:
        scales, lows, heads = (part.flatten(0, 1) for part in parameters)
        codes = self.levels(values, parameters).view(-1, self._runs, WIDTH // self._runs)
        fields = scales.to(torch.uint8), codes.to(torch.uint8), lows.to(torch.uint8), heads
        is_q2 = self.scheme.type == "Q2_K"
        data = pack_q2(*fields) if is_q2 else pack_affine(*fields, self.scheme.bits)
        return GgufTensor(data.view(values.shape[0], -1), self.scheme)


class KSignedGrid(ScalarGrid):
    """Q3_K and Q6_K: `d * scale * code`.

    Its parameters: codes of the sub-blocks' scales, float32 `[out, groups, 16]`, and d, float32
    `[out, groups, 1]`.
    """

    group = WIDTH

    def __init__(self, scheme: GgufScheme):
        self.scheme = scheme
        self._middle, self._scale_middle = SIGNED[scheme.type]

    def fit(self, values: torch.Tensor, importance: torch.Tensor | None = None) -> Parameters:
        blocks = values.reshape(-1, 16, WIDTH // 16)
        if importance is None:
            weights = blocks.square()
        else:
            weights = importance.expand(values.shape).reshape(blocks.shape)
        nearest, extremes = whole(self._middle), extremes_of(self._middle)

        def search(x: torch.Tensor, weights: torch.Tensor) -> SignedCodes:
            return search_signed(x, weights, nearest, extremes, self._scale_middle)

        scales, _, head = in_chunks(search, blocks, weights)
        parts = scales, head.to(torch.float32)
        return tuple(part.view(*values.shape[:2], -1) for part in parts)

    def affine(self, parameters: Parameters) -> Affine:
        scales, head = parameters
        step = head * scales
        return Affine(torch.where(step == 0, 1.0, step), None, *_edges(step == 0, self._middle))

    def snap(self, scaled: torch.Tensor, affine: Affine) -> None:
        snap_to_integers(scaled, affine)

    def tensor(self, values: torch.Tensor, parameters: Parameters) -> GgufTensor:
        scales, head = (part.flatten(0, 1) for part in parameters)
        codes = self.levels(values, parameters).add_(self._middle).view(-1, WIDTH).to(torch.uint8)
        pack = pack_q3 if self.scheme.type == "Q3_K" else pack_signed
        data = pack(scales.to(torch.int8), codes, head.to(torch.float16))
        return GgufTensor(data.view(values.shape[0], -1), self.scheme)


def _edges(flat: torch.Tensor, middle: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The least and the largest signed level; both 0 where the step is."""
    return torch.where(flat, 0.0, -float(middle)), torch.where(flat, 0.0, middle - 1.0)
