"""GPTQ's error feedback: the matrix that propagates rounding errors, and the loop over columns.

GPTQ (Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers",
ICLR 2023, arXiv:2210.17323) takes the matrix from the Cholesky factor of the inverse Hessian. The factor of
the Hessian itself holds the same numbers: with `H = R Rᵀ`, `R` upper triangular, and `D = W - W'`, the
output error is `|D R|²`, and column `k` of `D R` is

    R[k, k] * (w_k - w'_k + sum over j < k of (w_j - w'_j) * R[j, k] / R[k, k])

so the best `w'_k`, given those before it, is `w_k` plus that sum, rounded: one factorisation and no inverse.
(Chee et al., "QuIP", NeurIPS 2023, arXiv:2307.13304, prove that the two are one algorithm.)

Weights are held transposed, `[in, out]`: a channel is then contiguous, and all linears with the same input
are concatenated. Corrections are applied lazily on three levels (GPTQ's lazy batch updates): a span of
channels by one GEMM with all earlier errors, a leaf of a few by one with the span's errors, a channel by the
leaf's.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..kinds.base.grid import Columns, Grid, Parameters, group_of, joined
from ..kinds.base.tensor import QuantizedTensor

_MAX_DAMP = 1.0
_LEAST_RAISED = 0.005
_ASYMMETRIC_SHARE = 0.25
_SPAN = 256  # channels that one product corrects by the errors so far
_LEAF = 32  # channels of a span that are rounded one by one


@dataclass(frozen=True, slots=True)
class Feedback:
    """The feedback matrix, in rounding order.

    Attributes:
        channels: int64 `[in]`, the input channel at each position. The channel that is rounded first is last,
            so that the Cholesky factor needs no reversed copy.
        matrix: float32 `[in, in]`, unit upper triangular; row `p`, right of the diagonal: coefficients of the
            errors at later positions, added to position `p` before it is rounded.
        diagonal: float32 `[in]`, of the Cholesky factor: its square is the weight that a channel's squared
            error keeps after the feedback.
    """

    channels: torch.Tensor
    matrix: torch.Tensor
    diagonal: torch.Tensor
    damp: float


def feedback(gram: torch.Tensor, order: torch.Tensor, damp: float) -> Feedback | None:
    """Cholesky factorisation of the Gram matrix `[in, in]`, damped by `damp` times its mean diagonal. Doubled
    after each failure, up to 1; then None. A dead channel is rounded to nearest, without errors."""
    diagonal = gram.diagonal()
    alive = diagonal > 0
    mean = diagonal[alive].mean(dtype=torch.float64)
    channels = order.flip(0)
    while damp <= _MAX_DAMP:
        damped = gram.index_select(0, channels).index_select(1, channels)
        damped.diagonal().add_(damp * float(mean))
        damped.diagonal()[~alive[channels]] = float(mean)
        lower, failed = torch.linalg.cholesky_ex(damped)
        scale = lower.diagonal().clone()
        if not int(failed) and bool(torch.isfinite(scale).all()) and bool((scale > 0).all()):
            # The result is column-major, so its transpose is row-major.
            return Feedback(channels, lower.mT.div_(scale[:, None]), scale, damp)
        damp = max(2 * damp, _LEAST_RAISED)
    return None


def rounding_order(gram: torch.Tensor, act_order: str, group: int, vector: int) -> torch.Tensor:
    """Input channels int64 `[in]` in rounding order, those of a `vector` together. `none`: as stored;
    `group-aware`: groups by their sums of the Hessian's diagonal, and within them (GPTQModel); else all by
    the diagonal."""
    diagonal = gram.diagonal()
    if act_order == "none":
        return torch.arange(len(diagonal))
    vectors = diagonal if vector == 1 else diagonal.view(-1, vector).sum(dim=1)
    if act_order != "group-aware":
        order = _decreasing(vectors)
    else:
        grouped = vectors.view(-1, group // vector)
        within = _decreasing(grouped) + torch.arange(0, len(vectors), group // vector)[:, None]
        order = within[_decreasing(grouped.sum(dim=1))].flatten()
    if vector == 1:
        return order
    return (order[:, None] * vector + torch.arange(vector)).flatten()


def _decreasing(values: torch.Tensor) -> torch.Tensor:
    return values.argsort(dim=-1, descending=True, stable=True)


def asymmetric_shift(
    weight: torch.Tensor, cross: torch.Tensor, feedback: Feedback, gram: torch.Tensor | None = None
) -> torch.Tensor:
    """Shift to add to a weight `[out, in]` whose output shall be that of the float model's inputs.

    For inputs `x` of the layer and `y` of the float model's, `|W yᵀ - W' xᵀ|²` is least where `W'` is nearest
    to `W + W C H⁻¹`, with `C` the sum of `(y - x) xᵀ`, in the metric of `H`. A quarter of it is taken, as in
    GPTAQ (arXiv:2504.02692), since calibration knows `C` with noise.

    `gram` is `x xᵀ`, where `H` is of other tokens too: the shift brings outputs of `x` nearest at most.
    """
    channels, diagonal = feedback.channels, feedback.diagonal
    moved = (weight @ cross).index_select(1, channels)
    # In rounding order `H = Mᵀ D² M`, with the unit upper triangular matrix and the diagonal.
    solved = torch.linalg.solve_triangular(
        feedback.matrix, moved, upper=True, left=False, unitriangular=True
    )
    solved = torch.linalg.solve_triangular(
        feedback.matrix.mT, solved / diagonal.square(), upper=False, left=False, unitriangular=True
    )
    shift = torch.empty_like(solved)
    shift[:, channels] = solved
    shift.mul_(_ASYMMETRIC_SHARE)
    if gram is not None and (squared := float((shift @ gram).mul_(shift).sum())) > 0:
        shift.mul_(min(1.0, float((weight @ cross).mul_(shift).sum()) / squared))
    return shift


class Solver:
    """Rounds a weight `[out, in]` of linears that share their input.

    Args:
        weight: float32; not modified.
        slots: int64 `[in]`: the grid's channel at each position of `feedback.channels`: the same channels,
            unless groups are made of others than neighbours. The result is in this order.
        static_groups: True if parameters are fitted upfront to the original weight. Otherwise those of a
            group are fitted when it is reached, to the corrected weights; its channels are consecutive then.
        weighted: True if they are fitted for the least error after the feedback, not to the plain range.
    """

    def __init__(
        self,
        weight: torch.Tensor,
        feedback: Feedback,
        grid: Grid,
        *,
        slots: torch.Tensor,
        static_groups: bool,
        weighted: bool,
    ):
        in_features = weight.shape[1]
        self.grid, self.feedback, self.slots = grid, feedback, slots
        self.groups = (slots // grid.group).tolist()
        self.places = (slots % grid.group).tolist()
        # A single group is independent of the order.
        self.static = static_groups or grid.group == in_features
        # What remains of a channel's squared error after the feedback is its squared diagonal.
        self.importance = feedback.diagonal.square() if weighted else None
        self.weight = weight.T.contiguous().index_select(0, feedback.channels)
        self.error = torch.empty_like(self.weight)
        num_groups = in_features // grid.group
        self.fitted: list[Parameters] = [()] * num_groups
        self.columns: dict[int, Columns] = {}
        if self.static:
            self._fit_all(weight, num_groups)

    def run(self) -> QuantizedTensor | None:
        """The solved weight, once; None if an error overflows."""
        in_features, out_features = self.weight.shape
        span, leaf = _SPAN, _LEAF
        if not self.static:
            # A group starts where its corrections are available: with a span or a leaf.
            span = self.grid.group
            if span <= _LEAF:
                span, leaf = _SPAN // span * span, span
        fit_leaves = not self.static and leaf == self.grid.group
        if self.grid.vector > 1 and not fit_leaves:
            leaf = self.grid.vector * max(1, _LEAF // self.grid.vector)
        work = torch.empty(min(span, in_features), out_features)
        for stop in range(in_features, 0, -span):
            start = max(stop - span, 0)
            corrected = work[: stop - start]
            torch.addmm(
                self.weight[start:stop],
                self.feedback.matrix[start:stop, stop:],
                self.error[stop:],
                out=corrected,
            )
            if not self.static and not fit_leaves:
                self._fit_group(start, stop, corrected)
            for leaf_stop in range(stop, start, -leaf):
                leaf_start = max(leaf_stop - leaf, start)
                rows = slice(leaf_start - start, leaf_stop - start)
                if leaf_stop < stop:
                    corrected[rows].addmm_(
                        self.feedback.matrix[leaf_start:leaf_stop, leaf_stop:stop],
                        self.error[leaf_stop:stop],
                    )
                if fit_leaves:
                    self._fit_group(leaf_start, leaf_stop, corrected[rows])
                self._round_leaf(leaf_start, leaf_stop, corrected[rows])
        parameters = joined(self.fitted)
        # Minimum and maximum detect it without a copy, and propagate NaN.
        extremes = [self.error, *(part for part in parameters if part.is_floating_point())]
        if not all(
            bool(torch.isfinite(torch.stack(torch.aminmax(part))).all()) for part in extremes
        ):
            return None
        return self.grid.tensor(self._values(), parameters)

    def _fit_all(self, weight: torch.Tensor, num_groups: int) -> None:
        """Fit all groups to the original weight `[out, in]`."""
        importance = None
        if self.importance is not None:
            importance = torch.empty_like(self.importance)
            importance[self.slots] = self.importance
            importance = importance.view(num_groups, -1)
        if not torch.equal(self.slots, self.feedback.channels):
            order = torch.empty_like(self.slots)
            order[self.slots] = self.feedback.channels
            weight = weight.index_select(1, order)
        parameters = self.grid.fit(weight.unflatten(1, (num_groups, -1)), importance)
        if num_groups == 1:
            self.fitted, self.columns[0] = [parameters], self.grid.columns(parameters)
            return
        self.fitted = [group_of(parameters, index) for index in range(num_groups)]
        for index, part in enumerate(self.fitted):
            self.columns[index] = self.grid.columns(part)

    def _fit_group(self, start: int, stop: int, corrected: torch.Tensor) -> None:
        """Fit the grid of the group at these positions to its corrected weights."""
        group = self.groups[start]
        places = self.slots[start:stop] - group * self.grid.group
        order = places.argsort()
        current = self._uncoupled(start, stop, corrected).index_select(0, order).T
        importance = None
        if self.importance is not None:
            importance = self.importance[start:stop].index_select(0, order).unsqueeze(0)
        parameters = self.grid.fit(current.contiguous().unsqueeze(1), importance)
        self.fitted[group] = parameters
        self.columns = {group: self.grid.columns(parameters)}

    def _uncoupled(self, start: int, stop: int, corrected: torch.Tensor) -> torch.Tensor:
        """Weights at these positions, corrected for all errors before, by one triangular system."""
        block = self.feedback.matrix[start:stop, start:stop]
        shift = torch.linalg.solve_triangular(
            block, corrected - self.weight[start:stop], upper=True, unitriangular=True
        )
        return shift.add_(self.weight[start:stop])

    def _round_leaf(self, start: int, stop: int, corrected: torch.Tensor) -> None:
        """Round the channels at these positions, the last one first."""
        if self.grid.vector > 1:
            self._round_vectors(start, stop, corrected)
            return
        weights, targets = self.weight[start:stop].unbind(0), corrected.unbind(0)
        error = self.error[start:stop]
        errors, transposed = error.unbind(0), error.T
        block = self.feedback.matrix[start:stop, start:stop]
        for row in range(stop - start - 1, -1, -1):
            target = targets[row]
            if row + 1 < stop - start:
                torch.addmv(target, transposed[:, row + 1 :], block[row, row + 1 :], out=target)
            columns = self.columns[self.groups[start + row]]
            columns.errors(target, weights[row], self.places[start + row], out=errors[row])

    def _round_vectors(self, start: int, stop: int, corrected: torch.Tensor) -> None:
        """The same for a grid of vectors: within one, channels are rounded together."""
        length = self.grid.vector
        for last in range(stop, start, -length):
            first = last - length
            targets = corrected[first - start : last - start]
            if last < stop:
                targets.addmm_(self.feedback.matrix[first:last, last:stop], self.error[last:stop])
            # Positions run against the order of the channels.
            targets = self._uncoupled(first, last, targets).flip(0)
            error = torch.empty_like(targets)
            columns, last_place = self.columns[self.groups[first]], self.places[last - 1]
            columns.errors(targets, self.weight[first:last].flip(0), last_place, out=error)
            self.error[first:last] = error.flip(0)

    def _values(self) -> torch.Tensor:
        position = torch.empty_like(self.slots)
        position[self.slots] = torch.arange(len(self.slots))
        values = self.weight.sub_(self.error)
        del self.weight, self.error  # two copies of the weights less at the end
        return values.index_select(0, position).T.contiguous()
