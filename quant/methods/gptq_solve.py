"""The loop of GPTQ: round one input channel after the other, each corrected for the errors so far.

Weights are held transposed, `[in, out]`: a channel is then one run of memory, and every linear that reads
the same input can stand beside the others. Corrections are gathered when they are needed: for a span of
channels by one product with all errors before the span, for a few channels by one with those of the span,
and for a single channel by one with its few neighbours. Nearly all the time goes into the first.
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
    """Codes of a weight `[out, in]` of any linears that share their input; None if an error overflows.

    Args:
        weight: float32; it is not changed.
        ranges: chooses scale and zero of groups.
        static_groups: whether the grids are those of the weight as it is given, its groups as they lie.
            Otherwise a group is the next `group_size` channels in the order of rounding, and its grid
            suits what the errors before it made of them.
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
        # One group is the same under any order, and nothing precedes it.
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
            # A group starts where its corrections are at hand: with a span, or with a leaf.
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
        # The extremes tell it without a copy of the errors, and are NaN where one of them is.
        extremes = torch.stack([*torch.aminmax(self.error), *torch.aminmax(self.scales)])
        if not bool(torch.isfinite(extremes).all()):
            return None
        return self._tensor()

    def _fit_group(self, start: int, stop: int, corrected: torch.Tensor) -> None:
        """Choose the grid of the group at these positions for what its weights have become.

        `corrected` holds what each channel would be if those before it in the group had no error. That
        they share the earlier errors among them is one triangular system.
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
        """The codes with their channels where they were."""
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
