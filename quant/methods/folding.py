"""Folding input scales into the previous operation (norm or linear); shared by AWQ and SmoothQuant."""

from __future__ import annotations

import torch

from ..model.families import Fold
from .base import LayerProblem


def can_fold(fold: Fold, problem: LayerProblem) -> bool:
    """Whether the fold can be applied.

    Scaling an unquantized target or a source's bias would round its stored floats once more, so such folds
    are skipped. With GQA a value head feeds several query heads, so its rows do not match the columns of
    the output projection.
    """
    if any(name not in problem.weights and name not in problem.routers for name in fold.targets):
        return False
    if fold.source in problem.norms:
        return True
    if fold.source not in problem.weights or fold.source in problem.with_bias:
        return False
    start, stop = fold.rows or (0, problem.weights[fold.source].shape[0])
    return stop - start == problem.weights[fold.targets[0]].shape[1]


def row_scales(fold: Fold, num_rows: int, scales: torch.Tensor) -> torch.Tensor:
    """Divisors of the rows `[num_rows]` of a linear source: 1 where a row does not feed the targets."""
    divisors = torch.ones(num_rows)
    divisors[slice(*fold.rows) if fold.rows else slice(None)] = scales
    return divisors


def fold_into_norm(
    norm: torch.Tensor, scales: torch.Tensor, offset: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Divide a norm's weight by scales; returns the scales that its stored dtype really applied.

    The result is stored in the norm's own dtype, often bfloat16. Taking the scales from the
    stored weight keeps the fold exact: the linears compensate the norm's rounding too.

    Args:
        offset: added to the norm's weight before multiplying (`Fold.norm_offset`).

    Returns:
        The new norm weight `[in]` in its dtype, and the float32 scales `[in]`.
    """
    before = norm.to(torch.float32) + offset
    stored = (before / scales - offset).to(norm.dtype)
    exact = before / (stored.to(torch.float32) + offset)
    usable = torch.isfinite(exact) & (exact > 0)
    return torch.where(usable, stored, norm), torch.where(usable, exact, 1.0)
