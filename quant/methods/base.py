"""The input and output of a method: a layer with its calibration statistics, and reports."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch

from ..base.errors import BadInput, first_line
from ..base.scheme import Scheme
from ..families.layer_map import LayerMap
from ..kinds.base.tensor import QuantizedTensor
from .input_statistics import InputStatistics, relative
from .options import MethodOptions
from .sign_descent import TunableBlock


@dataclass(frozen=True, slots=True)
class ModuleReport:
    """Quantization report of one linear.

    Attributes:
        error: relative output error on the calibration inputs, squared norm over squared norm; for a linear
            with more than 512 output channels, on at least 256 evenly spaced ones, unless the method
            computed it on all of them. None: not measured.
        rtn_error: the same for RTN to the same scheme.
        held_out_error, rtn_held_out_error: both on held-out tokens; None: there are none.
        num_tokens: calibration tokens that reached the linear (routed to it, for experts).
        ratio: exponent of the activation magnitude in the chosen input scales; None: inputs unscaled.
        clipped: fraction of groups that were clipped.
        damp: damping that was applied to the Hessian; None where the method has none.
        fallback: why the linear fell back to RTN; None: it did not.
    """

    module: str
    error: float | None
    rtn_error: float | None
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
        schemes: target scheme of each linear.
        scale_dtypes: in which each linear's scales are stored.
        weights: float32 `[out, in]` of each linear to quantize.
        statistics: of each of these linears' inputs. With a sequential method and `remeasure`, initially
            empty: the method fills it stage by stage.
        norms: norm weights in the dtype of the checkpoint.
        norm_biases: biases of those norms that have one, likewise.
        with_bias: the linears that have a bias.
        routers: float32 weights that stay floats but read an input that may be scaled.
        held_out: statistics of held-out inputs, for the report only; may be empty.
        remeasure: runs the layer with some weights replaced and returns new statistics of the named
            linears; None with cached statistics.
        block: the layer itself, to be run with gradients; only for blockwise methods, and None for the output
            projection.
        devices: several share the linears, where they are independent; the tensors are on the first.
        layer_error: squared error of the layer's output with these weights; None: not asked for.
        importance: given mean squares of inputs `[in]`, in place of the statistics' for ggml's blocks.
    """

    prefix: str
    family: LayerMap
    schemes: dict[str, Scheme]
    scale_dtypes: dict[str, torch.dtype]
    weights: dict[str, torch.Tensor]
    statistics: dict[str, InputStatistics] = field(default_factory=dict)
    norms: dict[str, torch.Tensor] = field(default_factory=dict)
    with_bias: frozenset[str] = frozenset()
    routers: dict[str, torch.Tensor] = field(default_factory=dict)
    norm_biases: dict[str, torch.Tensor] = field(default_factory=dict)
    held_out: dict[str, InputStatistics] = field(default_factory=dict)
    remeasure: Remeasure | None = None
    block: TunableBlock | None = None
    devices: tuple[torch.device, ...] = ()
    layer_error: Callable[[Mapping[str, torch.Tensor]], float] | None = None
    options: MethodOptions = field(default_factory=MethodOptions)
    importance: dict[str, torch.Tensor] = field(default_factory=dict)
    _energies: dict[str, float] = field(default_factory=dict, init=False, repr=False)

    def part(self, linears: Collection[str], device: torch.device) -> LayerProblem:
        """The problem of some linears, its tensors on a device; the statistics of routers come along."""
        held = {name: self.held_out[name].to(device) for name in linears if name in self.held_out}
        return replace(
            self,
            weights={name: self.weights[name].to(device) for name in linears},
            statistics={
                name: self.statistics[name].to(device)
                for name in (*linears, *self.family.routers)
                if name in self.statistics
            },
            held_out=held,
            importance={
                name: self.importance[name].to(device)
                for name in linears
                if name in self.importance
            },
            remeasure=None,
            devices=(),
        )

    def energy(self, linear: str) -> float:
        """Squared norm `|XWᵀ|²` of the linear's output on the calibration data, computed once."""
        if linear not in self._energies:
            errors = self.statistics[linear].row_errors(self.weights[linear])
            self._energies[linear] = float(errors.sum())
        return self._energies[linear]

    def error(self, linear: str, effective: torch.Tensor) -> float:
        """Relative output error on the calibration data of `effective` replacing the weight."""
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
            effective: the dequantized weight, in units of the unscaled layer.
            rounded: the weight under RTN.
            error, rtn_error: relative errors of the two, where already computed.
        """
        module = f"{self.prefix}.{linear}"
        if linear not in self.statistics:
            return ModuleReport(module, None, None, fallback=fallback)
        both = (effective,) if rounded is effective else (effective, rounded)
        weight = self.weights[linear]
        if error is None or rtn_error is None:
            seen = self.statistics[linear].sampled_errors(weight, *both)
            error, rtn_error = seen[0], seen[-1]
        unseen: list[float | None] = [None]
        if linear in self.held_out:
            unseen = [*self.held_out[linear].sampled_errors(weight, *both)]
        return ModuleReport(
            module=module,
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


class Unsolved(RuntimeError):
    """A solver raised; the message names the linears that it was about, `reason` is what it raised."""

    def __init__(self, modules: Collection[str], error: BaseException) -> None:
        first, *others = modules
        more = f" (and {len(others)} with it)" if others else ""
        self.reason = f"{type(error).__name__}: {first_line(error)}"
        super().__init__(f"{first}{more}: {self.reason}")


@contextmanager
def solving(problem: LayerProblem, linears: Collection[str]) -> Iterator[None]:
    """A context in which these linears are solved together.

    Raises:
        Unsolved: anything but bad input was raised in it.
    """
    try:
        yield
    except (BadInput, Unsolved):
        raise
    except Exception as error:
        names = [f"{problem.prefix}.{name}".lstrip(".") for name in linears]
        raise Unsolved(names, error) from error


@dataclass(frozen=True, slots=True)
class LayerResult:
    """A quantized layer.

    Attributes:
        weights: the quantized linears.
        norms, norm_biases: those that changed, in the checkpoint's dtype.
        reports: one for each of `weights`, in the same order.
        routers: routers that changed, float32.
    """

    weights: dict[str, QuantizedTensor]
    norms: dict[str, torch.Tensor]
    reports: list[ModuleReport]
    routers: dict[str, torch.Tensor] = field(default_factory=dict)
    norm_biases: dict[str, torch.Tensor] = field(default_factory=dict)
