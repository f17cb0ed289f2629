"""SmoothQuant (W8A8): migrate activation outliers into the weights, so that both fit into 8 bits.

Xiao et al., ICML 2023 (arXiv:2211.10438). Input channel `j` is divided by `s_j = max|x_j|^a /
max|w_j|^(1-a)`, folded into the norm before, and column `j` of its linears multiplied. A fold is kept if the
measured error of the weights plus an upper bound of the activations' error falls, summed over its linears.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from ...base.errors import BadInput
from ..families.layer_map import Fold
from ..kinds.base.tensor import QuantizedTensor
from . import gptq
from .base import (
    InputStatistics,
    LayerProblem,
    LayerResult,
    ModuleReport,
    each_linear,
    full_name,
    relative,
    solving,
)
from .folding import (
    can_fold,
    column_scales,
    divided_bias,
    fold_into_norm,
    scaled_problem,
    tied_scales,
)
from .rounding import round_weight

_INT8_STEPS = 127.5


@dataclass(frozen=True, slots=True)
class _Rounded:
    """A linear after rounding, with its relative errors on calibration and on held-out tokens."""

    codes: QuantizedTensor
    columns: torch.Tensor
    seen: float
    held_out: float | None


def quantize_layer(problem: LayerProblem) -> LayerResult:
    chosen = each_linear(
        problem, lambda name: _round(problem, name, torch.ones(problem.weights[name].shape[1]))
    )
    plain, smoothed = dict(chosen), set[str]()
    norms: dict[str, torch.Tensor] = {}
    norm_biases: dict[str, torch.Tensor] = {}
    routers: dict[str, torch.Tensor] = {}
    for fold in problem.family.folds:
        if fold.source not in problem.norms or not can_fold(fold, problem):
            continue
        wanted = tied_scales(fold, smoothing_scales(fold, problem))
        norm, rows = fold_into_norm(problem.norms[fold.source], wanted, fold.norm_offset)
        columns = column_scales(fold, rows)
        targets = [name for name in fold.targets if name in problem.weights]
        try:
            trial = {name: _round(problem, name, columns) for name in targets}
        except BadInput:  # scaled weights overflow the dtype of their scales
            continue
        if sum(trial[name].seen for name in targets) < sum(plain[name].seen for name in targets):
            chosen |= trial
            smoothed.update(trial)
            norms[fold.source] = norm
            norm_biases |= divided_bias(fold, problem, rows)
            scaled = [name for name in fold.targets if name in problem.routers]
            routers |= {name: problem.routers[name] * columns for name in scaled}
    if problem.options.solver == "gptq":  # error feedback on the smoothed inputs
        columns = {name: linear.columns for name, linear in chosen.items()}
        folded = replace(scaled_problem(problem, columns, {}), held_out={}, remeasure=None)
        codes = gptq.quantize_layer(folded).weights
        chosen = {name: _judged(problem, name, codes[name], columns[name]) for name in chosen}
    weights: dict[str, QuantizedTensor] = {n: linear.codes for n, linear in chosen.items()}
    reports = [
        ModuleReport(
            module=full_name(problem.prefix, name),
            error=linear.seen,
            rtn_error=plain[name].seen,
            held_out_error=linear.held_out,
            rtn_held_out_error=plain[name].held_out,
            num_tokens=problem.statistics[name].num_tokens,
            ratio=problem.options.alpha if name in smoothed else None,
        )
        for name, linear in chosen.items()
    ]
    return LayerResult(weights, norms, reports, routers, norm_biases)


def smoothing_scales(fold: Fold, problem: LayerProblem) -> torch.Tensor:
    """The scales `[in]` for one norm; 1 for channels without inputs or without weights."""
    alpha = problem.options.alpha
    readers = [name for name in fold.targets if name in problem.statistics]
    inputs = torch.stack([problem.statistics[name].abs_max for name in readers]).amax(dim=0)
    linears = [name for name in fold.targets if name in problem.weights]
    maxima = torch.stack([problem.weights[name].abs().amax(dim=0) for name in linears])
    weights = maxima.amax(dim=0)
    scales = (inputs.pow(alpha) / weights.pow(1 - alpha)).clamp(min=1e-5)
    usable = (inputs > 0) & (weights > 0) & torch.isfinite(scales)
    return torch.where(usable, scales, 1.0)


def _round(problem: LayerProblem, name: str, columns: torch.Tensor) -> _Rounded:
    with solving(problem, [name]):
        codes = round_weight(problem, name, problem.weights[name] * columns, columns)
    return _judged(problem, name, codes, columns)


def _judged(
    problem: LayerProblem, name: str, codes: QuantizedTensor, columns: torch.Tensor
) -> _Rounded:
    weight, unseen = problem.weights[name], problem.held_out.get(name)
    seen = relative(_lost(weight, codes, columns, problem.statistics[name]), problem.energy(name))
    held_out = None
    if unseen is not None:
        energy = float(unseen.row_errors(weight).sum())
        held_out = relative(_lost(weight, codes, columns, unseen), energy)
    return _Rounded(codes, columns, seen, held_out)


def _lost(
    weight: torch.Tensor, codes: QuantizedTensor, columns: torch.Tensor, statistics: InputStatistics
) -> float:
    scaled = codes.dequantize()
    by_weights = float(statistics.row_errors(weight - scaled / columns).sum())
    return by_weights + float(scaled.square().sum()) * input_noise(statistics, columns)


def input_noise(statistics: InputStatistics, columns: torch.Tensor) -> float:
    """Upper bound of a channel's squared rounding error, summed over tokens, of inputs divided by `columns`.

    A token's step is its largest input over 127.5; the mean squared rounding error is step² / 12. The mean
    over tokens of the squared largest input is at most the square of the overall largest, and at most the
    channels' summed mean squares.
    """
    tokens = max(statistics.num_tokens, 1)
    together = float((statistics.gram.diagonal() / columns.square()).sum()) / tokens
    largest = float((statistics.abs_max / columns).max()) ** 2
    return tokens * min(together, largest) / _INT8_STEPS**2 / 12
