"""AWQ: scale the input channels that matter, fold the scales away, clip the ranges, then round.

Lin et al., "AWQ: Activation-aware Weight Quantization for LLM Compression and Acceleration",
MLSys 2024 (arXiv:2306.00978).

A channel `j` of a linear's input may be divided by `s_j` where the operation before it is divided by the
same, and column `j` of the weight multiplied: the float model does not change, but the column now takes
a larger part of its group's range and so is rounded more finely. `s` is searched on a grid of one
exponent per pair. Nothing is accepted that makes any linear worse than plain rounding does: the identity
is a candidate, and both the scales and the clipping are held against it on the calibration data.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from ..errors import BadInput
from ..families import Fold
from ..scheme import CodebookScheme, GgufScheme, IntScheme, Scheme
from ..tensors.base import QuantizedTensor
from .awq_clip import clip_groups
from .base import LayerProblem, LayerResult, ModuleReport, SchemeOptions
from .folding import can_fold, fold_into_norm, row_scales
from .rounding import round_weight

GRID = 20


@dataclass(slots=True)
class _Linear:
    """A linear on its way: `weight * columns / rows` is what gets rounded.

    `columns` answers for an input that arrives divided by it, `rows` divides the output for a linear
    that comes after.
    """

    columns: torch.Tensor
    rows: torch.Tensor
    ratio: float | None = None
    error: float = 0.0
    rtn_error: float = 0.0


@dataclass(slots=True)
class _State:
    problem: LayerProblem
    linears: dict[str, _Linear] = field(default_factory=dict)
    norms: dict[str, torch.Tensor] = field(default_factory=dict)
    routers: dict[str, torch.Tensor] = field(default_factory=dict)

    def quantize(
        self, name: str, columns: torch.Tensor, rows: torch.Tensor
    ) -> tuple[QuantizedTensor, torch.Tensor]:
        """Codes of a linear under the given scales, and the weight that they amount to."""
        weight = self.problem.weights[name] * columns / rows[:, None]
        codes = round_weight(self.problem, name, weight)
        return codes, self.effective(codes, columns, rows)

    def clip(self, name: str) -> tuple[QuantizedTensor, torch.Tensor, float]:
        """Codes of a linear after clipping, its weight, and the share of groups that were clipped."""
        linear = self.linears[name]
        weight = self.problem.weights[name] * linear.columns / linear.rows[:, None]
        scheme = self.problem.schemes[name]
        assert isinstance(scheme, IntScheme)
        clipped = clip_groups(
            weight,
            self.problem.statistics[name].gram,
            linear.columns,
            scheme,
            self.problem.scale_dtypes[name],
        )
        codes = round_weight(self.problem, name, clipped.weight)
        return codes, self.effective(codes, linear.columns, linear.rows), clipped.share

    @staticmethod
    def effective(
        codes: QuantizedTensor, columns: torch.Tensor, rows: torch.Tensor
    ) -> torch.Tensor:
        """The weight, in the terms of the unscaled layer, that quantized codes amount to."""
        return codes.dequantize() * rows[:, None] / columns

    def error(self, name: str, columns: torch.Tensor, rows: torch.Tensor) -> float:
        """Relative output error of a linear under the given scales."""
        return self.problem.error(name, self.quantize(name, columns, rows)[1])

    def candidate_error(self, name: str, columns: torch.Tensor, rows: torch.Tensor) -> float:
        """The same for scales that are only tried: infinite where the stored dtype cannot hold them."""
        try:
            return self.error(name, columns, rows)
        except BadInput:
            return math.inf


class Awq:
    """The method `awq`."""

    name = "awq"
    default_format = "awq"
    needs_statistics = True
    grouped = True

    def scheme(self, options: SchemeOptions) -> Scheme:
        symmetric = False if options.symmetric is None else options.symmetric
        return IntScheme(options.bits or 4, options.group_size or 128, symmetric)

    def quantize_layer(self, problem: LayerProblem) -> LayerResult:
        state = _State(problem)
        for name, weight in problem.weights.items():
            linear = _Linear(torch.ones(weight.shape[1]), torch.ones(weight.shape[0]))
            linear.error = linear.rtn_error = state.error(name, linear.columns, linear.rows)
            state.linears[name] = linear
        for fold in problem.family.folds:
            if can_fold(fold, problem):
                _search_fold(fold, state)
        weights: dict[str, QuantizedTensor] = {}
        reports: list[ModuleReport] = []
        for name in problem.weights:
            weights[name], report = _finish(name, state)
            reports.append(report)
        return LayerResult(weights, state.norms, reports, state.routers)


def _search_fold(fold: Fold, state: _State) -> None:
    """Try every scale of the grid for one pair and keep the best that makes no linear worse than RTN."""
    problem = state.problem
    targets = [name for name in fold.targets if name in problem.weights]
    routers = [name for name in fold.targets if name in problem.routers]
    best = sum(state.linears[target].error for target in targets)
    chosen: tuple[float, torch.Tensor, torch.Tensor | None, dict[str, float]] | None = None
    for ratio, wanted in scale_candidates(
        # A router sees every token, an expert only its own.
        problem.statistics[(routers or targets)[0]].mean_abs,
        torch.cat([problem.weights[target] for target in targets]),
        _run_length(problem.schemes[targets[0]], problem.weights[targets[0]].shape[1]),
    ):
        if fold.source in problem.norms:
            norm, scales = fold_into_norm(problem.norms[fold.source], wanted, fold.norm_offset)
        else:
            norm, scales = None, wanted
        errors = {
            target: state.candidate_error(target, scales, state.linears[target].rows)
            for target in targets
        }
        if norm is None:
            source = state.linears[fold.source]
            rows = row_scales(fold, len(source.rows), scales)
            errors[fold.source] = state.candidate_error(fold.source, source.columns, rows)
        worse = any(not error <= state.linears[name].rtn_error for name, error in errors.items())
        total = sum(errors[target] for target in targets)
        if not worse and math.isfinite(total) and total < best:
            best, chosen = total, (ratio, scales, norm, errors)
    if chosen is None:
        return
    ratio, scales, norm, errors = chosen
    for target in targets:
        state.linears[target].columns = scales
        state.linears[target].ratio = ratio
    for router in routers:
        state.routers[router] = problem.routers[router] * scales
    if norm is None:
        source = state.linears[fold.source]
        source.rows = row_scales(fold, len(source.rows), scales)
    else:
        state.norms[fold.source] = norm
    for name, error in errors.items():
        state.linears[name].error = error


def _finish(name: str, state: _State) -> tuple[QuantizedTensor, ModuleReport]:
    """Clip and round a linear under its final scales; the clipping stays only where it does not hurt."""
    problem, linear = state.problem, state.linears[name]
    codes, effective = state.quantize(name, linear.columns, linear.rows)
    share = 0.0
    clips = isinstance(problem.schemes[name], IntScheme)
    if clips and name not in problem.family.unclipped:
        clipped, clipped_effective, clipped_share = state.clip(name)
        if problem.error(name, clipped_effective) < linear.error:
            codes, effective, share = clipped, clipped_effective, clipped_share
    rounded = round_weight(problem, name, problem.weights[name]).dequantize()
    return codes, problem.report(name, effective, rounded, ratio=linear.ratio, clipped=share)


def _run_length(scheme: Scheme, in_features: int) -> int:
    """How many weights of a row share a scale."""
    if isinstance(scheme, IntScheme):
        return in_features // scheme.num_groups(in_features)
    if isinstance(scheme, GgufScheme):
        return 32
    size = scheme.block_size if isinstance(scheme, CodebookScheme) else in_features
    return size if in_features % size == 0 else in_features


def scale_candidates(
    mean_abs: torch.Tensor, weight: torch.Tensor, run_length: int
) -> Iterator[tuple[float, torch.Tensor]]:
    """The grid of input scales: `s = x^a / (w^(1-a) + 1e-4)` for 20 exponents `a`, centred around 1.

    Args:
        mean_abs: mean magnitude of each input channel `[in]`.
        weight: the linears that share the input, stacked `[out, in]`.
        run_length: how many weights of a row share a scale.

    Yields:
        The exponent, and positive finite scales `[in]`.
    """
    grouped = weight.abs().view(weight.shape[0], -1, run_length)
    largest = grouped.amax(dim=-1, keepdim=True)
    relative = (grouped / torch.where(largest > 0, largest, 1.0)).view(weight.shape)
    mean_weight = relative.mean(dim=0)
    for step in range(GRID):
        ratio = step / GRID
        scales = mean_abs.pow(ratio) / (mean_weight.pow(1 - ratio) + 1e-4)
        scales = scales.clamp(min=1e-4)
        scales = scales / (scales.max() * scales.min()).sqrt()
        yield ratio, torch.where(torch.isfinite(scales) & (scales > 0), scales, 1.0)
