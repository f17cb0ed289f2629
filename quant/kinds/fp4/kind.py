"""4-bit floats (e2m1) with block scales, NVFP4 and MXFP4: tensor, grid, rounding, exact equivalents, kind.

Source: OCP Microscaling Formats 1.0, sections 5.3.3 and 5.4; NVIDIA's e4m3 scales with a global scale as
compressed-tensors and ModelOpt store them. MXFP4's powers of two are e4m3 scales of NVFP4, and back where
those are such powers: with a global scale of 2**8 from 2**-17 to 1, which covers most models and keeps one
global scale for linears that servers fuse; a weight beyond it gets a power of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from ....base.errors import BadInput
from ...base.scheme import E4M3_MAX
from ..base.grid import Affine, Parameters, ScalarGrid, where
from ..base.kind import Kind, Rounding
from ..base.tensor import QuantizedTensor
from .scheme import Fp4Scheme

# Sign, two bits of exponent, one of mantissa.
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1_TABLE = (*_MAGNITUDES, *(-value for value in _MAGNITUDES))
E2M1_MAX = 6.0
E8M0_BIAS = 127


def e2m1_table() -> torch.Tensor:
    return torch.tensor(E2M1_TABLE, dtype=torch.float32)


def fp4_factors(scales: torch.Tensor, global_scale: torch.Tensor | None) -> torch.Tensor:
    """Factors of blocks, float32, from stored scales: NVFP4's with a global scale, else MXFP4's exponents."""
    if global_scale is not None:
        return scales.to(torch.float32) / global_scale
    # An exponent is the exponent of a float32, in place; its 0 would be a zero there, not 2**-127.
    exponents = scales.to(torch.int32)
    powers = (exponents << 23).view(torch.float32)
    return torch.where(exponents == 0, 2.0**-E8M0_BIAS, powers)


@dataclass(frozen=True, slots=True)
class Fp4Tensor(QuantizedTensor):
    """`w = e2m1(code) * (scale / global_scale)` (NVFP4) or `e2m1(code) * 2 ** (scale - 127)` (MXFP4).

    Attributes:
        scales: `[out, in / block]`, float8_e4m3fn (NVFP4), or uint8 exponents of two (MXFP4).
        global_scale: float32 `[1]`, a divisor of the scales; NVFP4 only.
        input_scale: float32 `[1]`, the global scale of quantized inputs, a divisor too; NVFP4 W4A4 only.

    Raises:
        ValueError: shapes or dtypes disagree.
    """

    by_row: ClassVar[tuple[str, ...]] = ("codes", "scales")

    codes: torch.Tensor
    scales: torch.Tensor
    scheme: Fp4Scheme
    global_scale: torch.Tensor | None = None
    input_scale: torch.Tensor | None = None

    def __post_init__(self) -> None:
        nvidia = self.scheme.kind == "nvfp4"
        expected = torch.float8_e4m3fn if nvidia else torch.uint8
        if self.codes.dtype != torch.uint8 or self.scales.dtype != expected:
            dtypes = f"{self.codes.dtype} and {self.scales.dtype}"
            raise ValueError(f"codes are uint8 and scales {expected}, not {dtypes}")
        blocks, rest = divmod(self.in_features, self.scheme.block_size)
        if rest or tuple(self.scales.shape) != (self.out_features, blocks):
            raise ValueError(
                f"scales {tuple(self.scales.shape)} do not fit {tuple(self.codes.shape)} weights in "
                f"blocks of {self.scheme.block_size}"
            )
        if (self.global_scale is not None) != nvidia:
            raise ValueError("a global scale belongs to nvfp4, and to no other")

    def block_scales(self) -> torch.Tensor:
        return fp4_factors(self.scales, self.global_scale)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        table = e2m1_table().to(self.codes.device)
        values = table.index_select(0, self.codes.flatten().to(torch.int32))
        blocks = values.view(self.out_features, -1, self.scheme.block_size)
        return blocks.mul_(self.block_scales().unsqueeze(-1)).view(self.shape).to(dtype)

    def forms(self) -> Iterator[Fp4Tensor]:
        yield self
        exact = {MXFP4: _as_nvfp4, NVFP4: _as_mxfp4}.get(self.scheme)
        if exact is not None and (other := exact(self)) is not None:
            yield other

    def stored_as(
        self, dtype_of: Callable[[torch.dtype], torch.dtype] | None, inverts: bool
    ) -> Fp4Tensor:
        # As in compressed-tensors' converter.
        wholes = (
            {"global_scale": self.global_scale, "input_scale": self.input_scale} if inverts else {}
        )
        stored = {name: invertible(scale) for name, scale in wholes.items() if scale is not None}
        return replace(self, **stored)


# The least positive e4m3 value: a block whose scale would round to 0 keeps what that one resolves.
_LEAST_SCALE = 2.0**-9
_LEAST_EXPONENT, _LARGEST_EXPONENT = 0, 254  # 255 is NaN in E8M0
# Bounds between neighbouring magnitudes; ties go to the even code, so every second bound is rounded up.
_BOUNDS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
# The stored bytes of scales, ascending in value: e4m3's from the least positive to 448, E8M0's without NaN.
_BYTES = {"nvfp4": (1, 126), "mxfp4": (_LEAST_EXPONENT, _LARGEST_EXPONENT)}
# Scales that are tried around the one of the range: e4m3 has 8 in an octave, E8M0 has one.
_TRIED = {"nvfp4": range(-6, 7), "mxfp4": range(-1, 2)}
_AT_ONCE = 2**18  # weights of a search


class Fp4Grid(ScalarGrid):
    """e2m1 floats times a block's scale: a stored byte, uint8 `[out, groups]`; the global scale is fixed."""

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
        best = torch.full(plain.shape, torch.inf), plain
        for step in _TRIED[self.scheme.kind]:
            tried = (plain.to(torch.int16) + step).clamp_(*_BYTES[self.scheme.kind])
            scales = tried.to(torch.uint8)
            lost = self.round(values, (scales,)).sub_(values).square_().mul_(importance)
            error = lost.sum(dim=-1)
            best = where(error < best[0], (error, scales), best)
        return best[1]

    def affine(self, parameters: Parameters) -> Affine:
        return Affine(fp4_factors(self._stored(parameters[0]), self._whole).unsqueeze(-1))

    def _stored(self, scales: torch.Tensor) -> torch.Tensor:
        return scales.view(torch.float8_e4m3fn) if self.scheme.kind == "nvfp4" else scales

    def snap(self, scaled: torch.Tensor, affine: Affine) -> None:
        scaled.copy_(self._levels[torch.bucketize(scaled, self._bounds, out_int32=True)])

    def coded(self, levels: torch.Tensor, parameters: Parameters) -> Fp4Tensor:
        scales = self._stored(parameters[0].contiguous())
        return Fp4Tensor(e2m1_codes(levels), scales, self.scheme, self._whole, self._input_scale)


