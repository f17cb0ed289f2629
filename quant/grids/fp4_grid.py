"""Round to nearest in 4-bit floating point (e2m1) with block scales: NVFP4 and MXFP4."""

from __future__ import annotations

import torch

from ..base.errors import BadInput
from ..kinds.fp4.scheme import Fp4Scheme
from ..tensors.fp4 import E2M1_MAX, E8M0_BIAS, Fp4Tensor, e2m1_table, fp4_factors
from ..tensors.fp8 import E4M3_MAX
from .base import Parameters
from .scalar_grid import Affine, ScalarGrid

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


# The stored bytes of scales, ascending in value: e4m3's from the least positive to 448, E8M0's without NaN.
_BYTES = {"nvfp4": (1, 126), "mxfp4": (_LEAST_EXPONENT, _LARGEST_EXPONENT)}
# Scales that are tried around the one of the range: e4m3 has 8 in an octave, E8M0 has one.
_TRIED = {"nvfp4": range(-6, 7), "mxfp4": range(-1, 2)}
_AT_ONCE = 2**18  # weights of a search


class Fp4Grid(ScalarGrid):
    """e2m1 floats times the scale of a block.

    Its parameter is the stored scale's byte, uint8 `[out, groups]`. NVFP4's global scale is fixed before
    anything is fitted.

    Args:
        largest: the largest magnitude that NVFP4's global scale covers.
        input_scale: float32 `[1]`, for NVFP4 inputs.
    """

    def __init__(
        self,
        scheme: Fp4Scheme,
        largest: torch.Tensor | None = None,
        input_scale: torch.Tensor | None = None,
    ):
        self.scheme, self.group, self._input_scale = scheme, scheme.block_size, input_scale
        self._whole = None
        if scheme.kind == "nvfp4":
            if largest is None:
                raise ValueError("a grid of nvfp4 needs the largest weight, for its global scale")
            self._whole = global_scale_of(largest)
        self._levels = e2m1_table().unique()
        middles = (self._levels[1:] + self._levels[:-1]) / 2
        # A tie goes to the even code, which is the upper neighbour of every second middle.
        upper = torch.arange(len(middles)) % 2 == 0
        below = torch.nextafter(middles, torch.tensor(-torch.inf))
        self._bounds = torch.where(upper, below, middles)

    def fit(self, values: torch.Tensor, importance: torch.Tensor | None = None) -> Parameters:
        plain = block_scales(values.abs().amax(dim=-1), self.scheme, self._whole).view(torch.uint8)
        if importance is None:
            return (plain,)
        rows = max(1, _AT_ONCE // values[0].numel())
        parts = zip(values.split(rows), plain.split(rows), strict=True)
        return (torch.cat([self._search(part, scales, importance) for part, scales in parts]),)

    def _search(
        self, values: torch.Tensor, plain: torch.Tensor, importance: torch.Tensor
    ) -> torch.Tensor:
        """The byte of each block's scale, of those near `plain`, with the least weighted squared error."""
        best, least = plain, torch.full(plain.shape, torch.inf)
        for step in _TRIED[self.scheme.kind]:
            tried = (plain.to(torch.int16) + step).clamp_(*_BYTES[self.scheme.kind])
            scales = tried.to(torch.uint8)
            lost = self.round(values, (scales,)).sub_(values).square_().mul_(importance)
            error = lost.sum(dim=-1)
            better = error < least
            best, least = torch.where(better, scales, best), torch.where(better, error, least)
        return best

    def affine(self, parameters: Parameters) -> Affine:
        return Affine(fp4_factors(self._stored(parameters[0]), self._whole).unsqueeze(-1))

    def _stored(self, scales: torch.Tensor) -> torch.Tensor:
        return scales.view(torch.float8_e4m3fn) if self.scheme.kind == "nvfp4" else scales

    def snap(self, scaled: torch.Tensor, affine: Affine) -> None:
        scaled.copy_(self._levels[torch.bucketize(scaled, self._bounds, out_int32=True)])

    def tensor(self, values: torch.Tensor, parameters: Parameters) -> Fp4Tensor:
        codes = e2m1_codes(self.levels(values, parameters))
        scales = self._stored(parameters[0].contiguous())
        return Fp4Tensor(codes, scales, self.scheme, self._whole, self._input_scale)


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
    the reciprocal is the number itself, which moves it by at most two units in the last place.
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
