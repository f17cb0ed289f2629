"""Rounding to ggml's blocks, with errors weighted by an importance matrix."""

from __future__ import annotations

import torch

from ..ggml.blocks import quantize_blocks
from ..kinds.ggml.scheme import GgufScheme
from ..tensors.gguf import GgufTensor


def round_to_blocks(
    weight: torch.Tensor, scheme: GgufScheme, importance: torch.Tensor | None, *, name: str
) -> GgufTensor:
    """Round `weight` `[out, in]`.

    Args:
        importance: float32 `[in]`, llama.cpp's importance matrix; None: ggml's reference quantization.

    Raises:
        BadInput: weights too large for float16 scales.
    """
    return GgufTensor(quantize_blocks(weight, scheme.type, importance, name=name), scheme)
