"""Rotary position embedding (RoPE) of half-split (NeoX) pairs (i, i + width / 2) of each head.

Source: Su et al., "RoFormer" (arXiv:2104.09864).
"""

from __future__ import annotations

import torch


def apply_rotary_emb(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate queries or keys; elements of a head beyond `width` pass through (partial rotary).

    Args:
        x: [tokens, heads, head_dim].
        cos, sin: [tokens, 1, width], in x's dtype; the second half of `cos` repeats the first, and
            the first half of `sin` is the second's negative (`expand_cos_sin` makes them so).
    """
    width = cos.shape[-1]
    if width < x.shape[-1]:
        return torch.cat([apply_rotary_emb(x[..., :width], cos, sin), x[..., width:]], dim=-1)
    half = width // 2
    swapped = torch.cat([x[..., half:], x[..., :half]], dim=-1)
    return x * cos + swapped * sin


def interleaved_to_halves(x: torch.Tensor, width: int) -> torch.Tensor:
    """Reorder interleaved (GPT-J) pairs (2i, 2i + 1) of the first `width` elements to half-split (NeoX) ones,
    for `apply_rotary_emb`.

    Applied to queries and keys alike, it changes no attention score.
    """
    if width < x.shape[-1]:
        return torch.cat([interleaved_to_halves(x[..., :width], width), x[..., width:]], dim=-1)
    return x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)


def expand_cos_sin(cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Expand cos and sin [..., width / 2] to the full-width factors that `apply_rotary_emb` takes."""
    return torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)
