"""Exact equivalents of 4-bit floats: MXFP4's powers of two are NVFP4's e4m3 scales, and back where they are
such powers.

e4m3 holds the powers from 2**-9 to 2**8. With a global scale of 2**8 these are MXFP4's scales from 2**-17 to
1, which covers most models, and keeps one global scale for linears that servers fuse (q/k/v, gate/up); a
weight beyond it gets a power of its own.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ..kinds.fp4.scheme import Fp4Scheme
from ..tensors.fp4 import E8M0_BIAS, Fp4Tensor

NVFP4, MXFP4 = Fp4Scheme("nvfp4"), Fp4Scheme("mxfp4")
_LEAST, _LARGEST = -9, 8  # exponents of e4m3's powers of two
_GLOBAL_EXPONENT = 8
_MAGNITUDE = 7  # bits of a code without its sign


def fp4_forms(tensor: Fp4Tensor) -> Iterator[Fp4Tensor]:
    """`tensor` and its equivalent of the other kind, where there is one."""
    yield tensor
    if tensor.scheme == MXFP4:
        other = _as_nvfp4(tensor)
    else:
        other = _as_mxfp4(tensor) if tensor.scheme == NVFP4 else None
    if other is not None:
        yield other


def _as_nvfp4(tensor: Fp4Tensor) -> Fp4Tensor | None:
    """Each block as two of half the width; None where the exponents span more than e4m3's."""
    exponents = tensor.scales.to(torch.int32) - E8M0_BIAS
    held = _not_zero(tensor)
    used = exponents[held]
    least, largest = (int(used.min()), int(used.max())) if len(used) else (0, 0)
    shift = _GLOBAL_EXPONENT
    if largest + shift > _LARGEST or least + shift < _LEAST:
        shift = _LARGEST - largest
    if least + shift < _LEAST or not -E8M0_BIAS < shift <= E8M0_BIAS:
        return None
    powers = torch.exp2((exponents + shift).clamp(_LEAST, _LARGEST).to(torch.float32))
    scales = powers.repeat_interleave(MXFP4.block_size // NVFP4.block_size, dim=1)
    return Fp4Tensor(
        tensor.codes,
        scales.to(torch.float8_e4m3fn),
        NVFP4,
        global_scale=torch.tensor([2.0**shift]),
    )


def _as_mxfp4(tensor: Fp4Tensor) -> Fp4Tensor | None:
    """Neighbouring blocks as one; None where two differ, or a scale is no power of two."""
    pair = MXFP4.block_size // NVFP4.block_size
    if tensor.in_features % MXFP4.block_size:
        return None
    mantissas, exponents = torch.frexp(tensor.block_scales())
    held = _not_zero(tensor)
    if bool((mantissas[held] != 0.5).any()):
        return None
    # A block of zeros takes any exponent, so its neighbour's.
    biased = (exponents - 1 + E8M0_BIAS).to(torch.int32).masked_fill(~held, -1)
    pairs = biased.view(tensor.out_features, -1, pair)
    both = pairs.amax(dim=-1)
    if bool(((pairs != both[..., None]) & (pairs >= 0)).any()):
        return None
    if bool((both > 2 * E8M0_BIAS).any()):
        return None
    return Fp4Tensor(tensor.codes, both.clamp(min=0).to(torch.uint8), MXFP4)


def _not_zero(tensor: Fp4Tensor) -> torch.Tensor:
    """Blocks with a weight that is not zero, bool `[out, in / block]`."""
    blocks = (tensor.codes & _MAGNITUDE).view(*tensor.scales.shape, -1)
    return (blocks != 0).any(dim=-1)
