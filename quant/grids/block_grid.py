"""Rounding to ggml's blocks, with errors weighted by the importance matrix."""

from __future__ import annotations

import torch

from ..base.scheme import GgufScheme
from ..ggml.blocks import quantize_blocks
from ..tensors.gguf import GgufTensor
from .input_statistics import InputStatistics


def round_to_blocks(
    weight: torch.Tensor,
    scheme: GgufScheme,
    *,
    original: torch.Tensor,
    statistics: InputStatistics | None,
    given: torch.Tensor | None = None,
    name: str,
) -> GgufTensor:
    """Round `weight` `[out, in]`: the linear's `original`, or `original` with scaled columns.

    The importance of a column is the mean square of its input, llama.cpp's importance matrix: `given`, else
    that of the statistics.

    Raises:
        BadInput: weights too large for float16 scales.
    """
    importance = given
    if importance is None and statistics is not None and statistics.num_tokens:
        importance = statistics.gram.diagonal() / statistics.num_tokens
    if importance is not None and weight is not original:
        # Columns multiplied by a scale read inputs divided by it.
        before, after = original.square().sum(dim=0), weight.square().sum(dim=0)
        importance = torch.where(after > 0, importance * before / after, importance)
    data = quantize_blocks(weight, scheme.type, importance, name=name)
    return GgufTensor(data, scheme)
