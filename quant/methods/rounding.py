"""Rounding to nearest (RTN) to any grid, the last step of every method; statistics of experts.

An expert's Gram matrix from fewer tokens than columns has unknown directions, into which error feedback moves
errors. Its prior is the router's, of the same input and all tokens; a second projection's is the mean of its
diagonal. (Shrinkage by Ledoit and Wolf, 2004, weighed as so many tokens as columns.)
"""

from __future__ import annotations

from collections.abc import Collection

import torch

from ...base.errors import BadInput
from ..base.scheme import E4M3_MAX, Scheme
from ..families.layer_map import LayerMap, fused_name
from ..kinds.base.grid import Grid
from ..kinds.base.kind import Rounding, kind_of
from ..kinds.base.tensor import QuantizedTensor, require_finite
from .base import InputStatistics, LayerProblem, LayerResult, ModuleReport, each_linear, full_name

# Share of the layer's tokens below which an expert is rounded plainly, as in GPTQModel.
LEAST_SHARE = 0.005
WORSE_EXPERT = "plain rounding of the expert is better on held-out tokens"


def routers_of(family: LayerMap, linears: Collection[str]) -> set[str]:
    return {
        router
        for router in family.routers
        if any(linear.startswith(router.rpartition(".")[0] + ".") for linear in linears)
    }


def router_of(problem: LayerProblem, linear: str) -> InputStatistics | None:
    """The statistics of all tokens of the layer, for an expert; None for any other linear."""
    for router in routers_of(problem.family, (linear,)):
        if router in problem.statistics:
            seen = problem.statistics[router]
            if seen.num_tokens > problem.statistics[linear].num_tokens:
                return seen
    return None


def too_few(problem: LayerProblem, linear: str) -> bool:
    router = router_of(problem, linear)
    if router is None:
        return False
    return problem.statistics[linear].num_tokens < LEAST_SHARE * router.num_tokens


def worse_expert(problem: LayerProblem, linear: str, report: ModuleReport) -> bool:
    """True if plain rounding of an expert has a smaller error on held-out tokens."""
    errors = report.held_out_error, report.rtn_held_out_error
    if errors[0] is None or errors[1] is None or router_of(problem, linear) is None:
        return False
    return errors[0] > errors[1]


def gram_of(problem: LayerProblem, linear: str) -> torch.Tensor:
    """The Gram matrix `[in, in]` of a linear's input, an expert's shrunk; not to be modified."""
    statistics, router = problem.statistics[linear], router_of(problem, linear)
    gram = statistics.gram
    if router is None or not statistics.num_tokens:
        return gram
    width = len(gram)
    weight = width / (width + statistics.num_tokens)
    shrunk = gram * (1 - weight)
    if len(router.gram) == width:
        return shrunk.add_(router.gram, alpha=weight * statistics.num_tokens / router.num_tokens)
    shrunk.diagonal().add_(weight * gram.diagonal().mean())
    return shrunk


def own_gram(problem: LayerProblem, linear: str) -> torch.Tensor | None:
    """The Gram matrix of an expert's own tokens, which `gram_of` shrinks; None for any other linear."""
    return None if router_of(problem, linear) is None else problem.statistics[linear].gram


def squares_of(problem: LayerProblem, linear: str) -> torch.Tensor:
    """The diagonal of `gram_of` over the tokens, float32 `[in]`: mean squares of the inputs."""
    statistics, router = problem.statistics[linear], router_of(problem, linear)
    squares = statistics.gram.diagonal() / statistics.num_tokens
    if router is None:
        return squares
    weight = len(squares) / (len(squares) + statistics.num_tokens)
    prior = squares.mean()
    if len(router.gram) == len(squares):
        prior = router.gram.diagonal() / router.num_tokens
    return squares * (1 - weight) + prior * weight


_LEAST_IMPORTANCE = 1e-4  # of the mean


def round_weight(
    problem: LayerProblem, linear: str, weight: torch.Tensor, columns: torch.Tensor | None = None
) -> QuantizedTensor:
    """Round `[out, in]`, multiplied by `columns`, in the ranges asked for. BadInput: not finite."""
    weights = None
    if problem.options.ranges == "weighted" and problem.schemes[linear].searches_ranges:
        weights = importance(problem, linear, columns)
    return round_plain(problem, linear, weight, weights)


