"""RMS norms of a recurrence's output with a gate: before it (delta net) or after it (Mamba 2), in float32."""

from __future__ import annotations

import torch
from torch.nn import functional


def norm_then_gate(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """`rms_norm(x) * silu(gate)` of each head: x and gate [tokens, heads, size], weight [size].

    Returns the gate's dtype.
    """
    normed = functional.rms_norm(x.float(), weight.shape, weight.float(), eps)
    return (normed * functional.silu(gate.float())).to(gate.dtype)


def gate_then_norm(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """`rms_norm(x * silu(gate))` of each group: x and gate [tokens, width], weight [groups, width / groups].

    Returns the gate's dtype.
    """
    gated = (x.float() * functional.silu(gate.float())).unflatten(-1, weight.shape)
    normed = functional.rms_norm(gated, weight.shape[-1:], None, eps) * weight.float()
    return normed.flatten(-2).to(gate.dtype)
