"""Causal depthwise convolution over tokens, whose state is the window of the last inputs.

    out[t, c] = bias[c] + sum over k of weight[c, k] * x[t - kernel + 1 + k, c]

Inputs before a sequence's first token are zeros. The state is the window of the newest token: its inputs and
those of the `kernel - 1` tokens before it. Sums are float32.
"""

from __future__ import annotations

import torch
from torch.nn import functional


def causal_conv(
    x: torch.Tensor, window: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Consecutive tokens of one sequence, at once.

    Args:
        x: [tokens, channels].
        window: [channels, kernel], before these tokens.
        weight: [channels, kernel]; `bias` is [channels] or None.

    Returns:
        [tokens, channels] in x's dtype, and the window after them.
    """
    kernel = window.shape[1]
    inputs = torch.cat([window.to(x.dtype), x.T], dim=1)
    out = functional.conv1d(inputs[None, :, 1:], weight[:, None], bias, groups=len(weight))
    return out[0].T, inputs[:, -kernel:]


def causal_conv_step(
    x: torch.Tensor, windows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The next token of each sequence: x [sequences, channels], windows [sequences, channels, kernel]."""
    windows = torch.cat([windows[:, :, 1:].to(x.dtype), x[:, :, None]], dim=2)
    out = (windows.float() * weight.float()).sum(dim=-1)
    out = out if bias is None else out + bias.float()
    return out.to(x.dtype), windows
