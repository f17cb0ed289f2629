"""Rotary embedding, applied: pairs (i, i + head_dim / 2) of each head turn by the position's angle."""

from __future__ import annotations

import torch


def apply_rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate queries or keys.

    Args:
        x: [tokens, heads, head_dim].
        cos, sin: [tokens, 1, head_dim], in x's dtype; the second half of `cos` repeats the first, and
            the first half of `sin` is the second's negative (`expand_angles` makes them so).
    """
    half = x.shape[-1] // 2
    swapped = torch.cat([x[..., half:], x[..., :half]], dim=-1)
    return x * cos + swapped * sin


def expand_angles(cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """From angles [..., head_dim / 2] to the full-width factors that `apply_rotary` takes."""
    return torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)
