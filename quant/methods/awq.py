"""AWQ: search per-channel input scales, fold them into the previous operation, then round.

Lin et al., MLSys 2024 (arXiv:2306.00978). Input channel `j` is divided by `s_j` in the previous operation,
and column `j` of the weight multiplied: it is rounded more finely. `s` is searched by one exponent per fold,
the identity among them, so that no linear becomes worse than RTN on the calibration data; experts that read
one norm are judged by their summed error. GPTQ then solves the layer by default; with nearest codes ranges
are clipped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from ...base.errors import BadInput
from ..base import workers
from ..base.device import rows_at_once
from ..families.layer_map import Fold
from ..kinds.base.grid import where
from ..kinds.base.tensor import QuantizedTensor
from ..kinds.integer.kind import IntTensor, range_grid
from ..kinds.integer.scheme import IntScheme
from . import gptq
from .base import (
    LayerProblem,
    LayerResult,
    ModuleReport,
    each_linear,
    quadratic_form,
    relative,
    solving,
)
from .folding import (
    can_fold,
    column_scales,
    divided_bias,
    fold_into_norm,
    row_scales,
    scaled_problem,
    tied_scales,
)
from .rounding import importance, linear_grid, round_plain, round_weight

GRID = 20  # exponents of the search, as in AWQ's code
_ROWS = 256  # small enough to stay in a core's cache


def scale_candidates(
    mean_abs: torch.Tensor, weights: Sequence[torch.Tensor], group_size: int
) -> Iterator[tuple[float, torch.Tensor]]:
    """20 pairs of `a` and `s = x^a / (w^(1-a) + 1e-4)` `[in]`, centred around 1, of mean magnitudes `x`."""
    # Mean ratio of an input channel's weights to their group's largest magnitude.
    total = torch.zeros(weights[0].shape[1], dtype=torch.float64)
    for rows in (rows for weight in weights for rows in weight.split(_ROWS)):
        grouped = rows.abs().view(len(rows), -1, group_size)
        largest = grouped.amax(dim=-1, keepdim=True)
        grouped = grouped.div_(torch.where(largest > 0, largest, 1.0))
        total += grouped.view(rows.shape).sum(dim=0)
    mean_weight = (total / sum(len(weight) for weight in weights)).to(torch.float32)
    for step in range(GRID):
        ratio = step / GRID
        scales = mean_abs.pow(ratio) / (mean_weight.pow(1 - ratio) + 1e-4)
        scales = scales.clamp(min=1e-4)
        scales = scales / (scales.max() * scales.min()).sqrt()
        yield ratio, torch.where(torch.isfinite(scales) & (scales > 0), scales, 1.0)


_STEPS = 20
_MAX_SHRINK = 0.5  # of a range by clipping, as in AWQ's code
_MIN_ROWS, _VALUES = 256, 2**17  # weights per chunk: small enough to stay in a core's cache


def clip_groups(
    weight: torch.Tensor,
    gram: torch.Tensor,
    columns: torch.Tensor,
    scheme: IntScheme,
    scale_dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Clamp each group, alone as in AWQ, to the magnitude of least output error, down to half of it.
    `weight`, float32 `[out, in]`, is scaled by `columns` `[in]`, its input's `gram` is not. Returns it, and
    the share of clipped groups in each row `[out]`."""
    out_features, in_features = weight.shape
    size = in_features // scheme.num_groups(in_features)
    clipped = torch.empty_like(weight)
    num_clipped = torch.zeros(out_features)
    at_once = max(_MIN_ROWS, rows_at_once(weight.device, _VALUES, size))
    for start in range(0, in_features, size):
        group = slice(start, start + size)
        block = gram[group, group] / columns[group] / columns[group, None]
        for first in range(0, out_features, at_once):
            rows = slice(first, first + at_once)
            part = weight[rows, group].contiguous()
            limit, largest = _best_limit(part, block, scheme, scale_dtype)
            torch.clamp(part, -limit[:, None], limit[:, None], out=part)
            clipped[rows, group] = part
            num_clipped[rows] += limit < largest
    return clipped, num_clipped * size / in_features


