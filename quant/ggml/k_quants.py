"""Quantization to K-quant blocks: search, then pack."""

from __future__ import annotations

import torch

from .fit import error_weights, extremes_of, whole
from .k_blocks import pack_affine, pack_signed
from .k_search import search_affine, search_signed
from .k_small_blocks import pack_q2, pack_q3

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
        x = blocks.view(-1, 16, 16)
        weights = error_weights(x, importance)
        if type_name == "Q6_K":
            weights = x.square() if importance is None else importance.view_as(x)
        fitted = search_signed(x, weights, whole(middle), extremes_of(middle), scale_middle)
        codes = (fitted.values + middle).to(torch.uint8).flatten(1)
        pack = pack_q3 if type_name == "Q3_K" else pack_signed
        return pack(fitted.scales.to(torch.int8), codes, fitted.head)
    runs, levels, scale_levels = AFFINE[type_name]
    x = blocks.view(-1, runs, 256 // runs)
    weights = error_weights(x, importance)
    rounds = 2 if type_name == "Q2_K" else 1
    scales, codes, lows, heads = search_affine(x, weights, levels, scale_levels, rounds)
    parts = (scales.to(torch.uint8), codes.to(torch.uint8), lows.to(torch.uint8), heads)
    return pack_q2(*parts) if type_name == "Q2_K" else pack_affine(*parts, int(type_name[1]))
