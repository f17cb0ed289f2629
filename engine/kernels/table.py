"""The kernel table of a machine, for `llmopt doctor`."""

from __future__ import annotations

import torch

from ...quant.scheme import IntScheme
from .dispatch import Choice
from .linear import LINEAR, LinearSituation
from .paged_attention import PAGED_ATTENTION, AttentionSituation
from .quantized_linear import QUANTIZED_LINEAR, QuantizedLinearSituation


def table(device: torch.device, dtype: torch.dtype) -> list[Choice]:
    """The choices on `device` for a typical decoder in `dtype`, for `llmopt doctor`."""
    choices = [
        PAGED_ATTENTION.explain(AttentionSituation(device.type, dtype, head_dim=128)),
        LINEAR.explain(LinearSituation(device.type, dtype, 4096, 4096)),
    ]
    for scheme in (IntScheme(4, 128, False), IntScheme(4, 128, True), IntScheme(8, -1, True)):
        situation = QuantizedLinearSituation(device.type, dtype, 4096, 4096, scheme)
        choices.append(QUANTIZED_LINEAR.explain(situation))
    return choices
