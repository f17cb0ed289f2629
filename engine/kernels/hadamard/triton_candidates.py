"""When Triton's kernels for trellis and E8P codes can serve, and how the dispatch table makes them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ....quant.base.scheme import Scheme
from ....quant.kinds.base.tensor import QuantizedTensor
from ....quant.kinds.e8p.scheme import E8pScheme
from ....quant.kinds.trellis.scheme import TrellisScheme
from ..common.runtime import refuses_rows

if TYPE_CHECKING:
    from .triton_linear import TritonTransformedLinear


def refuses_triton_codes(device: str, dtype: torch.dtype, scheme: Scheme) -> str | None:
    """The reason why a linear's codes are not decoded in Triton, or None."""
    if not isinstance(scheme, TrellisScheme | E8pScheme):
        return f"it is for trellis and E8P codes, not {scheme.label}"
    return refuses_rows(device, dtype)


def triton_codes(weight: QuantizedTensor, dtype: torch.dtype) -> TritonTransformedLinear:
    """A `TritonTransformedLinear`; Triton is imported where it is made."""
    from .triton_linear import TritonTransformedLinear

    return TritonTransformedLinear(weight, dtype)
