"""AutoRound: tune rounding and ranges of a whole layer by signed gradient descent on the layer's output.

Cheng et al., "Optimize Weight Rounding via Signed Gradient Descent for the Quantization of LLMs", Findings of
EMNLP 2024 (arXiv:2309.05516). As in auto-round, a layer reads what the quantized layers before it give, and
its target is the output of the float model. Gradients pass through the rounding as if it were not there
(straight-through estimator), and their signs alone move the parameters.

On an integer grid a weight is rounded to `s (clamp(round(w / s + v) + z) - z)`: `v` moves it by up to half
a step, and the group's range is its smallest and largest weight, each times a share between 0 and 1, which
give `s` and `z`. On any other grid the groups are fitted once; a weight then goes to the point nearest to
`w + v s`, where `v` is between -0.5 and 0.5 and `s` is the mean distance of points in the group.

Scales around transforms are moved by Adam (QuIP#'s fine-tuning; Tseng et al., ICML 2024, arXiv:2402.04396,
section 5): signs are relaxed to real numbers, which are tuned together with the scales. A weight is
`diag(sv) C diag(su)` with `C` fixed, so that no graph is needed.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..base.device import rows_at_once, temporaries_kept
from ..kinds.base.grid import Grid
from ..kinds.base.incoherence import TransformedTensor
from ..kinds.base.kind import kind_of
from ..kinds.base.tensor import QuantizedTensor
from ..kinds.integer.kind import IntTensor, sequential_groups
from ..kinds.integer.scheme import IntScheme
from .base import LayerProblem, LayerResult, ModuleReport, each_linear, solving
from .rounding import linear_grid, round_weight
from .sign_descent import TunableBlock, TunedRounding, tune

_VALUES = 2**16  # weights at a time: small enough to stay in a core's cache
_DECAYS = (0.9, 0.95)
_TINY = 1e-30


class IntRounding(TunedRounding):
    """The tuned parameters of a linear.

    Args:
        weight: float32 `[out, in]`; it is read again in every step.
        scale_dtype: in which the format stores scales.
        start: the weight rounded to nearest, in whose ranges the descent begins, as far as they are within
            those of the weights; None: it begins with those of the weights.
    """

    def __init__(
        self,
        weight: torch.Tensor,
        scheme: IntScheme,
        scale_dtype: torch.dtype,
        start: IntTensor | None = None,
    ):
        self._shape, self._scheme, self._dtype = weight.shape, scheme, scale_dtype
        size = weight.shape[1] // scheme.num_groups(weight.shape[1])
        self._groups = weight.contiguous().view(-1, size)
        low, high = self._groups.aminmax(dim=1)
        self._low, self._high = low.clamp_(max=0), high.clamp_(min=0)
        self._offset = torch.zeros_like(self._groups)
        self._low_share, self._high_share = torch.ones_like(low), torch.ones_like(high)
        if start is not None:
            self._begin(start)
        super().__init__(self._offset, self._low_share, self._high_share)

    def _begin(self, start: IntTensor) -> None:
        """Take the ranges of a rounded weight: from its lowest code to its highest."""
        scales, zeros = (part.to(torch.float32).view(-1) for part in (start.scales, start.zeros))
        if self._scheme.symmetric:  # both ends alike: the larger one stays so, and sets the scale
            ends = (torch.maximum(-self._low, self._high),) * 2
            reached = (scales * self._scheme.middle,) * 2
        else:
            ends = self._low, self._high
            reached = -zeros * scales, (self._scheme.max_code - zeros) * scales
        for share, end, code in zip(
            (self._low_share, self._high_share), ends, reached, strict=True
        ):
            share.copy_(torch.where(end == 0, 1.0, code / end).clamp_(0, 1))

    def write(self, into: torch.Tensor) -> None:
        target = into.view(self._groups.shape)
        for rows in self._chunks():
            grid = self._grid(rows)
            codes = self._codes(rows, grid)
            target[rows] = codes.sub_(grid.zero).mul_(grid.scale)

    def descend(self, gradient: torch.Tensor, rate: float) -> None:
        """One step of sign gradient descent.

        Args:
            gradient: of the loss, for the rounded weight `[out, in]`.
            rate: length of the step: in steps of the grid, and in shares of the range.
        """
        grouped = gradient.view(self._groups.shape)
        for rows in self._chunks():
            self._descend(rows, grouped[rows].to(torch.float32), rate)

    def tensor(self) -> IntTensor:
        """The quantized weight."""
        codes = torch.empty(self._groups.shape, dtype=torch.uint8)
        grids = []
        for rows in self._chunks():
            grids.append(self._grid(rows))
            codes[rows] = self._codes(rows, grids[-1]).to(torch.uint8)
        out_features, in_features = self._shape
        permuted = self._scheme.permuted
        return IntTensor(
            codes=codes.view(self._shape),
            scales=torch.cat([grid.stored for grid in grids]).view(out_features, -1),
            zeros=torch.cat([grid.zero for grid in grids]).view(out_features, -1).to(torch.uint8),
            scheme=self._scheme,
            group_index=sequential_groups(self._scheme, in_features) if permuted else None,
        )

    def _chunks(self) -> list[slice]:
        at_once = rows_at_once(self._groups.device, _VALUES, self._groups.shape[1])
        return [slice(start, start + at_once) for start in range(0, self._groups.shape[0], at_once)]

    def _range(self, rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
        return self._low[rows] * self._low_share[rows], self._high[rows] * self._high_share[rows]

    def _grid(self, rows: slice) -> _Grid:
        """Symmetric: the larger end of the range gets the code 0, which is one step farther from zero than
        the largest code; where that is the positive end, the scale is negative."""
        low, high = self._range(rows)
        if self._scheme.symmetric:
            scales = torch.where(-low > high, -low, -high) / self._scheme.middle
        else:
            scales = (high - low) / self._scheme.max_code
        stored = scales.to(self._dtype)
        # An all-zero group, or one too small for the dtype, is exactly zero under any finite scale.
        stored = torch.where(stored == 0, torch.ones_like(stored), stored)
        scale = stored.to(torch.float32)
        if self._scheme.symmetric:
            zero = torch.full_like(scale, self._scheme.middle)
        else:
            zero = torch.round(-low / scale).clamp_(0, self._scheme.max_code)
        return _Grid(stored, scale[:, None], zero[:, None])

    def _codes(self, rows: slice, grid: _Grid) -> torch.Tensor:
        steps = (self._groups[rows] / grid.scale).add_(self._offset[rows]).round_()
        return steps.add_(grid.zero).clamp_(0, self._scheme.max_code)

    def _descend(self, rows: slice, gradient: torch.Tensor, rate: float) -> None:
        grid = self._grid(rows)
        steps = self._groups[rows] / grid.scale
        wanted = (steps + self._offset[rows]).round_().add_(grid.zero)
        codes = wanted.clamp(0, self._scheme.max_code)
        inside = codes == wanted
        if self._scheme.symmetric:
            # d w'/d s: what rounding added to the code, and all of the code where it is clamped.
            by_scale = (codes.sub_(grid.zero).sub_(steps.mul_(inside))).mul_(gradient).sum(dim=1)
            self._descend_symmetric(rows, by_scale, rate)
        else:
            self._descend_ends(rows, gradient, codes, wanted, steps, grid, rate)
        sign = gradient.sign_().mul_(inside)
        if self._scheme.symmetric:
            sign.mul_(grid.scale.sign())
        self._offset[rows].sub_(sign, alpha=rate).clamp_(-0.5, 0.5)

    def _descend_symmetric(self, rows: slice, by_scale: torch.Tensor, rate: float) -> None:
        """Only the end of the range that sets the scale has a gradient."""
        low, high = self._range(rows)
        sign = by_scale.sign_()
        of_low = -low > high
        for share, step in (
            (self._low_share, torch.where(of_low, sign, 0.0)),
            (self._high_share, torch.where(of_low, 0.0, -sign)),
        ):
            share[rows].sub_(step, alpha=rate).clamp_(0, 1)

    def _descend_ends(
        self,
        rows: slice,
        gradient: torch.Tensor,
        codes: torch.Tensor,
        wanted: torch.Tensor,
        steps: torch.Tensor,
        grid: _Grid,
        rate: float,
    ) -> None:
        """Asymmetric: a weight beyond an end is that end, up to the rounding of the zero code; one inside
        depends on both, through the scale."""
        below, above = wanted < 0, wanted > self._scheme.max_code
        exact = -self._range(rows)[0][:, None] / grid.scale
        by_step = torch.where(below | above, exact - grid.zero, codes - grid.zero - steps)
        by_scale = by_step.mul_(gradient).sum(dim=1) / self._scheme.max_code
        by_low = (gradient * below).sum(dim=1) - by_scale
        by_high = (gradient * above).sum(dim=1) + by_scale
        for share, end, slope in (
            (self._low_share, self._low, by_low),
            (self._high_share, self._high, by_high),
        ):
            share[rows].sub_((end[rows] * slope).sign_(), alpha=rate).clamp_(0, 1)


class GridRounding(TunedRounding):
    """The tuned parameters of a linear; the gradient passes through the rounding (straight-through).

    Args:
        weight: float32 `[out, in]`; it is read again in every step.
        importance: float32 `[in]`, weight of each channel's squared error in the fit.
    """

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
        """One step of sign gradient descent, for the gradient of the rounded weight `[out, in]`."""
        sign = gradient.unflatten(1, (-1, self._grid.group)).to(torch.float32).sign()
        self._offset.sub_(sign, alpha=rate).clamp_(-0.5, 0.5)

    def tensor(self) -> QuantizedTensor:
        """The quantized weight."""
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
        """The weight with its scales as they are stored."""
        return self._tensor.with_scales(self._inputs.values, self._outputs.values)


class _Grid(NamedTuple):
    """Scale in the stored dtype `[groups]`, and scale and zero code in float32 `[groups, 1]`."""

    stored: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor


class _Adam:
    """A vector and its moments (Kingma and Ba, arXiv:1412.6980); zeros stay zero.

    Args:
        values: float32; their mean magnitude is the length of a step at rate 1.
    """

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
