"""GPTQ's error feedback: the matrix that propagates rounding errors to the remaining input channels.

GPTQ (Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained
Transformers", ICLR 2023, arXiv:2210.17323) takes it from the Cholesky factor of the inverse Hessian.
The factor of the Hessian itself holds the same numbers: with `H = R Rᵀ`, `R` upper triangular,
and `D = W - W'`, the output error is `|D R|²`, and column `k` of `D R` is

    R[k, k] * (w_k - w'_k + sum over j < k of (w_j - w'_j) * R[j, k] / R[k, k])

so the best `w'_k`, given those before it, is `w_k` plus that sum, rounded. (Chee et al., "QuIP", NeurIPS
2023, arXiv:2307.13304, prove that the two are one algorithm.) This needs one factorisation and no
inverse: a quarter of the operations.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

_MAX_DAMP = 1.0
_LEAST_RAISED = 0.005
_ASYMMETRIC_SHARE = 0.25


@dataclass(frozen=True, slots=True)
class Feedback:
    """The feedback matrix, in rounding order.

    Attributes:
        channels: int64 `[in]`, the input channel at each position. The channel that is rounded first
            is last, so that the Cholesky factor needs no reversed copy.
        matrix: float32 `[in, in]`, unit upper triangular; row `p`, right of the diagonal:
            coefficients of the errors at later positions, added to position `p` before it is rounded.
        diagonal: float32 `[in]`, of the Cholesky factor: its square is the weight that a channel's squared
            error keeps behind the feedback.
        damp: the damping that was applied.
    """

    channels: torch.Tensor
    matrix: torch.Tensor
    diagonal: torch.Tensor
    damp: float


def asymmetric_shift(
    weight: torch.Tensor,
    cross: torch.Tensor,
    feedback: Feedback,
    gram: torch.Tensor | None = None,
) -> torch.Tensor:
    """What to add to a weight `[out, in]` whose output shall be that of the float model's inputs.

    For inputs `x` of the layer and `y` of the float model's, `|W yᵀ - W' xᵀ|²` is least where `W'` is nearest
    to `W + W C H⁻¹`, with `C` the sum of `(y - x) xᵀ`, in the metric of `H`: GPTQ's problem with another
    target. (GPTAQ, arXiv:2504.02692, writes it column by column.) A quarter of it is taken, as there, since
    calibration knows `C` with noise.

    Args:
        gram: `x xᵀ`, where `H` is that of other tokens too and may be far less in the directions of `x`: the
            shift then goes no farther than brings the outputs of `x` nearest.
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


def rounding_order(gram: torch.Tensor, act_order: str, group: int, vector: int) -> torch.Tensor:
    """Input channels int64 `[in]` in rounding order.

    Args:
        act_order: `none`: as stored; `group-aware`: whole groups by decreasing sum of the Hessian's diagonal,
            and by decreasing diagonal within each (as in GPTQModel); else (`static`, `dynamic`): all by
            decreasing diagonal.
        group: channels in a group.
        vector: channels that are rounded together, which stay together; by their sums.
    """
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


def feedback(gram: torch.Tensor, order: torch.Tensor, damp: float) -> Feedback | None:
    """Cholesky factorisation of the damped Gram matrix; the inputs must not be all zero.

    `damp` times the mean of the diagonal is added to it, and twice as much after every failure. A dead
    channel (always zero) is rounded to nearest and propagates no error.

    Args:
        gram: float32 `[in, in]`.
        order: channels in the order in which they are rounded.

    Returns:
        None where no damping up to 1 makes the matrix positive definite.
    """
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
