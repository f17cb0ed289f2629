"""AutoRound: tune rounding and ranges of a whole layer by signed gradient descent on the layer's output.

Cheng et al., Findings of EMNLP 2024 (arXiv:2309.05516). As in auto-round, a layer reads what the quantized
layers before it give, and its target is the float model's output. Gradients pass through the rounding
(straight-through estimator), and their signs alone move the parameters.

On an integer grid rounding and ranges are tuned (`int_rounding.py`). On any other the groups are fitted once;
a weight goes to the point nearest to `w + v s`, `v` in ±0.5, `s` the group's mean distance of points.

Scales around transforms are moved by Adam (QuIP#, arXiv:2402.04396, section 5), with signs as real numbers: a
weight is `diag(sv) C diag(su)` with `C` fixed, so that no graph is needed.
"""

from __future__ import annotations

import torch

from ..base.device import temporaries_kept
from ..kinds.base.grid import Grid
from ..kinds.base.incoherence import TransformedTensor
from ..kinds.base.kind import kind_of
from ..kinds.base.tensor import QuantizedTensor
from ..kinds.integer.kind import IntTensor
from ..kinds.integer.scheme import IntScheme
from .base import LayerProblem, LayerResult, ModuleReport, each_linear, solving
from .int_rounding import IntRounding
from .rounding import linear_grid, round_weight
from .sign_descent import TunedRounding, tune

_DECAYS = (0.9, 0.95)  # of the mean gradient and of its square
_TINY = 1e-30  # against a division by zero where no gradient was


class GridRounding(TunedRounding):
    """Tuned parameters of a linear `[out, in]` on a grid, fitted by weights `[in]` of squared errors."""

    def __init__(self, weight: torch.Tensor, grid: Grid, importance: torch.Tensor | None):
        self._grid = grid
        self._groups = weight.unflatten(1, (-1, grid.group))
        spread = None if importance is None else importance.view(-1, grid.group)
        self._parameters = grid.fit(self._groups, spread)
        moved = grid.round(self._groups, self._parameters).sub_(self._groups)
        # An error that is evenly spread over a step has a twelfth of its square as variance.
        self._step = moved.square_().mean(dim=-1, keepdim=True).mul_(12).sqrt_()
        self._offset = torch.zeros_like(self._groups)
        super().__init__(self._offset)

    def write(self, into: torch.Tensor) -> None:
        into.copy_(self._values())

    def descend(self, gradient: torch.Tensor, rate: float) -> None:
        sign = gradient.unflatten(1, (-1, self._grid.group)).to(torch.float32).sign()
        self._offset.sub_(sign, alpha=rate).clamp_(-0.5, 0.5)

    def tensor(self) -> QuantizedTensor:
        return self._grid.tensor(self._values(), self._parameters)

    def _values(self) -> torch.Tensor:
        moved = torch.addcmul(self._groups, self._offset, self._step)
        return self._grid.round(moved, self._parameters).flatten(1)


class TunedScales(TunedRounding):
    """The tuned scales of a linear's inputs and outputs; see `TunedRounding`."""

    def __init__(self, tensor: TransformedTensor):
        self._tensor, sides = tensor, tensor.transforms
        self._codes = sides.unscaled(tensor.inner()).contiguous()
        self._inputs, self._outputs = _Adam(sides.inputs), _Adam(sides.outputs)
        super().__init__(self._inputs.values, self._outputs.values)

    def write(self, into: torch.Tensor) -> None:
        into.copy_((self._codes * self._inputs.values).mul_(self._outputs.values[:, None]))

    def descend(self, gradient: torch.Tensor, rate: float) -> None:
        """One step for the gradient of the weight `[out, in]`; `rate` is in mean magnitudes of the scales."""
        by_code = gradient.to(torch.float32) * self._codes
        by_input, by_output = self._outputs.values @ by_code, by_code @ self._inputs.values
        self._inputs.descend(by_input, rate)
        self._outputs.descend(by_output, rate)

    def tensor(self) -> TransformedTensor:
        return self._tensor.with_scales(self._inputs.values, self._outputs.values)


class _Adam:
    """A vector and its moments (Kingma and Ba, arXiv:1412.6980); zeros stay zero."""

    def __init__(self, values: torch.Tensor):
        self.values = values
        self._live = values != 0
        self._length = float(values[self._live].abs().mean()) if bool(self._live.any()) else 0.0
        self._mean, self._square = torch.zeros_like(values), torch.zeros_like(values)
        self._steps = 0

    def descend(self, gradient: torch.Tensor, rate: float) -> None:
        self._steps += 1
        first, second = _DECAYS
        self._mean.lerp_(gradient, 1 - first)
        self._square.lerp_(gradient.square(), 1 - second)
        spread = (self._square / (1 - second**self._steps)).sqrt_().add_(_TINY)
        step = (self._mean / spread).mul_(self._live)
        self.values.sub_(step, alpha=rate * self._length / (1 - first**self._steps))


_NO_BLOCK = "its layer is not run"


def quantize_layer(problem: LayerProblem) -> LayerResult:
    """Tune every linear of a layer; what cannot be tuned is rounded to nearest, which its report says."""
    plain = each_linear(problem, lambda name: round_weight(problem, name, problem.weights[name]))
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
    options = problem.options
    with solving(problem, roundings), temporaries_kept():
        tune(
            problem.block,
            roundings,
            {name: problem.weights[name].shape for name in roundings},
            iters=options.iters,
            rate=options.lr or 1 / options.iters,
            batch_size=options.batch_size,
        )
    tuned = {name: rounding.tensor() for name, rounding in roundings.items()}
    return tuned, str(refusals.pop()) if refusals else _NO_BLOCK


def _rounding(
    problem: LayerProblem, name: str, plain: QuantizedTensor
) -> IntRounding | GridRounding:
    """Tuned rounding: integers with tuned ranges, others with ranges fitted to the inputs."""
    weight, scheme = problem.weights[name], problem.schemes[name]
    if isinstance(scheme, IntScheme):
        assert isinstance(plain, IntTensor)
        return IntRounding(weight, scheme, problem.scale_dtypes[name], plain)
    seen = problem.statistics.get(name)
    importance = seen.gram.diagonal() if seen is not None and seen.num_tokens else None
    return GridRounding(weight, linear_grid(problem, name, weight), importance)
