"""GPTQ's column loop: round input channels one by one, each corrected by error feedback.

Weights are held transposed, `[in, out]`: a channel is then contiguous, and all linears with
the same input are concatenated. Corrections are applied lazily on three levels (GPTQ's lazy batch updates): a
span of channels by one GEMM with all earlier errors, a leaf of a few channels by one with the span's errors,
and a single channel by one with the leaf's. Nearly all the time goes into the first.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..base.scheme import IntScheme
from ..tensors.integer import IntTensor
from .gptq_feedback import Feedback

_SPAN = 256
_LEAF = 32

Ranges = Callable[[torch.Tensor, IntScheme, torch.dtype], tuple[torch.Tensor, torch.Tensor]]
"""Scales in a dtype, and zeros, of groups `[..., group_size]`; see `int_grid.group_ranges`."""


def solve(
    weight: torch.Tensor,
    feedback: Feedback,
    scheme: IntScheme,
    scale_dtype: torch.dtype,
    ranges: Ranges,
    *,
    static_groups: bool,
) -> IntTensor | None:
    """Quantize a weight `[out, in]` of linears that share their input; None if an error overflows.

    Args:
        weight: float32; not modified.
        ranges: computes scale and zero point of groups.
        static_groups: whether grids are computed upfront from the original weight, with sequential groups.
            Otherwise a group is the next `group_size` channels in rounding order, and its grid is fitted
            to the corrected weights.
    """
    return _Solver(weight, feedback, scheme, scale_dtype, ranges, static_groups).run()


class _Solver:
    def __init__(
        self,
        weight: torch.Tensor,
        feedback: Feedback,
        scheme: IntScheme,
        scale_dtype: torch.dtype,
        ranges: Ranges,
        static_groups: bool,
    ):
        out_features, in_features = weight.shape
        self.scheme, self.scale_dtype, self.ranges = scheme, scale_dtype, ranges
        self.feedback = feedback
        self.group_size = in_features // scheme.num_groups(in_features)
        # A single group is independent of the order.
        self.static = static_groups or self.group_size == in_features
        self.weight = weight.T.contiguous().index_select(0, feedback.channels)
        self.error = torch.empty_like(self.weight)
        self.codes = torch.empty(in_features, out_features, dtype=torch.uint8)

        num_groups = in_features // self.group_size
        self.scales = torch.empty(num_groups, out_features, dtype=scale_dtype)
        self.zeros = torch.empty(num_groups, out_features, dtype=torch.uint8)
        if self.static:
            grouped = weight.reshape(out_features, num_groups, self.group_size)
            scales, zeros = ranges(grouped, scheme, scale_dtype)
            self.scales.copy_(scales.T)
            self.zeros.copy_(zeros.T)
            self.groups = feedback.channels // self.group_size
        else:
            self.groups = torch.arange(in_features).flip(0) // self.group_size
        self.steps = self.scales.to(torch.float32)
        self.zero_points = self.zeros.to(torch.float32)

    def run(self) -> IntTensor | None:
        in_features, out_features = self.weight.shape
        span, leaf = _SPAN, _LEAF
        if not self.static:
            # A group starts where its corrections are available: with a span or a leaf.
            span = self.group_size
            if self.group_size <= _LEAF:
                span, leaf = _SPAN // self.group_size * self.group_size, self.group_size
        work = torch.empty(min(span, in_features), out_features)
        rounded = torch.empty_like(work)
        for stop in range(in_features, 0, -span):
            start = max(stop - span, 0)
            corrected, whole = work[: stop - start], rounded[: stop - start]
            torch.addmm(
                self.weight[start:stop],
                self.feedback.matrix[start:stop, stop:],
                self.error[stop:],
                out=corrected,
            )
            if not self.static and leaf != self.group_size:
                self._fit_group(start, stop, corrected)
            for leaf_stop in range(stop, start, -leaf):
                leaf_start = max(leaf_stop - leaf, start)
                rows = slice(leaf_start - start, leaf_stop - start)
                if leaf_stop < stop:
                    corrected[rows].addmm_(
                        self.feedback.matrix[leaf_start:leaf_stop, leaf_stop:stop],
                        self.error[leaf_stop:stop],
                    )
                if not self.static and leaf == self.group_size:
                    self._fit_group(leaf_start, leaf_stop, corrected[rows])
                self._round_leaf(leaf_start, leaf_stop, corrected[rows], whole[rows])
            whole.add_(self.zero_points.index_select(0, self.groups[start:stop]))
            self.codes[start:stop] = whole
        # Minimum and maximum detect it without a copy, and propagate NaN.
        extremes = torch.stack([*torch.aminmax(self.error), *torch.aminmax(self.scales)])
        if not bool(torch.isfinite(extremes).all()):
            return None
        return self._tensor()

    def _fit_group(self, start: int, stop: int, corrected: torch.Tensor) -> None:
        """Fit the grid of the group at these positions to its corrected weights.

        `corrected` holds each channel as if the group's earlier channels had no error; the coupling within
        the group is one triangular system.
        """
        block = self.feedback.matrix[start:stop, start:stop]
        shift = torch.linalg.solve_triangular(
            block, corrected - self.weight[start:stop], upper=True, unitriangular=True
        )
        group = int(self.groups[start])
        current = (self.weight[start:stop] + shift).T.contiguous()
        scales, zeros = self.ranges(current, self.scheme, self.scale_dtype)
        self.scales[group], self.zeros[group] = scales, zeros
        self.steps[group] = scales.to(torch.float32)
        self.zero_points[group] = zeros.to(torch.float32)

    def _round_leaf(
        self, start: int, stop: int, corrected: torch.Tensor, rounded: torch.Tensor
    ) -> None:
        """Round the channels at these positions, the last one first."""
        weight_rows, error_rows = (part[start:stop].unbind(0) for part in (self.weight, self.error))
        corrected_rows, rounded_rows = corrected.unbind(0), rounded.unbind(0)
        errors = self.error[start:stop].T
        block = self.feedback.matrix[start:stop, start:stop]
        groups = self.groups[start:stop].tolist()
        symmetric, middle, max_code = (
            self.scheme.symmetric,
            self.scheme.middle,
            self.scheme.max_code,
        )
        for row in range(stop - start - 1, -1, -1):
            target, codes, group = corrected_rows[row], rounded_rows[row], groups[row]
            if row + 1 < stop - start:
                torch.addmv(target, errors[:, row + 1 :], block[row, row + 1 :], out=target)
            step = self.steps[group]
            torch.div(target, step, out=codes).round_()
            if symmetric:
                codes.clamp_(-middle, max_code - middle)
            else:
                zero = self.zero_points[group]
                codes.clamp_(-zero, max_code - zero)
            torch.addcmul(weight_rows[row], codes, step, value=-1, out=error_rows[row])

    def _tensor(self) -> IntTensor:
        """The codes in the original channel order."""
        channels = self.feedback.channels
        position = torch.empty_like(channels)
        position[channels] = torch.arange(len(channels))
        index = None
        if self.scheme.permuted:
            index = self.groups[position].to(torch.int32)
        return IntTensor(
            codes=self.codes.index_select(0, position).T.contiguous(),
            scales=self.scales.T.contiguous(),
            zeros=self.zeros.T.contiguous(),
            scheme=self.scheme,
            group_index=index,
        )
