"""Solvers apart from methods: GPTQ's error feedback on the grid of a method that rounds to nearest."""

from __future__ import annotations

from dataclasses import replace

from ..base.errors import BadInput
from ..base.scheme import Scheme
from .base import LayerProblem, LayerResult, Method, SchemeOptions
from .gptq import Gptq
from .options import SMOOTHING, refuse_solver

_SOLVING = ("gptq", "autoround")  # are solvers themselves


def solver_name(method: str, solver: str) -> str:
    """Name the solver of a method's codes: `nearest`, `gptq` or `autoround`; `solver` is of `solver_of`."""
    return method if method in _SOLVING else solver


def with_solver(method: Method, solver: str) -> Method:
    """The method with its codes chosen by `solver`: `nearest` or `gptq`.

    Raises:
        BadInput: see `refuse_solver`.
    """
    refuse_solver(method.name, solver)
    if solver == "nearest" or method.name == "gptq":
        return method
    if method.name in SMOOTHING:
        return SolvedGrid(method, method)
    return SolvedGrid(method, Gptq())


class SolvedGrid:
    """A method's grids and formats, with codes from error feedback.

    Args:
        grid: the method that makes the schemes.
        solver: the method that quantizes.
    """

    needs_statistics = True

    def __init__(self, grid: Method, solver: Method):
        self._grid, self._solver = grid, solver
        self.name: str = grid.name
        self.default_format: str = grid.default_format
        self.grouped: bool = grid.grouped
        self.sequential: bool = solver.sequential
        self.num_samples: int = max(grid.num_samples, solver.num_samples)
        self.blockwise: bool = solver.blockwise

    def scheme(self, options: SchemeOptions) -> Scheme:
        if options.act_order == "dynamic":
            raise BadInput("--act-order dynamic: only method gptq permutes groups")
        return self._grid.scheme(replace(options, act_order=SchemeOptions().act_order))

    def quantize_layer(self, problem: LayerProblem) -> LayerResult:
        return self._solver.quantize_layer(problem)
