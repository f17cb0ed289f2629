"""The noise of trellis codes without their search: normal, behind the transforms of the weight.

What is left to quantize behind the transforms is nearly normal, so that the error of its nearest paths has
one mean square for each width, and passes the transforms back as if it were noise. A search over widths takes
it in place of the codes, which would cost as much as the quantization for every width.
"""

from __future__ import annotations

import zlib

import torch

from ..kinds.trellis.scheme import TrellisScheme
from .trellis_grid import TrellisGrid

# Mean squared error of the nearest paths, of the mean square of the weights behind the transforms, by bits
# (mul1; tests/quant/grids/test_trellis_noise.py searches for them).
_ERRORS = (0.271, 0.0688, 0.0176, 0.00462, 0.00121, 3.24e-4, 9.31e-5, 2.74e-5)


def noisy(weight: torch.Tensor, scheme: TrellisScheme, name: str) -> torch.Tensor:
    """The weight `[out, in]` with noise as large as the error of its nearest paths; the same for a name.

    Raises:
        BadInput: a width that the transforms' blocks do not divide.
    """
    transforms = TrellisGrid.of(weight, scheme, name).transforms
    values = transforms.forward(weight)
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    noise = torch.randn(values.shape, generator=generator, device=generator.device).to(values)
    deviation = (_ERRORS[scheme.bits - 1] * values.square().mean()).sqrt()
    return transforms.backward(values + noise * deviation)
