"""AutoRound: tune rounding and ranges of a whole layer by signed gradient descent on the layer's output.

Cheng et al., "Optimize Weight Rounding via Signed Gradient Descent for the Quantization of LLMs", Findings of
EMNLP 2024 (arXiv:2309.05516). As in auto-round, a layer reads what the quantized layers before it give, and
its target is the output of the float model.
"""

from __future__ import annotations

from ..base.device import temporaries_kept
from ..kinds.base.kind import kind_of
from ..kinds.base.tensor import QuantizedTensor
from ..kinds.integer.kind import IntTensor
from ..kinds.integer.scheme import IntScheme
from .base import LayerProblem, LayerResult, ModuleReport, solving
from .rounding import linear_grid, round_weight
from .sign_descent import TunableBlock, tune
from .tuned_roundings import GridRounding, IntRounding

_NO_BLOCK = "its layer is not run"


def quantize_layer(problem: LayerProblem) -> LayerResult:
    """Tune every linear of a layer; what cannot be tuned is rounded to nearest, which its report says."""
    plain = {name: round_weight(problem, name, weight) for name, weight in problem.weights.items()}
    tuned, reason = _tuned(problem, plain)
    weights: dict[str, QuantizedTensor] = {}
    reports: list[ModuleReport] = []
    for name, rounded in plain.items():
        weights[name] = tuned.get(name, rounded)
        fallback = None if name in tuned else reason
        reports.append(
            problem.report(
                name, weights[name].dequantize(), rounded.dequantize(), fallback=fallback
            )
        )
    return LayerResult(weights, {}, reports)


def _tuned(
    problem: LayerProblem, plain: dict[str, QuantizedTensor]
) -> tuple[dict[str, QuantizedTensor], str]:
    """The tuned linears, from `plain`, those rounded to nearest, and why the others are not."""
    if problem.block is None:
        return {}, _NO_BLOCK
    refusals = {kind_of(scheme).refuses_solver for scheme in problem.schemes.values()} - {None}
    names = [
        name for name, scheme in problem.schemes.items() if kind_of(scheme).refuses_solver is None
    ]
    roundings = {name: _rounding(problem, name, plain[name]) for name in names}
    if not roundings:
        return {}, str(refusals.pop())
    with solving(problem, roundings):
        _descend(problem, problem.block, roundings)
    tuned = {name: rounding.tensor() for name, rounding in roundings.items()}
    return tuned, str(refusals.pop()) if refusals else _NO_BLOCK


def _rounding(
    problem: LayerProblem, name: str, plain: QuantizedTensor
) -> IntRounding | GridRounding:
    """Integers have tuned ranges too, which begin as those of rounding to nearest; the ranges of other grids
    are fitted to the inputs' second moments."""
    weight, scheme, dtype = (
        problem.weights[name],
        problem.schemes[name],
        problem.scale_dtypes[name],
    )
    if isinstance(scheme, IntScheme):
        assert isinstance(plain, IntTensor)
        return IntRounding(weight, scheme, dtype, plain)
    seen = problem.statistics.get(name)
    importance = seen.gram.diagonal() if seen is not None and seen.num_tokens else None
    return GridRounding(weight, linear_grid(problem, name, weight), importance)


def _descend(
    problem: LayerProblem, block: TunableBlock, roundings: dict[str, IntRounding | GridRounding]
) -> None:
    options = problem.options
    with temporaries_kept():
        tune(
            block,
            roundings,
            {name: problem.weights[name].shape for name in roundings},
            iters=options.iters,
            rate=options.lr or 1 / options.iters,
            batch_size=options.batch_size,
        )