def importance(
    problem: LayerProblem, linear: str, columns: torch.Tensor | None = None
) -> torch.Tensor | None:
    """Mean square of each column's input, float32 `[in]` (or given), as in llama.cpp; None without tokens.
    Columns are over their scale squared; those that are never activated count a little."""
    squares = problem.importance.get(linear)
    if squares is None:
        statistics = problem.statistics.get(linear)
        if statistics is None or not statistics.num_tokens or too_few(problem, linear):
            return None
        squares = squares_of(problem, linear)
    if columns is not None:
        squares = squares / columns.square()
    mean = float(squares.mean())
    usable = 0 < mean < float("inf")
    return (squares / mean).clamp_(min=_LEAST_IMPORTANCE) if usable else None


def round_plain(
    problem: LayerProblem, linear: str, weight: torch.Tensor, weights: torch.Tensor | None = None
) -> QuantizedTensor:
    """Round `weight` `[out, in]` to nearest without data: RTN, the yardstick; BadInput as `round_weight`.
    With `weights` of squared errors `[in]` in the ranges that they make best."""
    module = full_name(problem.prefix, linear)
    require_finite(weight, module)
    return kind_of(problem.schemes[linear]).round(
        weight,
        problem.scale_dtypes[linear],
        name=module,
        input_scale=input_scale(problem, linear),
        largest=fused_largest(problem, linear, weight),
        importance=weights,
    )


def linear_grid(problem: LayerProblem, linear: str, weight: torch.Tensor) -> Grid:
    """The grid of a linear's scheme, for its weight `[out, in]` or that of several joined along `out`."""
    how = Rounding(
        problem.scale_dtypes[linear],
        input_scale=input_scale(problem, linear),
        mse=problem.options.ranges == "mse",
        largest=fused_largest(problem, linear, weight),
    )
    return kind_of(problem.schemes[linear]).grid_for(weight.shape, how)


def input_scale(problem: LayerProblem, linear: str) -> torch.Tensor | None:
    """The scale of a linear's static activations, float32 `[1]` (of NVFP4 a divisor), for the largest
    calibration input, 1 for zeros; None where its scheme has none. An expert without tokens takes that of the
    same projection in the others; BadInput where no token reached any."""
    scheme: Scheme = problem.schemes[linear]
    activations = scheme.activations
    if activations is None or activations.dynamic:
        return None
    leaf = linear.rpartition(".")[2]
    alike = [name for name in problem.statistics if name.rpartition(".")[2] == leaf]
    names = [linear] if problem.statistics[linear].num_tokens else alike
    if not any(problem.statistics[name].num_tokens for name in names):
        raise BadInput(
            f"no calibration token reached {full_name(problem.prefix, linear)}, so that it has no static "
            "activation scale: give more --num-samples, or dynamic activations"
        )
    largest = torch.stack([problem.statistics[name].abs_max.max() for name in names]).max()
    if activations.kind == "nvfp4":
        from ..kinds.fp4.kind import global_scale_of

        return global_scale_of(largest)
    scale = largest / (127.5 if activations.kind == "int8" else E4M3_MAX)
    return torch.where(scale > 0, scale, 1.0).to(torch.float32).view(1)


def fused_largest(problem: LayerProblem, linear: str, weight: torch.Tensor) -> torch.Tensor | None:
    """The largest magnitude of `weight` and of linears that servers fuse with it, if they share a scale."""
    if not problem.schemes[linear].fuses_scales:
        return None
    fused = [
        other
        for name, other in problem.weights.items()
        if name != linear
        and fused_name(name) == fused_name(linear)
        and problem.schemes[name].fuses_scales
    ]
    return torch.stack([part.abs().max() for part in (weight, *fused)]).max()


def quantize_layer(problem: LayerProblem) -> LayerResult:
    """Round every linear; an expert that is better without ranges of its own, in plain ones."""

    def solve(linear: str) -> tuple[QuantizedTensor, ModuleReport]:
        weight = problem.weights[linear]
        codes = round_weight(problem, linear, weight)
        if linear not in problem.statistics:
            return codes, problem.report(linear, weight, weight)  # no errors are measured
        effective = codes.dequantize()
        if problem.options.ranges != "weighted":
            return codes, problem.report(linear, effective, effective)
        plain = round_plain(problem, linear, weight)
        rounded = plain.dequantize()
        report = problem.report(linear, effective, rounded)
        if worse_expert(problem, linear, report):
            return plain, problem.report(linear, rounded, rounded, fallback=WORSE_EXPERT)
        return codes, report

    return LayerResult.of(each_linear(problem, solve))
