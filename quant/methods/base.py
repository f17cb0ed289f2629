"""The problem that a method solves: one decoder layer, with what its linears see on calibration data."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch

from ..base.errors import BadInput
from ..base.scheme import Scheme
from ..grids.input_statistics import InputStatistics, relative
from ..model.families import Family
from ..tensors.base import QuantizedTensor


@dataclass(frozen=True, slots=True)
class MethodOptions:
    """The knobs of single methods; each method reads its own; see `options.refuse_knobs`.

    Attributes:
        act_order: GPTQ: columns in the order of their importance, with groups as they lie (`static`),
            with permuted groups (`dynamic`), or in their own order (`none`).
        damp: GPTQ: share of the mean diagonal that is added to it.
        true_sequential: GPTQ: later linears of a layer see what the earlier ones became.
        mse: GPTQ: search the range of each group for the least `sum |w - w'|^2.4`.
        alpha: SmoothQuant: how much of the difficulty moves into the weights.
    """

    act_order: Literal["static", "dynamic", "none"] = "static"
    damp: float = 0.01
    true_sequential: bool = True
    mse: bool = False
    alpha: float = 0.5

    def __post_init__(self) -> None:
        if not 0 <= self.alpha <= 1:
            raise BadInput(
                f"--alpha {self.alpha:g}: give 0 (all in the inputs) to 1 (all in the weights)"
            )
        if not 0 <= self.damp <= 1:
            raise BadInput(f"--damp {self.damp:g}: give a share of the mean diagonal, 0 to 1")


@dataclass(frozen=True, slots=True)
class ModuleReport:
    """What was done to one linear, and what it cost.

    Attributes:
        error: relative output error on the inputs that calibration showed it, squared norm over squared
            norm; of a
            linear with more than 512 output channels, on at least 256 evenly spaced ones, unless the
            method computed it on all of them anyway.
        rtn_error: the same for plain rounding to the same scheme.
        held_out_error, rtn_held_out_error: both on tokens that no method saw; None: none were given.
        num_tokens: calibration tokens that reached the linear.
        ratio: exponent of the activation magnitude in the chosen input scales; None: inputs unscaled.
        clipped: share of groups whose range was shrunk before rounding.
        damp: damping that the Hessian took; None where the method has none.
        fallback: why the linear was rounded plainly after all; None: it was not.
    """

    module: str
    error: float
    rtn_error: float
    held_out_error: float | None = None
    rtn_held_out_error: float | None = None
    num_tokens: int = 0
    ratio: float | None = None
    clipped: float = 0.0
    damp: float | None = None
    fallback: str | None = None


Remeasure = Callable[[Mapping[str, torch.Tensor], Collection[str]], dict[str, InputStatistics]]


@dataclass(frozen=True, slots=True)
class LayerProblem:
    """One decoder layer to quantize; names are relative to `prefix`.

    Attributes:
        prefix: such as `model.layers.3`.
        schemes: what each linear shall become.
        scale_dtypes: in which its scales are stored.
        weights: float32 `[out, in]` of each linear that shall be quantized.
        statistics: of the input of each of these linears. Where the method is sequential and
            `remeasure` is there, they are empty at first: the method puts in what it asked for.
        norms: norm weights in the dtype of the checkpoint.
        with_bias: the linears that have a bias.
        routers: float32 weights that stay floats but read an input that may be scaled.
        held_out: statistics of inputs that the method must not use, for the report; may be empty.
        remeasure: runs the layer with some weights replaced by others and gives anew the statistics of
            the linears that are named; None where only stored statistics are at hand.
    """

    prefix: str
    family: Family
    schemes: dict[str, Scheme]
    scale_dtypes: dict[str, torch.dtype]
    weights: dict[str, torch.Tensor]
    statistics: dict[str, InputStatistics]
    norms: dict[str, torch.Tensor]
    with_bias: frozenset[str]
    routers: dict[str, torch.Tensor] = field(default_factory=dict)
    held_out: dict[str, InputStatistics] = field(default_factory=dict)
    remeasure: Remeasure | None = None
    options: MethodOptions = MethodOptions()
    _energies: dict[str, float] = field(default_factory=dict, init=False, repr=False)

    def energy(self, linear: str) -> float:
        """Squared norm `|XWᵀ|²` of the linear's output on the calibration data, computed once."""
        if linear not in self._energies:
            errors = self.statistics[linear].row_errors(self.weights[linear])
            self._energies[linear] = float(errors.sum())
        return self._energies[linear]

    def error(self, linear: str, effective: torch.Tensor) -> float:
        """Relative output error on the calibration data of `effective` used in place of the weight."""
        errors = self.statistics[linear].row_errors(self.weights[linear] - effective)
        return relative(float(errors.sum()), self.energy(linear))

    def report(
        self,
        linear: str,
        effective: torch.Tensor,
        rounded: torch.Tensor,
        *,
        error: float | None = None,
        rtn_error: float | None = None,
        ratio: float | None = None,
        clipped: float = 0.0,
        damp: float | None = None,
        fallback: str | None = None,
    ) -> ModuleReport:
        """The report of one linear.

        Args:
            effective: what the weight became, in the terms of the unscaled layer.
            rounded: what plain rounding would have made of it.
            error, rtn_error: relative errors of the two, where both are known already.
        """
        both = (effective,) if rounded is effective else (effective, rounded)
        weight = self.weights[linear]
        if error is None or rtn_error is None:
            seen = self.statistics[linear].sampled_errors(weight, *both)
            error, rtn_error = seen[0], seen[-1]
        unseen: list[float | None] = [None]
        if linear in self.held_out:
            unseen = [*self.held_out[linear].sampled_errors(weight, *both)]
        return ModuleReport(
            module=f"{self.prefix}.{linear}",
            error=error,
            rtn_error=rtn_error,
            held_out_error=unseen[0],
            rtn_held_out_error=unseen[-1],
            num_tokens=self.statistics[linear].num_tokens,
            ratio=ratio,
            clipped=clipped,
            damp=damp,
            fallback=fallback,
        )