def e2m1_codes(values: torch.Tensor) -> torch.Tensor:
    """Codes (uint8) of the nearest e2m1 floats, ties to even; beyond ±6 they saturate; -0 has a sign."""
    magnitudes = values.abs()
    codes = torch.signbit(values).to(torch.uint8) << 3
    for index, bound in enumerate(_BOUNDS):
        codes += magnitudes >= bound if index % 2 else magnitudes > bound
    return codes


def global_scale_of(largest: torch.Tensor) -> torch.Tensor:
    """NVFP4's float32 `[1]` global scale: 448 · 6 over the largest magnitude (1 for zeros), invertible."""
    scale = E4M3_MAX * E2M1_MAX / largest.to(torch.float32).clamp(min=2.0**-100)
    return invertible(torch.where(largest > 0, scale, 1.0).view(1))


def invertible(scale: torch.Tensor) -> torch.Tensor:
    """The nearest float32 whose reciprocal has it as its own reciprocal."""
    return 1 / (1 / scale)


def block_scales(
    largest: torch.Tensor, scheme: Fp4Scheme, whole: torch.Tensor | None
) -> torch.Tensor:
    if scheme.kind == "nvfp4":
        assert whole is not None
        scales = (whole * (largest / E2M1_MAX)).clamp(_LEAST_SCALE, E4M3_MAX)
        return scales.to(torch.float8_e4m3fn)
    # 7 is in the middle between 6 and 8: from 1.75 · 2ⁿ on, the largest counts as 2ⁿ⁺¹.
    mantissas, exponents = torch.frexp(largest)  # 0.5 <= mantissa < 1
    powers = exponents - 1 + (mantissas >= 0.875).to(exponents.dtype)
    stored = (powers - 2 + E8M0_BIAS).clamp(_LEAST_EXPONENT, _LARGEST_EXPONENT)
    return torch.where(largest > 0, stored, E8M0_BIAS).to(torch.uint8)


