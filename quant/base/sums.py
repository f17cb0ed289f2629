"""Sums of floats in one order on a CPU, that of `fold.h`: C and torch find the same bits."""

from __future__ import annotations

import torch


def folded(values: torch.Tensor) -> torch.Tensor:
    """Sum the last dimension, which stays; on a CPU its upper half onto its lower, an odd middle alone."""
    if values.device.type != "cpu":
        return values.sum(dim=-1, keepdim=True)
    width = values.shape[-1]
    while width > 1:
        half = (width + 1) // 2
        added = values[..., : width - half] + values[..., half:width]
        middle = values[..., width - half : half]
        values, width = torch.cat([added, middle], -1) if width % 2 else added, half
    return values