def _best_limit(
    part: torch.Tensor, block: torch.Tensor, scheme: IntScheme, scale_dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """The best of the tried limits of groups `[rows, size]`, and the largest magnitudes, both `[rows]`."""
    low, high = part.aminmax(dim=-1)
    largest = torch.maximum(-low, high)
    best = torch.full_like(largest, torch.inf, dtype=torch.float64), largest
    delta = torch.empty_like(part)
    for step in range(int(_MAX_SHRINK * _STEPS)):
        limit = largest * (1 - step / _STEPS)
        scales, zeros = range_grid(
            torch.maximum(low, -limit), torch.minimum(high, limit), scheme, scale_dtype
        )
        scale, zero = (values.to(torch.float32)[:, None] for values in (scales, zeros))
        torch.clamp(part, -limit[:, None], limit[:, None], out=delta)
        delta.div_(scale).round_().clamp_(-zero, scheme.max_code - zero).mul_(scale).sub_(part)
        error = quadratic_form(delta, block)
        best = where(error < best[0], (error, limit), best)
    return best[1], largest


_SAMPLED_ROWS = 512  # output channels for ranking candidates, shared by the linears of a pair
_JUDGED = 4  # candidates of a pair with which the layer is run
_SLACK = 1.02  # how much worse than RTN a linear may look on the sample


@dataclass(slots=True)
class _Linear:
    """A linear in the search: `weight * columns / rows` is rounded; errors are of the unscaled layer."""

    columns: torch.Tensor
    rows: torch.Tensor
    plain: QuantizedTensor
    plain_errors: torch.Tensor
    errors: torch.Tensor
    ratio: float | None = None


@dataclass(frozen=True, slots=True)
class _Pair:
    """A fold and its targets in the layer; with routers these are experts, judged by their summed error."""

    fold: Fold
    targets: list[str]
    routers: list[str]


@dataclass(frozen=True, slots=True)
class _Scales:
    """A candidate for one pair: scales of the source's rows and of the targets' columns, and the norm."""

    ratio: float
    rows: torch.Tensor
    columns: torch.Tensor
    norm: torch.Tensor | None


_Scaled = dict[str, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
"""Columns, rows and errors by linear."""


def quantize_layer(problem: LayerProblem) -> LayerResult:
    return _Work(problem).run()


class _Work:
    """State of a layer during the search."""

    def __init__(self, problem: LayerProblem):
        self.problem = problem
        self.linears: dict[str, _Linear] = {}
        self.norms: dict[str, torch.Tensor] = {}
        self.norm_biases: dict[str, torch.Tensor] = {}
        self.routers: dict[str, torch.Tensor] = {}
        self.router_columns: dict[str, torch.Tensor] = {}

    def run(self) -> LayerResult:
        problem = self.problem
        for name, weight in problem.weights.items():
            plain = round_plain(problem, name, weight)
            errors = problem.statistics[name].row_errors(weight - plain.dequantize())
            ones = torch.ones(weight.shape[1]), torch.ones(weight.shape[0])
            self.linears[name] = _Linear(*ones, plain, errors, errors)
        for fold in problem.family.folds:
            if can_fold(fold, problem):
                with solving(problem, [name for name in fold.targets if name in problem.weights]):
                    self._search(fold)
        finish = self._solved() if problem.options.solver == "gptq" else self._finish
        result = LayerResult.of(each_linear(problem, finish))
        return replace(result, norms=self.norms, routers=self.routers, norm_biases=self.norm_biases)

    def _search(self, fold: Fold) -> None:
        """Apply the best scales of one pair's grid that make no linear worse than RTN. Experts that read one
        norm share scales and are judged together. The grid is ranked on a sample of the output channels; the
        winner is checked on all."""
        problem = self.problem
        targets = [name for name in fold.targets if name in problem.weights]
        routers = [name for name in fold.targets if name in problem.routers]
        pair = _Pair(fold, targets, routers)
        candidates = [*self._candidates(pair)]
        promises = workers.shared_out(
            candidates, [1.0] * len(candidates), lambda scales: self._promise(pair, scales)
        )
        ranked = [entry for entry in zip(promises, candidates, strict=True) if entry[0] < 1]
        accepted: list[tuple[_Scales, _Scaled]] = []
        for _, scales in sorted(ranked, key=lambda entry: entry[0]):
            if (scaled := self._accepted(pair, scales)) is not None:
                accepted.append((scales, scaled))
                if len(accepted) == (1 if problem.layer_error is None else _JUDGED):
                    break
        if problem.layer_error is not None:
            accepted = self._judged(pair, accepted, problem.layer_error)
        if not accepted:
            return
        scales, scaled = accepted[0]
        for name, (columns, rows, errors) in scaled.items():
            linear = self.linears[name]
            linear.columns, linear.rows, linear.errors = columns, rows, errors
        for name in targets:
            self.linears[name].ratio = scales.ratio
        for router in routers:
            self.routers[router] = problem.routers[router] * scales.columns
            self.router_columns[router] = scales.columns
        if scales.norm is not None:
            self.norms[fold.source] = scales.norm
            self.norm_biases |= divided_bias(fold, problem, scales.rows)

    def _accepted(self, pair: _Pair, scales: _Scales) -> _Scaled | None:
        """Scale the linears that a candidate changes; None where RTN or the present scales are better."""
        fold = pair.fold
        changed = {name: (scales.columns, self.linears[name].rows) for name in pair.targets}
        if scales.norm is None:
            source = self.linears[fold.source]
            rows = row_scales(fold, len(source.rows), scales.rows)
            changed[fold.source] = source.columns, rows
        errors = {name: self._errors(name, *parts) for name, parts in changed.items()}
        for name, error in () if pair.routers else errors.items():
            if not float(error.sum()) <= float(self.linears[name].plain_errors.sum()):
                return None
        before = self._total(pair, [self.linears[name].errors for name in pair.targets])
        if not self._total(pair, [*errors.values()]) < before:
            return None
        return {name: (*parts, errors[name]) for name, parts in changed.items()}

    def _judged(
        self,
        pair: _Pair,
        accepted: list[tuple[_Scales, _Scaled]],
        layer_error: Callable[[Mapping[str, torch.Tensor]], float],
    ) -> list[tuple[_Scales, _Scaled]]:
        """The candidate with which the layer's output is nearest to the float layer's; none if RTN's is."""
        names = [*pair.targets, *([pair.fold.source] if pair.fold.source in self.linears else [])]
        present = {
            name: self._effective(name, self.linears[name].columns, self.linears[name].rows)
            for name in names
        }
        least, best = layer_error(present), []
        for scales, scaled in accepted:
            rounded = {name: self._effective(name, *parts[:2]) for name, parts in scaled.items()}
            if (error := layer_error(present | rounded)) < least:
                least, best = error, [(scales, scaled)]
        return best

    def _effective(
        self, name: str, columns: torch.Tensor, rows: torch.Tensor, sample: slice = slice(None)
    ) -> torch.Tensor:
        """Rows of a weight as it is rounded under the scales, in units of the unscaled layer."""
        weight, divisors = self.problem.weights[name][sample], rows[sample, None]
        codes = self._rounded(name, weight * columns / divisors, columns)
        return codes.dequantize().mul_(divisors).div_(columns)

    def _candidates(self, pair: _Pair) -> Iterator[_Scales]:
        problem, fold, targets = self.problem, pair.fold, pair.targets
        for ratio, wanted in scale_candidates(
            # A router reads every token, an expert only those routed to it.
            problem.statistics[(pair.routers or targets)[0]].mean_abs,
            [problem.weights[target] for target in targets],
            problem.schemes[targets[0]].run_length(problem.weights[targets[0]].shape[1]),
        ):
            rows, norm = tied_scales(fold, wanted), None
            if fold.source in problem.norms:
                norm, rows = fold_into_norm(problem.norms[fold.source], rows, fold.norm_offset)
            yield _Scales(ratio, rows, column_scales(fold, rows), norm)

    def _promise(self, pair: _Pair, scales: _Scales) -> float:
        """Ratio of the sampled rows' error to the present one; infinite if a target looks worse."""
        step_budget = max(1, _SAMPLED_ROWS // len(pair.targets))
        before: list[torch.Tensor] = []
        after: list[torch.Tensor] = []
        for name in pair.targets:
            linear = self.linears[name]
            sample = slice(None, None, math.ceil(len(linear.rows) / step_budget))
            errors = self._errors(name, scales.columns, linear.rows, sample)
            plain = _SLACK * float(linear.plain_errors[sample].sum())
            if not pair.routers and not float(errors.sum()) <= plain:
                return math.inf
            before.append(linear.errors[sample])
            after.append(errors)
        present = self._total(pair, before)
        return self._total(pair, after) / present if present else math.inf

    def _errors(
        self, name: str, columns: torch.Tensor, rows: torch.Tensor, sample: slice = slice(None)
    ) -> torch.Tensor:
        """Squared output error per output channel; infinite where the stored dtype cannot hold the scales."""
        weight = self.problem.weights[name][sample]
        try:
            delta = self._effective(name, columns, rows, sample).sub_(weight)
        except BadInput:
            return torch.full((len(weight),), torch.inf, dtype=torch.float64)
        return self.problem.statistics[name].row_errors(delta)

    def _total(self, pair: _Pair, errors: list[torch.Tensor]) -> float:
        """Errors of the targets: relative, or of experts squared, so that few tokens count little."""
        sums = [float(error.sum()) for error in errors[: len(pair.targets)]]
        if pair.routers:
            return sum(sums)
        energies = [self.problem.energy(name) for name in pair.targets]
        return sum(map(relative, sums, energies))

    def _solved(self) -> Callable[[str], tuple[QuantizedTensor, ModuleReport]]:
        """GPTQ's codes of the scaled layer, by linear, with reports as of the unscaled one."""
        problem, linears = self.problem, self.linears
        columns = {name: linear.columns for name, linear in linears.items()} | self.router_columns
        rows = {name: linear.rows for name, linear in linears.items()}
        scaled = replace(scaled_problem(problem, columns, rows), measures_errors=False)
        solved = gptq.quantize_layer(scaled)
        reports = dict(zip(solved.weights, solved.reports, strict=True))

        def finish(name: str) -> tuple[QuantizedTensor, ModuleReport]:
            codes, linear, seen = solved.weights[name], linears[name], reports[name]
            effective = codes.dequantize().mul_(linear.rows[:, None]).div_(linear.columns)
            return codes, problem.report(
                name,
                effective,
                linear.plain.dequantize(),
                ratio=linear.ratio,
                damp=seen.damp,
                fallback=seen.fallback,
            )

        return finish

    def _finish(self, name: str) -> tuple[QuantizedTensor, ModuleReport]:
        """Clip and round a linear under its final scales; a row is clipped only if that lowers its error."""
        problem, linear = self.problem, self.linears[name]
        columns, rows = linear.columns, linear.rows[:, None]
        scaled = problem.weights[name] * columns / rows
        codes = self._rounded(name, scaled, columns)
        effective = codes.dequantize().mul_(rows).div_(columns)
        record, scheme, share = problem.statistics[name], problem.schemes[name], 0.0
        errors = linear.errors
        if isinstance(scheme, IntScheme):
            for candidate, clipped in self._narrowed(name, scaled, scheme):
                restored = candidate.dequantize().mul_(rows).div_(columns)
                candidate_errors = record.row_errors(restored - problem.weights[name])
                better = candidate_errors < errors
                codes = _mixed(better, candidate, codes)
                effective = torch.where(better[:, None], restored, effective)
                errors = torch.where(better, candidate_errors, errors)
                share += float((clipped * better).mean())
        else:
            errors = record.row_errors(effective - problem.weights[name])
        energy = problem.energy(name)
        return codes, problem.report(
            name,
            effective,
            linear.plain.dequantize(),
            error=relative(float(errors.sum()), energy),
            rtn_error=relative(float(linear.plain_errors.sum()), energy),
            ratio=linear.ratio,
            clipped=share,
        )

    def _narrowed(
        self, name: str, scaled: torch.Tensor, scheme: IntScheme
    ) -> Iterator[tuple[QuantizedTensor, torch.Tensor]]:
        """The scaled weight in ranges of less error, and the share of clipped groups of each row."""
        problem, columns = self.problem, self.linears[name].columns
        record, dtype = problem.statistics[name], problem.scale_dtypes[name]
        if name not in problem.family.unclipped:
            clipped, shares = clip_groups(scaled, record.gram, columns, scheme, dtype)
            yield round_plain(problem, name, clipped), shares
        squares = importance(problem, name, columns)
        if problem.options.ranges == "weighted" and squares is not None:
            grid = linear_grid(problem, name, scaled)
            yield grid.nearest(scaled, squares), torch.zeros(len(scaled))

    def _rounded(self, name: str, scaled: torch.Tensor, columns: torch.Tensor) -> QuantizedTensor:
        """A scaled weight rounded in integers' plain ranges, or in a block type's weighted ones."""
        if isinstance(self.problem.schemes[name], IntScheme):
            return round_plain(self.problem, name, scaled)
        return round_weight(self.problem, name, scaled, columns)


def _mixed(rows: torch.Tensor, first: QuantizedTensor, second: QuantizedTensor) -> IntTensor:
    """`first` in the rows of the mask `[out]`, `second` in the others."""
    assert isinstance(first, IntTensor) and isinstance(second, IntTensor)
    parts = {
        part: torch.where(rows[:, None], getattr(first, part), getattr(second, part))
        for part in ("codes", "scales", "zeros")
    }
    return replace(first, **parts)
