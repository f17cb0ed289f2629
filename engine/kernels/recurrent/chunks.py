"""Chunks of a run of tokens, for recurrences that are matrix products within a chunk."""

from __future__ import annotations

import torch
from torch.nn import functional

CHUNK = 64
"""Tokens of a chunk at most."""


def in_chunks(x: torch.Tensor) -> torch.Tensor:
    """[tokens, heads, dim] as [chunks, heads, size, dim], the last chunk filled with zeros."""
    size = min(CHUNK, len(x))
    missing = -len(x) % size
    padded = functional.pad(x, (0, 0, 0, 0, 0, missing)) if missing else x
    return padded.unflatten(0, (-1, size)).transpose(1, 2)


def of_chunks(chunks: list[torch.Tensor], num_tokens: int) -> torch.Tensor:
    """The first tokens [num_tokens, heads, dim] of chunks [heads, size, dim]."""
    return torch.stack(chunks).transpose(1, 2).flatten(0, 1)[:num_tokens]


def decay_between(decay: torch.Tensor) -> torch.Tensor:
    """exp(decay[i] - decay[j]) for j <= i, else 0: [..., size, size] of summed log decays [..., size]."""
    size = decay.shape[-1]
    later = torch.ones(size, size, dtype=torch.bool, device=decay.device).triu(1)
    between = decay[..., :, None] - decay[..., None, :]
    return between.masked_fill(later, float("-inf")).exp()