@dataclass(frozen=True, slots=True)
class LayerResult:
    """What a method made of a layer.

    Attributes:
        weights: the quantized linears.
        norms: norms that changed, in the checkpoint's dtype.
        reports: one for each of `weights`, in the same order.
        routers: routers that changed, float32.
    """

    weights: dict[str, QuantizedTensor]
    norms: dict[str, torch.Tensor]
    reports: list[ModuleReport]
    routers: dict[str, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SchemeOptions:
    """What was asked of the grid; None leaves it to the method.

    Attributes:
        bits, group_size, symmetric: of integer grids; the group size is already one that divides.
        granularity: of fp8 weights: tensor, channel or block.
        activations: `dynamic`, `static` or `none`.
        double_quant: nf4 and fp4: magnitudes in 8 bits.
        outlier_threshold: int8: inputs beyond it are multiplied in 16 bits (LLM.int8()).
        sparse_fraction: squeezellm: share of weights that stay floats.
        act_order: see `MethodOptions`.
    """

    bits: int | None = None
    group_size: int | None = None
    symmetric: bool | None = None
    granularity: str | None = None
    activations: str | None = None
    double_quant: bool = False
    outlier_threshold: float | None = None
    sparse_fraction: float | None = None
    act_order: str = "static"


class Method(Protocol):
    """A way to choose codes.

    Attributes:
        name: as in `--method`.
        default_format: where `--format` is not given and the scheme fits.
        needs_statistics: whether it looks at calibration data at all.
        grouped: whether its scheme has groups of input channels that must divide the width.
        sequential: whether it quantizes the linears of a layer in the order of execution, each on what
            those before it became, unless `MethodOptions.true_sequential` is off.
    """

    name: str
    default_format: str
    needs_statistics: bool
    grouped: bool
    sequential: bool

    def scheme(self, options: SchemeOptions) -> Scheme:
        """The scheme that this method makes of what was asked.

        Raises:
            BadInput: a width or a choice that the method does not have.
        """
        ...

    def quantize_layer(self, problem: LayerProblem) -> LayerResult:
        """Choose the codes of every linear of a layer.

        Raises:
            BadInput: a weight that cannot be quantized, such as one that holds NaN.
        """
        ...
