"""Plain rounding to any grid: the last step of every method, and the yardstick of all of them."""

from __future__ import annotations

import torch

from ..errors import BadInput
from ..scheme import IntScheme
from ..tensors.base import QuantizedTensor
from .base import LayerProblem
from .int_grid import round_to_nearest


def round_weight(problem: LayerProblem, linear: str, weight: torch.Tensor) -> QuantizedTensor:
    """Round `weight` `[out, in]`, which may be a scaled form of the linear's own, to the linear's scheme.

    Raises:
        BadInput: NaN or infinite weights, scales beyond their dtype, or a scheme without a rounding.
    """
    scheme, module = problem.schemes[linear], f"{problem.prefix}.{linear}"
    if isinstance(scheme, IntScheme):
        return round_to_nearest(weight, scheme, problem.scale_dtypes[linear], name=module)
    raise BadInput(f"{module}: no method here rounds to {scheme.label}")
