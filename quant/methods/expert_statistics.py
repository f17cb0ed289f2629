"""Statistics of experts, shrunk towards all tokens of the layer where few were routed to them.

An expert's Gram matrix from fewer tokens than it has columns has directions in which nothing is known, and
error feedback moves errors into just those. The router reads the same input as every expert's first
projections, from all tokens: it is the prior. A second projection's input has no such relative, so its prior
is the mean of its diagonal. (Ledoit and Wolf, "A well-conditioned estimator for large-dimensional covariance
matrices", 2004, for shrinkage; its weight here is that of as many tokens as there are columns.)
"""

from __future__ import annotations

from collections.abc import Collection

import torch

from ..families.layer_map import LayerMap
from .base import InputStatistics, LayerProblem, ModuleReport

# Share of the layer's tokens below which an expert is rounded plainly, as in GPTQModel.
LEAST_SHARE = 0.005
WORSE_EXPERT = "plain rounding of the expert is better on held-out tokens"


def routers_of(family: LayerMap, linears: Collection[str]) -> set[str]:
    """The routers of the experts among these linears."""
    return {
        router
        for router in family.routers
        if any(linear.startswith(_block(router)) for linear in linears)
    }


def router_of(problem: LayerProblem, linear: str) -> InputStatistics | None:
    """The statistics of all tokens of the layer, for an expert; None for any other linear."""
    for router in routers_of(problem.family, (linear,)):
        if router in problem.statistics:
            seen = problem.statistics[router]
            if seen.num_tokens > problem.statistics[linear].num_tokens:
                return seen
    return None


def _block(router: str) -> str:
    """The beginning of the names of everything beside a router, its experts among them."""
    return router.rpartition(".")[0] + "."


def too_few(problem: LayerProblem, linear: str) -> bool:
    """Whether so few tokens reached an expert that its statistics say nothing."""
    router = router_of(problem, linear)
    if router is None:
        return False
    return problem.statistics[linear].num_tokens < LEAST_SHARE * router.num_tokens


def worse_expert(problem: LayerProblem, linear: str, report: ModuleReport) -> bool:
    """Whether plain rounding of an expert has a smaller error on held-out tokens."""
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
