"""Solvers apart from methods: GPTQ's error feedback on the grid of a method that rounds to nearest."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from ..base.errors import BadInput
from ..base.scheme import Scheme
from .base import LayerProblem, LayerResult, Method, SchemeOptions
from .gptq import Gptq

_ROUNDING = ("rtn", "int8", "fp8", "nf4", "fp4", "nvfp4", "mxfp4", "squeezellm")
_SOLVING = ("gptq", "autoround")  # are solvers themselves
_SMOOTHING = ("awq", "smoothquant")  # round what they smoothed by the solver themselves


def solver_of(method: str, asked: str) -> Literal["nearest", "gptq"]:
    """The solver of a method: with `auto` the one that is best for it.

    AWQ's scales and GPTQ's feedback add up: each lowers the error that the other leaves. Without calibration
    there is no feedback, so methods that need none stay with the nearest.
    """
    if asked == "gptq":
        return "gptq"
    return "gptq" if asked == "auto" and method == "awq" else "nearest"


def solver_name(method: str, solver: str) -> str:
    """What chooses a method's codes: `nearest`, `gptq` or `autoround`; `solver` is what `solver_of` says."""
    return method if method in _SOLVING else solver


def with_solver(method: Method, solver: str) -> Method:
    """The method with its codes chosen by `solver`: `nearest` or `gptq`.

    Raises:
        BadInput: the method chooses its codes itself.
    """
    if solver == "nearest" or method.name == "gptq":
        return method
    if method.name in _SMOOTHING:
        return SolvedGrid(method, method)
    if method.name not in _ROUNDING:
        known = ", ".join((*_ROUNDING, *_SMOOTHING))
        raise BadInput(
            f"--solver {solver}: method {method.name} chooses its codes itself; use {known}"
        )
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