NVFP4, MXFP4 = Fp4Scheme("nvfp4"), Fp4Scheme("mxfp4")
_LEAST, _LARGEST = -9, 8  # exponents of e4m3's powers of two
_GLOBAL_EXPONENT = 8
_MAGNITUDE = 7  # bits of a code without its sign


def _as_nvfp4(tensor: Fp4Tensor) -> Fp4Tensor | None:
    """Each block as two of half the width; None where the exponents span more than e4m3's."""
    exponents = tensor.scales.to(torch.int32) - E8M0_BIAS
    nonzero = _not_zero(tensor)
    used = exponents[nonzero]
    least, largest = (int(used.min()), int(used.max())) if len(used) else (0, 0)
    shift = _GLOBAL_EXPONENT
    if largest + shift > _LARGEST or least + shift < _LEAST:
        shift = _LARGEST - largest
    if least + shift < _LEAST or not -E8M0_BIAS < shift <= E8M0_BIAS:
        return None
    powers = torch.exp2((exponents + shift).clamp(_LEAST, _LARGEST).to(torch.float32))
    scales = powers.repeat_interleave(MXFP4.block_size // NVFP4.block_size, dim=1)
    whole = torch.tensor([2.0**shift])
    return Fp4Tensor(tensor.codes, scales.to(torch.float8_e4m3fn), NVFP4, global_scale=whole)


def _as_mxfp4(tensor: Fp4Tensor) -> Fp4Tensor | None:
    """Neighbouring blocks as one; None where two differ, or a scale is no power of two."""
    pair = MXFP4.block_size // NVFP4.block_size
    if tensor.in_features % MXFP4.block_size:
        return None
    mantissas, exponents = torch.frexp(tensor.block_scales())
    nonzero = _not_zero(tensor)
    if bool((mantissas[nonzero] != 0.5).any()):
        return None
    # A block of zeros takes any exponent, so its neighbour's.
    biased = (exponents - 1 + E8M0_BIAS).to(torch.int32).masked_fill(~nonzero, -1)
    pairs = biased.view(tensor.out_features, -1, pair)
    both = pairs.amax(dim=-1)
    if bool(((pairs != both[..., None]) & (pairs >= 0)).any()):
        return None
    if bool((both > 2 * E8M0_BIAS).any()):
        return None
    return Fp4Tensor(tensor.codes, both.clamp(min=0).to(torch.uint8), MXFP4)


def _not_zero(tensor: Fp4Tensor) -> torch.Tensor:
    blocks = (tensor.codes & _MAGNITUDE).view(*tensor.scales.shape, -1)
    return (blocks != 0).any(dim=-1)


class Fp4Kind(Kind[Fp4Scheme]):
    """NVFP4 and MXFP4."""

    def blank(self, out_features: int, in_features: int, scale_dtype: torch.dtype) -> Fp4Tensor:
        nvidia = self.scheme.kind == "nvfp4"
        blocks = torch.ones(out_features, in_features // self.scheme.block_size)
        return Fp4Tensor(
            torch.zeros(out_features, in_features, dtype=torch.uint8),
            blocks.to(torch.float8_e4m3fn if nvidia else torch.uint8),
            self.scheme,
            torch.ones(1) if nvidia else None,
            torch.ones(1) if self.scheme.has_static_inputs else None,
        )

    def rounded(self, weight: torch.Tensor, how: Rounding) -> Fp4Tensor:
        (out_features, in_features), scheme = weight.shape, self.scheme
        if in_features % scheme.block_size:
            raise BadInput(
                f"{how.name} has {in_features} inputs, and {scheme.kind} takes multiples of "
                f"{scheme.block_size}"
            )
        blocks = weight.to(torch.float32).view(out_features, -1, scheme.block_size)
        largest, whole = blocks.abs().amax(dim=-1), None
        if scheme.kind == "nvfp4":
            whole = global_scale_of(largest.max() if how.largest is None else how.largest)
        scales = block_scales(largest, scheme, whole)
        codes = e2m1_codes(blocks / fp4_factors(scales, whole).unsqueeze(-1))
        return Fp4Tensor(codes.view(weight.shape), scales, scheme, whole, how.input_scale)

    def grid_for(self, shape: tuple[int, ...], how: Rounding) -> Fp4Grid:
        return Fp4Grid(self.scheme, how.largest, how.input_scale)


KIND = Fp4Kind
