"""Integers on a uniform grid: tensor, scales and zero points of groups, round-to-nearest (RTN), and kind."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from ...base.device import rows_at_once
from ..base.grid import Affine, Parameters, where
from ..base.kind import Kind, Rounding
from ..base.ranged import Line, RangedGrid
from ..base.tensor import QuantizedTensor
from .scheme import IntScheme


@dataclass(frozen=True, slots=True)
class IntTensor(QuantizedTensor):
    """The weight of one linear layer as integer codes: `w = (code - zero) * scale`.

    Attributes:
        scales: `[out, groups]` in the dtype that is stored (float16, bfloat16 or float32).
        zeros: uint8 `[out, groups]`; all `2**(bits-1)` in a symmetric scheme.
        group_index: int32 `[in]`, the group of each input channel, where the scheme is permuted.
        input_scale: float32 `[1]`, where the scheme has static activations.

    Raises:
        ValueError: the parts disagree in shape or dtype, or with the scheme.
    """

    has_open_dtype: ClassVar[bool] = True
    by_row: ClassVar[tuple[str, ...]] = ("codes", "scales", "zeros")

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor
    scheme: IntScheme
    group_index: torch.Tensor | None = None
    input_scale: torch.Tensor | None = None

    def __post_init__(self) -> None:
        if self.codes.dtype != torch.uint8 or self.zeros.dtype != torch.uint8:
            dtypes = f"{self.codes.dtype}/{self.zeros.dtype}"
            raise ValueError(f"codes and zeros are uint8, not {dtypes}")
        expected = (self.out_features, self.scheme.num_groups(self.in_features))
        for name, tensor in (("scales", self.scales), ("zeros", self.zeros)):
            if tuple(tensor.shape) != expected:
                raise ValueError(f"{name} have shape {tuple(tensor.shape)}, expected {expected}")
        if (self.group_index is not None) != self.scheme.permuted:
            raise ValueError("a group index belongs to a permuted scheme, and to no other")

    @property
    def num_groups(self) -> int:
        return self.scales.shape[1]

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        scales, zeros = self.scales.to(torch.float32), self.zeros.to(torch.float32)
        if self.group_index is not None:
            index = self.group_index.long()
            weight = self.codes.to(torch.float32).sub_(zeros[:, index]).mul_(scales[:, index])
            return weight.to(dtype)
        grouped = self.codes.view(self.out_features, self.num_groups, -1).to(torch.float32)
        weight = grouped.sub_(zeros.unsqueeze(-1)).mul_(scales.unsqueeze(-1))
        return weight.view(self.shape).to(dtype)

    def forms(self) -> Iterator[IntTensor]:
        yield self
        plain = self
        if self.group_index is not None:
            order = sequential_groups(self.scheme, self.in_features)
            if torch.equal(self.group_index, order):
                scheme = replace(self.scheme, permuted=False)
                plain = replace(self, group_index=None, scheme=scheme)
        yield plain
        scheme = plain.scheme
        if scheme.symmetric:
            yield replace(plain, scheme=replace(scheme, symmetric=False))
        elif bool((plain.zeros == scheme.middle).all()):
            yield replace(plain, scheme=replace(scheme, symmetric=True))


Pair = tuple[torch.Tensor, torch.Tensor]
_SEARCH_STEPS = 80  # of 1 %, as in the search of GPTQ's code
_SEARCH_NORM = 2.4  # the default there
_SEARCH_VALUES = 2**16  # weights per chunk of the search: small enough to stay in a core's cache


class IntGrid(RangedGrid):
    """Uniform integers: stored scales and zero codes (uint8) `[out, groups]`; `mse` as in `Rounding`."""

    def __init__(
        self,
        scheme: IntScheme,
        in_features: int,
        scale_dtype: torch.dtype,
        *,
        input_scale: torch.Tensor | None = None,
        mse: bool = False,
    ):
        self.scheme, self.scale_dtype, self.two_ends = scheme, scale_dtype, not scheme.symmetric
        self.group = in_features // scheme.num_groups(in_features)
        self._mse, self._input_scale = mse, input_scale

    def fit(self, values: torch.Tensor, importance: torch.Tensor | None = None) -> Parameters:
        if self._mse and importance is None:
            return search_ranges(values, self.scheme, self.scale_dtype)
        return super().fit(values, importance)

    def ranges(self, low: torch.Tensor, high: torch.Tensor) -> Parameters:
        return range_grid(low, high, self.scheme, self.scale_dtype)

    def refitted(self, line: Line, parameters: Parameters) -> Parameters:
        scales, zeros = (part.to(torch.float32) for part in parameters)
        scales = line.slope(scales)
        if not self.scheme.symmetric:  # the zero is rounded to a code
            zeros = zeros - line.offset(scales, torch.zeros_like(zeros)) / scales
        stored = scales.to(self.scale_dtype)
        usable = torch.isfinite(stored) & (stored > 0)
        zeros = zeros.round_().clamp_(0, self.scheme.max_code).to(torch.uint8)
        return torch.where(usable, stored, parameters[0]), zeros

    def affine(self, parameters: Parameters) -> Affine:
        scales, zeros = parameters
        step = scales.to(torch.float32).unsqueeze(-1)
        if self.scheme.symmetric:
            middle = self.scheme.middle
            return Affine(step, None, -middle, self.scheme.max_code - middle)
        zero = zeros.to(torch.float32).unsqueeze(-1)
        return Affine(step, None, -zero, self.scheme.max_code - zero)

    def coded(self, levels: torch.Tensor, parameters: Parameters) -> IntTensor:
        (scales, zeros), scheme = parameters, self.scheme
        grouped = levels.view(*zeros.shape, -1).add_(zeros.to(torch.float32).unsqueeze(-1))
        codes = grouped.to(torch.uint8).view(levels.shape)
        index = sequential_groups(scheme, levels.shape[1]) if scheme.permuted else None
        return IntTensor(codes, scales, zeros, scheme, index, self._input_scale)


def range_grid(
    low: torch.Tensor, high: torch.Tensor, scheme: IntScheme, dtype: torch.dtype
) -> Pair:
    """Scales in `dtype` and zeros uint8 of groups, from their smallest and largest weights, float32.
    Symmetric: `scale = max|w| / ((2**b - 1) / 2)`, as in compressed-tensors. Asymmetric: `scale = (max - min)
    / (2**b - 1)` with 0 inside the range, `zero = round(-min / scale)`, by the rounded scale."""
    if scheme.symmetric:
        scales = torch.maximum(-low, high) / (scheme.max_code / 2)
    else:
        low, high = low.clamp(max=0), high.clamp(min=0)
        scales = (high - low) / scheme.max_code
    scales = scales.to(dtype)
    # An all-zero group, or one too small for `dtype`, is exactly zero under any finite scale.
    scales = torch.where(scales == 0, torch.ones_like(scales), scales)
    if scheme.symmetric:
        zeros = torch.full_like(low, scheme.middle)
    else:
        zeros = torch.round(-low / scales.to(torch.float32)).clamp(0, scheme.max_code)
    return scales, zeros.to(torch.uint8)


def search_ranges(grouped: torch.Tensor, scheme: IntScheme, dtype: torch.dtype) -> Pair:
    """`range_grid` clipped to the least `sum |w - w'|**2.4`, down to a fifth in steps of 1/100 (GPTQ)."""
    shape, flat = grouped.shape[:-1], grouped.reshape(-1, grouped.shape[-1])
    at_once = rows_at_once(flat.device, _SEARCH_VALUES, flat.shape[1])
    parts = [_search(part, scheme, dtype) for part in flat.split(at_once)]
    scales, zeros = (torch.cat(column) for column in zip(*parts, strict=True))
    return scales.view(shape), zeros.view(shape)


def _search(groups: torch.Tensor, scheme: IntScheme, dtype: torch.dtype) -> Pair:
    low, high = groups.aminmax(dim=-1)
    best = torch.full_like(low, torch.inf), *range_grid(low, high, scheme, dtype)
    for step in range(_SEARCH_STEPS):
        share = 1 - step / 100
        scales, zeros = range_grid(low * share, high * share, scheme, dtype)
        step_size, zero = (part.to(torch.float32).unsqueeze(-1) for part in (scales, zeros))
        rounded = (groups / step_size).round_().add_(zero).clamp_(0, scheme.max_code)
        lost = rounded.sub_(zero).mul_(step_size).sub_(groups).abs_().pow_(_SEARCH_NORM)
        error = lost.sum(dim=-1)
        best = where(error < best[0], (error, scales, zeros), best)
    return best[1], best[2]


def sequential_groups(scheme: IntScheme, in_features: int) -> torch.Tensor:
    """int32 `[in]`: the group of each input channel, for consecutive groups."""
    size = in_features // scheme.num_groups(in_features)
    return (torch.arange(in_features) // size).to(torch.int32)


class IntKind(Kind[IntScheme]):
    """Integers, whose ranges are the plain ones, searched by importance, or searched by GPTQ's `mse`."""

    def blank(self, out_features: int, in_features: int, scale_dtype: torch.dtype) -> IntTensor:
        groups = self.scheme.num_groups(in_features)
        index = sequential_groups(self.scheme, in_features) if self.scheme.permuted else None
        return IntTensor(
            codes=torch.zeros(out_features, in_features, dtype=torch.uint8),
            scales=torch.ones(out_features, groups, dtype=scale_dtype),
            zeros=torch.full((out_features, groups), self.scheme.middle, dtype=torch.uint8),
            scheme=self.scheme,
            group_index=index,
            input_scale=torch.ones(1) if self.scheme.has_static_inputs else None,
        )

    def grid_for(self, shape: tuple[int, ...], how: Rounding) -> IntGrid:
        return IntGrid(
            self.scheme, shape[1], how.scale_dtype, input_scale=how.input_scale, mse=how.mse
        )


def round_to_nearest(
    weight: torch.Tensor, scheme: IntScheme, scale_dtype: torch.dtype, *, name: str = "weight"
) -> IntTensor:
    tensor = IntKind(scheme).round(weight, scale_dtype, name=name)
    assert isinstance(tensor, IntTensor)
    return tensor


KIND = IntKind
