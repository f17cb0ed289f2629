"""Round to nearest in 4-bit floating point (e2m1) with block scales: NVFP4 and MXFP4."""

from __future__ import annotations

import torch

from ..base.errors import BadInput
from ..base.scheme import Fp4Scheme
from ..tensors.fp4 import E2M1_MAX, E8M0_BIAS, Fp4Tensor, fp4_factors
from ..tensors.fp8 import E4M3_MAX

# The least positive e4m3 value: a block whose scale would round to 0 keeps what that one resolves.
_LEAST_SCALE = 2.0**-9
_LEAST_EXPONENT, _LARGEST_EXPONENT = 0, 254  # 255 is NaN in E8M0
# Bounds between neighbouring magnitudes, and whether the bound is rounded up: ties go to the even code.
_BOUNDS = (
    (0.25, False),
    (0.75, True),
    (1.25, False),
    (1.75, True),
    (2.5, False),
    (3.5, True),
    (5.0, False),
)


def e2m1_codes(values: torch.Tensor) -> torch.Tensor:
    """Codes (uint8) of the nearest e2m1 floats, ties to even; beyond ±6 they saturate; -0 has a sign."""
    magnitudes = values.abs()
    codes = torch.signbit(values).to(torch.uint8) << 3
    for bound, takes_tie in _BOUNDS:
        codes += magnitudes >= bound if takes_tie else magnitudes > bound
    return codes


def global_scale_of(largest: torch.Tensor) -> torch.Tensor:
    """NVFP4's float32 `[1]` global scale, a divisor: 448 · 6 over the largest magnitude; 1 for zeros.

    compressed-tensors stores this number, ModelOpt its reciprocal. It is rounded so that the reciprocal of
    the reciprocal is the number itself, which costs at most its last bit.
    """
    scale = E4M3_MAX * E2M1_MAX / largest.to(torch.float32).clamp(min=2.0**-100)
    return invertible(torch.where(largest > 0, scale, 1.0).view(1))


def invertible(scale: torch.Tensor) -> torch.Tensor:
    """The nearest float32 whose reciprocal has it as its own reciprocal."""
    return 1 / (1 / scale)


def block_scales(
    largest: torch.Tensor, scheme: Fp4Scheme, whole: torch.Tensor | None
) -> torch.Tensor:
    """Stored scales of blocks from their largest magnitudes, float32 of any shape.

    NVFP4: `e4m3(whole * largest / 6)`. MXFP4: the exponent of the power of two that maps the largest to
    4..6, compressed-tensors' rule: a largest magnitude that would round up to 8 takes the next power.

    Args:
        whole: NVFP4's global scale.
    """
    if scheme.kind == "nvfp4":
        assert whole is not None
        scales = (whole * (largest / E2M1_MAX)).clamp(_LEAST_SCALE, E4M3_MAX)
        return scales.to(torch.float8_e4m3fn)
    # 7 is in the middle between 6 and 8: from 1.75 · 2ⁿ on, the largest counts as 2ⁿ⁺¹.
    mantissas, exponents = torch.frexp(largest)  # 0.5 <= mantissa < 1
    powers = exponents - 1 + (mantissas >= 0.875).to(exponents.dtype)
    stored = (powers - 2 + E8M0_BIAS).clamp(_LEAST_EXPONENT, _LARGEST_EXPONENT)
    return torch.where(largest > 0, stored, E8M0_BIAS).to(torch.uint8)


def round_to_fp4(
    weight: torch.Tensor,
    scheme: Fp4Scheme,
    *,
    largest: torch.Tensor | None = None,
    input_scale: torch.Tensor | None = None,
    name: str = "weight",
) -> Fp4Tensor:
    """Data-free quantization (RTN) of a weight `[out, in]`.

    Args:
        largest: the largest magnitude that NVFP4's global scale covers, of all weights that servers fuse with
            this one; None: of this weight.
        input_scale: float32 `[1]`, for NVFP4 inputs.
        name: the weight's name in error messages.

    Raises:
        BadInput: the rows are no whole blocks.
    """
    out_features, in_features = weight.shape
    if in_features % scheme.block_size:
        raise BadInput(
            f"{name} has {in_features} inputs, and {scheme.kind} takes multiples of {scheme.block_size}"
        )
    blocks = weight.to(torch.float32).view(out_features, -1, scheme.block_size)
    largest_of_block = blocks.abs().amax(dim=-1)
    whole = None
    if scheme.kind == "nvfp4":
        whole = global_scale_of(largest_of_block.max() if largest is None else largest)
    scales = block_scales(largest_of_block, scheme, whole)
    codes = e2m1_codes(blocks / fp4_factors(scales, whole).unsqueeze(-1))
    return Fp4Tensor(codes.view(weight.shape), scales, scheme, whole, input_scale)
