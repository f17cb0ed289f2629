"""Row-wise int8 as in bitsandbytes' LLM.int8() (Dettmers et al., 2022, arXiv:2208.07339)."""

from __future__ import annotations

import torch

from ..base.errors import BadInput
from ..base.scheme import VectorwiseScheme
from ..tensors.vectorwise import VectorwiseTensor


def round_to_rows(
    weight: torch.Tensor, scheme: VectorwiseScheme, *, name: str = "weight"
) -> VectorwiseTensor:
    """Quantize a weight `[out, in]`: `code = round(w * 127 / absmax)` of the weight in float16.

    A row of zeros gets zero codes and absmax 0.

    Raises:
        BadInput: the weight does not fit into float16.
    """
    halves = weight.to(torch.float16).to(torch.float32)
    if not bool(torch.isfinite(halves).all()):
        raise BadInput(
            f"{name} holds values too large for float16, in which int8 rows are computed"
        )
    absmax = halves.abs().amax(dim=1)
    factors = torch.where(absmax > 0, 127.0 / absmax, 0.0)
    codes = torch.round(halves * factors.unsqueeze(1)).to(torch.int8)
    return VectorwiseTensor(codes, absmax, scheme)
