"""Moving input scales into the operation before: what methods that smooth have in common."""

from __future__ import annotations

import torch

from ..model.families import Fold
from .base import LayerProblem


def can_fold(fold: Fold, problem: LayerProblem) -> bool:
    """Whether the pair is there to be scaled.

    A target that stays unquantized would have to be stored rounded again, and so would a bias of the
    source; neither is worth a worse float weight. A grouped value head feeds several query heads, so its
    rows do not match the columns of the output projection.
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
    """By what each row `[num_rows]` of a linear source is divided: 1 where it does not feed the targets."""
    divisors = torch.ones(num_rows)
    divisors[slice(*fold.rows) if fold.rows else slice(None)] = scales
    return divisors


def fold_into_norm(
    norm: torch.Tensor, scales: torch.Tensor, offset: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Divide what a norm multiplies by, and say which scales were really divided out.

    The result is stored in the norm's own dtype, often bfloat16. Taking the scales from what is stored
    keeps the fold exact: the linears make good precisely what the norm lost, its rounding included.

    Args:
        offset: what the norm adds to its weight before it multiplies (`Fold.norm_offset`).

    Returns:
        The new norm weight `[in]` in its dtype, and the float32 scales `[in]`.
    """
    before = norm.to(torch.float32) + offset
    stored = (before / scales - offset).to(norm.dtype)
    exact = before / (stored.to(torch.float32) + offset)
    usable = torch.isfinite(exact) & (exact > 0)
    return torch.where(usable, stored, norm), torch.where(usable, exact, 1.0)
