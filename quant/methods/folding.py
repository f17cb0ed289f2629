"""Folding input scales into the previous operation (norm or linear); shared by AWQ and SmoothQuant."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

import torch

from ..families.layer_map import Fold
from .base import InputStatistics, LayerProblem


def can_fold(fold: Fold, problem: LayerProblem) -> bool:
    """True if the fold can be applied: targets are quantized, and sources have no bias, unless norms. Others
    would round stored floats once more. Grouped-query attention's rows did not help SmolLM2-135M."""
    if any(name not in problem.weights and name not in problem.routers for name in fold.targets):
        return False
    linears = [problem.weights[name] for name in fold.targets if name in problem.weights]
    if not linears:
        return False
    if fold.source in problem.norms:
        num_rows = problem.norms[fold.source].shape[0]
    elif fold.source not in problem.weights or fold.source in problem.with_bias or fold.repeats > 1:
        return False
    else:
        start, stop = fold.rows or (0, problem.weights[fold.source].shape[0])
        num_rows = stop - start
    return num_rows * fold.repeats == linears[0].shape[1] and num_rows % fold.groups == 0


def tied_scales(fold: Fold, columns: torch.Tensor) -> torch.Tensor:
    return columns.log().view(fold.groups, fold.repeats, -1).mean(dim=1).exp().flatten()


def column_scales(fold: Fold, rows: torch.Tensor) -> torch.Tensor:
    grouped = rows.view(fold.groups, 1, -1)
    return grouped.expand(-1, fold.repeats, -1).reshape(-1)


def row_scales(fold: Fold, num_rows: int, scales: torch.Tensor) -> torch.Tensor:
    """Divisors of the rows `[num_rows]` of a linear source: 1 where a row does not feed the targets."""
    divisors = torch.ones(num_rows)
    divisors[slice(*fold.rows) if fold.rows else slice(None)] = scales
    return divisors


def divided_bias(
    fold: Fold, problem: LayerProblem, scales: torch.Tensor
) -> dict[str, torch.Tensor]:
    """The bias of a norm divided by scales, in its dtype, by the norm's name; empty without one."""
    if fold.source not in problem.norm_biases:
        return {}
    bias = problem.norm_biases[fold.source]
    return {fold.source: (bias.to(torch.float32) / scales).to(bias.dtype)}


def fold_into_norm(
    norm: torch.Tensor, scales: torch.Tensor, offset: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Divide a norm's weight by scales, in its dtype; returns it and the float32 scales really applied. The
    linears so compensate the rounding too. `offset` is added to the weight (`Fold.norm_offset`)."""
    before = norm.to(torch.float32) + offset
    stored = (before / scales - offset).to(norm.dtype)
    exact = before / (stored.to(torch.float32) + offset)
    usable = torch.isfinite(exact) & (exact > 0)
    return torch.where(usable, stored, norm), torch.where(usable, exact, 1.0)


def scaled_problem(
    problem: LayerProblem, columns: Mapping[str, torch.Tensor], rows: Mapping[str, torch.Tensor]
) -> LayerProblem:
    """The layer with its scales folded in: `weight * columns / rows`, inputs divided by `columns`. It is
    measured anew in the unscaled layer, whose inputs are the same, times the scales."""
    remeasure = problem.remeasure

    def measured_again(
        done: Mapping[str, torch.Tensor], only: Collection[str]
    ) -> dict[str, InputStatistics]:
        assert remeasure is not None
        unscaled = {name: part / columns[name] for name, part in done.items()}
        unscaled |= {n: unscaled[n] * rows[n][:, None] for n in rows if n in unscaled}
        return _divided(remeasure(unscaled, only), columns)

    weights = {name: weight * columns[name] for name, weight in problem.weights.items()}
    weights |= {name: weights[name] / divisors[:, None] for name, divisors in rows.items()}
    return replace(
        problem,
        weights=weights,
        statistics=_divided(problem.statistics, columns),
        held_out=_divided(problem.held_out, columns),
        importance={n: part / columns[n].square() for n, part in problem.importance.items()},
        remeasure=None if remeasure is None else measured_again,
    )


def _divided(
    statistics: Mapping[str, InputStatistics], columns: Mapping[str, torch.Tensor]
) -> dict[str, InputStatistics]:
    """Statistics of the scaled inputs; linears with one input share them."""
    shared: dict[tuple[int, int], InputStatistics] = {}
    result = {}
    for name, seen in statistics.items():
        if name not in columns:
            result[name] = seen
            continue
        key = id(seen), id(columns[name])
        if key not in shared:
            shared[key] = seen.divided(columns[name])
        result[name] = shared[key]
    return result
