"""Trial of the kernels for a mixture of experts: on the experts themselves, with random routing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..common.verdicts import Trial, tolerance
from .experts import RoutedExpert

TOKENS = 20


def experts_trial(
    experts: Sequence[RoutedExpert],
    inputs: int,
    top_k: int,
    device: torch.device,
    dtype: torch.dtype,
    *,
    on_inputs: bool,
) -> Trial[Any]:
    """All experts of a layer, in one process.

    Nothing is timed: what runs one expert after the other waits for the device in every layer.
    """
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(TOKENS, inputs, generator=generator).to(device, dtype)
    scores = torch.rand(TOKENS, len(experts), generator=generator)
    weights, ids = scores.softmax(dim=1).topk(top_k, dim=1)
    routing = x, weights.to(device), ids.to(device)

    def compute(make: Any) -> list[torch.Tensor]:
        return [make(experts, range(len(experts)), len(experts), on_inputs)(*routing)]

    return Trial(compute, tolerance(dtype, quantizes_inputs=True))
