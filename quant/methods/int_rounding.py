"""The tuned rounding and ranges of an integer weight: in C on a CPU, in torch elsewhere, to the same bits.

A weight is rounded to `s (clamp(round(w / s + v) + z) - z)`: `v` moves it by up to half a step, and the
group's range is its smallest and largest weight, each times a share between 0 and 1, which give `s` and `z`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import NamedTuple

import torch

from ...base.build import beside, fields
from ..base.device import rows_at_once
from ..base.sums import folded
from ..kinds.integer.kind import IntTensor, sequential_groups
from ..kinds.integer.scheme import IntScheme
from .sign_descent import TunedRounding

_VALUES = 2**16  # weights at a time: small enough to stay in a core's cache
_IN_C = (torch.float32, torch.bfloat16)


class _RoundingCall(ctypes.Structure):
    """`RoundingCall` of `int_rounding.c`."""

    _fields_ = [
        *fields("weights offsets scales zeros exact values slopes"),
        *fields(numbers="rows width is_bf16 threads"),
        ("largest", ctypes.c_float),
        ("rate", ctypes.c_float),
    ]


native_rounding = beside(__file__, "int_rounding.c")
"""The compiled rounding, or the reason why there is none."""


class _Grid(NamedTuple):
    """Scales and zero codes of the groups `[groups]`; `exact`: before rounding, None where it is fixed."""

    stored: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor
    exact: torch.Tensor | None


class IntRounding(TunedRounding):
    """The tuned parameters of a linear `[out, in]`; the descent begins in the ranges of `start`."""

    def __init__(
        self,
        weight: torch.Tensor,
        scheme: IntScheme,
        scale_dtype: torch.dtype,
        start: IntTensor | None = None,
    ):
        self._shape, self._scheme, self._dtype = weight.shape, scheme, scale_dtype
        size = weight.shape[1] // scheme.num_groups(weight.shape[1])
        self._groups = weight.contiguous().view(-1, size)
        low, high = self._groups.aminmax(dim=1)
        self._low, self._high = low.clamp_(max=0), high.clamp_(min=0)
        self._offset = torch.zeros_like(self._groups)
        self._low_share, self._high_share = torch.ones_like(low), torch.ones_like(high)
        if start is not None:
            self._begin(start)
        super().__init__(self._offset, self._low_share, self._high_share)

    def _begin(self, start: IntTensor) -> None:
        """Take the ranges of a rounded weight: from its lowest code to its highest."""
        scales, zeros = (part.to(torch.float32).view(-1) for part in (start.scales, start.zeros))
        if self._scheme.symmetric:  # both ends alike: the larger one stays so, and sets the scale
            ends = (torch.maximum(-self._low, self._high),) * 2
            reached = (scales * self._scheme.middle,) * 2
        else:
            ends = self._low, self._high
            reached = -zeros * scales, (self._scheme.max_code - zeros) * scales
        for share, end, code in zip(
            (self._low_share, self._high_share), ends, reached, strict=True
        ):
            share.copy_(torch.where(end == 0, 1.0, code / end).clamp_(0, 1))

    def write(self, into: torch.Tensor) -> None:
        grid = self._grid()
        if (library := self._library(into)) is not None:
            library.llmopt_round(ctypes.byref(self._call(grid, into)))
            return
        target = into.view(self._groups.shape)
        for rows in self._chunks():
            codes = self._codes(rows, grid)
            target[rows] = codes.sub_(grid.zero[rows, None]).mul_(grid.scale[rows, None])

    def descend(self, gradient: torch.Tensor, rate: float) -> None:
        """One step for the gradient of the rounded weight; `rate` in steps and in shares of the range."""
        grid = self._grid()
        if (library := self._library(gradient)) is not None:
            slopes = torch.empty(len(self._groups), 3)
            if library.llmopt_descend(ctypes.byref(self._call(grid, gradient, slopes, rate))):
                raise MemoryError(f"no memory for a group of {self._groups.shape[1]} weights")
        else:
            grouped = gradient.view(self._groups.shape)
            parts = [self._descend(rows, grid, grouped[rows], rate) for rows in self._chunks()]
            slopes = torch.cat(parts)
        self._move_ranges(slopes, rate)

    def tensor(self) -> IntTensor:
        grid = self._grid()
        codes = torch.empty(self._groups.shape, dtype=torch.uint8)
        for rows in self._chunks():
            codes[rows] = self._codes(rows, grid).to(torch.uint8)
        out_features, in_features = self._shape
        permuted = self._scheme.permuted
        return IntTensor(
            codes=codes.view(self._shape),
            scales=grid.stored.view(out_features, -1),
            zeros=grid.zero.view(out_features, -1).to(torch.uint8),
            scheme=self._scheme,
            group_index=sequential_groups(self._scheme, in_features) if permuted else None,
        )

    def _library(self, values: torch.Tensor) -> ctypes.CDLL | None:
        takes = values.device.type == "cpu" and values.dtype in _IN_C and values.is_contiguous()
        return native_rounding().library if takes else None

    def _call(
        self,
        grid: _Grid,
        values: torch.Tensor,
        slopes: torch.Tensor | None = None,
        rate: float = 0.0,
    ) -> _RoundingCall:
        parts = self._groups, self._offset, grid.scale, grid.zero, grid.exact, values, slopes
        return _RoundingCall(
            *(None if part is None else part.data_ptr() for part in parts),
            *self._groups.shape,
            values.dtype is torch.bfloat16,
            torch.get_num_threads(),
            self._scheme.max_code,
            rate,
        )

    def _chunks(self) -> Iterator[slice]:
        at_once = rows_at_once(self._groups.device, _VALUES, self._groups.shape[1])
        for start in range(0, self._groups.shape[0], at_once):
            yield slice(start, start + at_once)

    def _range(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self._low * self._low_share, self._high * self._high_share

    def _grid(self) -> _Grid:
        """Symmetric: code 0 is the larger end, as it is a step farther from zero; scales may be negative."""
        low, high = self._range()
        if self._scheme.symmetric:
            scales = torch.where(-low > high, -low, -high) / self._scheme.middle
        else:
            scales = (high - low) / self._scheme.max_code
        stored = scales.to(self._dtype)
        # An all-zero group, or one too small for the dtype, is exactly zero under any finite scale.
        stored = torch.where(stored == 0, torch.ones_like(stored), stored)
        scale = stored.to(torch.float32)
        if self._scheme.symmetric:
            return _Grid(stored, scale, torch.full_like(scale, self._scheme.middle), None)
        exact = -low / scale
        zero = torch.round(exact).clamp_(0, self._scheme.max_code)
        return _Grid(stored, scale, zero, exact)

    def _codes(self, rows: slice, grid: _Grid) -> torch.Tensor:
        steps = (self._groups[rows] / grid.scale[rows, None]).add_(self._offset[rows]).round_()
        return steps.add_(grid.zero[rows, None]).clamp_(0, self._scheme.max_code)

    def _descend(
        self, rows: slice, grid: _Grid, gradient: torch.Tensor, rate: float
    ) -> torch.Tensor:
        """Move some groups' offsets; slopes by the step, or asymmetric by values beyond either end."""
        scale, zero = grid.scale[rows, None], grid.zero[rows, None]
        slope, steps = gradient.to(torch.float32), self._groups[rows] / scale
        wanted = (steps + self._offset[rows]).round_().add_(zero)
        codes = wanted.clamp(0, self._scheme.max_code)
        inside = codes == wanted
        # d w'/d s: what rounding added to the code, and all of the code where it is clamped; there is an
        # asymmetric weight an end of the range, up to the rounding of the zero code.
        by_step, others = codes.sub_(zero).sub_(steps.mul_(inside)), ()
        if grid.exact is not None:
            by_step = torch.where(inside, by_step, grid.exact[rows, None] - zero)
            others = slope * (wanted < 0), slope * (wanted > self._scheme.max_code)
        terms = by_step * slope, *others
        sign = slope.sign().mul_(inside).mul_(scale.sign())
        self._offset[rows].sub_(sign, alpha=rate).clamp_(-0.5, 0.5)
        return torch.cat([folded(term) for term in terms], dim=1)

    def _move_ranges(self, slopes: torch.Tensor, rate: float) -> None:
        """Symmetric: only the end that sets the scale has a gradient; else weights beyond or inside both."""
        by_step, *beyond = slopes.unbind(1)
        if self._scheme.symmetric:
            low, high = self._range()
            sign, of_low = by_step.sign(), -low > high
            signs = torch.where(of_low, sign, 0.0), torch.where(of_low, 0.0, -sign)
        else:
            by_scale = by_step / self._scheme.max_code
            by_low, by_high = beyond
            ends = (self._low, by_low - by_scale), (self._high, by_high + by_scale)
            signs = ((end * slope).sign_() for end, slope in ends)
        for share, sign in zip((self._low_share, self._high_share), signs, strict=True):
            share.sub_(sign, alpha=rate).clamp_(0, 1)
