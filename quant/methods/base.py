"""The input and output of a method: a layer with its calibration statistics, and reports of output errors."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import torch

from ...base.errors import BadInput, first_line
from ..base import workers
from ..base.device import lasting_zeros
from ..base.lanes import LaneSums, Share, largest, totals
from ..base.scheme import Scheme
from ..families.layer_map import LayerMap
from ..kinds.base.tensor import QuantizedTensor
from .options import MethodOptions
from .sign_descent import TunableBlock

Answer = TypeVar("Answer")
Batch = TypeVar("Batch")

_GRAM_ROWS = 512  # rows of the symmetric matrix per GEMM, without the mirrored half
_ERROR_COLUMNS, _ERROR_ROWS = 256, 1024  # keeps a GEMM's operands in the cache
REPORTED_ROWS = 512
"""Output channels, evenly spaced, on which errors are reported."""


class InputStatistics:
    """Calibration statistics of a linear's input, accumulated over tokens.

    The Gram matrix `XᵀX` (the Hessian of GPTQ, up to a factor) gives the output error of any weight change
    over all calibration tokens, so activations need not be kept.

    Attributes:
        gram: float32 `[in, in]`, the sum of `x xᵀ` over tokens.
        cross: float32 `[in, in]`, the sum of `(y - x) xᵀ` for the input `y` that the float model has in place
            of `x`; None where that is not known.
    """

    cross: torch.Tensor | None = None
    lanes: LaneSums | None = None

    def __init__(self, in_features: int, device: torch.device | None = None):
        self.gram = lasting_zeros(in_features, in_features, device=device)
        self.abs_sum = torch.zeros(in_features, device=device)
        self.abs_max = torch.zeros(in_features, device=device)
        self.num_tokens = 0

    def add(self, inputs: torch.Tensor) -> None:
        """Accumulate `[..., in]` inputs of any float dtype."""
        tokens = inputs.reshape(-1, inputs.shape[-1]).to(self.gram.device, torch.float32)
        if not tokens.shape[0]:
            return
        with _products_of(inputs.dtype):
            for start in range(0, tokens.shape[1], _GRAM_ROWS):
                rows = slice(start, start + _GRAM_ROWS)
                stop = min(start + _GRAM_ROWS, tokens.shape[1])
                self.gram[rows, :stop].addmm_(tokens[:, rows].T, tokens[:, :stop])
                self.gram[:start, rows] = self.gram[rows, :start].T
                # MKL's AVX2 kernels sum an entry and its mirror image in different orders.
                square = self.gram[rows, start:stop]
                square.copy_(square.tril() + square.tril(-1).T)
        magnitudes = tokens.abs()
        self.abs_sum += magnitudes.sum(dim=0)
        self.abs_max = torch.maximum(self.abs_max, magnitudes.amax(dim=0))
        self.num_tokens += tokens.shape[0]

    def add_cross(self, inputs: torch.Tensor, wanted: torch.Tensor) -> None:
        """Accumulate the differences of the float model's inputs `[..., in]`, of the same tokens."""
        width = inputs.shape[-1]
        tokens, others = (part.reshape(-1, width).to(torch.float32) for part in (inputs, wanted))
        if self.cross is None:
            self.cross = lasting_zeros(width, width, device=tokens.device)
        self.cross.addmm_((others - tokens).T, tokens)

    def end_lane(self, lane: int) -> None:
        """Put the sums by as those of a lane of samples, and begin again."""
        self.lanes = self.lanes or LaneSums()
        self.lanes.add(lane, [self.gram, self.abs_sum, self.cross])
        self.gram = lasting_zeros(*self.gram.shape, device=self.gram.device)
        self.abs_sum = torch.zeros_like(self.abs_sum)
        self.cross = None

    @property
    def mean_abs(self) -> torch.Tensor:
        return self.abs_sum / max(self.num_tokens, 1)

    def divided(self, columns: torch.Tensor) -> InputStatistics:
        """The statistics of inputs whose channels are divided by `columns` `[in]`."""
        record, by_row = InputStatistics(0), columns[:, None]
        record.gram, record.num_tokens = self.gram / columns / by_row, self.num_tokens
        record.abs_sum, record.abs_max = self.abs_sum / columns, self.abs_max / columns
        record.cross = None if self.cross is None else self.cross / columns / by_row
        return record

    def row_errors(self, delta: torch.Tensor) -> torch.Tensor:
        return quadratic_form(delta, self.gram)

    def sampled_errors(self, weight: torch.Tensor, *effective: torch.Tensor) -> list[float]:
        """Relative output errors of each `effective` on up to 512 evenly spaced output channels."""
        rows = slice(None, None, -(-weight.shape[0] // REPORTED_ROWS))
        energy = float(self.row_errors(weight[rows]).sum())
        deltas = (weight[rows] - other[rows] for other in effective)
        return [relative(float(self.row_errors(delta).sum()), energy) for delta in deltas]


def in_lanes(
    batches: Iterable[tuple[slice, Batch]],
    records: Collection[InputStatistics],
    share: Share | None,
) -> Iterator[tuple[slice, Batch]]:
    """Pass batches on whose inputs are added to records, which in the end hold the sums of all workers."""
    for rows, batch in batches:
        yield rows, batch
        if share is not None and (lane := share.ended(rows.stop)) is not None:
            for record in records:
                record.end_lane(lane)
    if share is not None:
        _add_workers([*records])


def _add_workers(records: list[InputStatistics]) -> None:
    sums = [record.lanes or LaneSums() for record in records]
    shapes = [[record.gram, record.abs_sum, record.gram] for record in records]
    for record, (gram, abs_sum, cross) in zip(records, totals(sums, shapes), strict=True):
        if gram is not None and abs_sum is not None:
            record.gram, record.abs_sum, record.cross, record.lanes = gram, abs_sum, cross, None
    counts = workers.gathered([record.num_tokens for record in records])
    for record, numbers in zip(records, zip(*counts, strict=True), strict=True):
        record.num_tokens = sum(numbers)
    largest([record.abs_max for record in records])


@contextmanager
def _products_of(dtype: torch.dtype) -> Iterator[None]:
    """Matrix instructions for 16-bit values with float32 sums: bfloat16, on a GPU TF32 (10-bit mantissa)."""
    cpu, gpu = (cast(Any, b).matmul for b in (torch.backends.mkldnn, torch.backends.cuda))
    before = cpu.fp32_precision, gpu.fp32_precision
    if dtype == torch.bfloat16:
        cpu.fp32_precision = "bf16"
    if dtype in (torch.bfloat16, torch.float16):
        gpu.fp32_precision = "tf32"
    try:
        yield
    finally:
        cpu.fp32_precision, gpu.fp32_precision = before


def quadratic_form(delta: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """`d M dᵀ` of each row of `delta` `[rows, n]`, symmetric `matrix`; float64, at least 0."""
    errors = torch.zeros(delta.shape[0], dtype=torch.float64, device=delta.device)
    for first in range(0, delta.shape[0], _ERROR_ROWS):
        part, total = (rows[first : first + _ERROR_ROWS] for rows in (delta, errors))
        for start in range(0, delta.shape[1], _ERROR_COLUMNS):
            columns = slice(start, start + _ERROR_COLUMNS)
            stop = start + _ERROR_COLUMNS
            products = part[:, columns] @ matrix[columns, columns]
            # Off-diagonal blocks count twice.
            products.addmm_(part[:, stop:], matrix[stop:, columns], alpha=2)
            total += products.mul_(part[:, columns]).sum(dim=1, dtype=torch.float64)
    return errors.clamp_(min=0)


def full_name(prefix: str, name: str) -> str:
    """Full name of a layer-relative name; the output projection has no layer."""
    return f"{prefix}.{name}" if prefix else name


def relative(error: float, energy: float) -> float:
    return error / energy if energy else 0.0


@dataclass(frozen=True, slots=True)
class ModuleReport:
    """Quantization report of one linear.

    Attributes:
        error: relative output error on the calibration inputs, squared norm over squared norm; for a linear
            with more than 512 output channels, on at least 256 evenly spaced ones, unless the method computed
            it on all of them. None: not measured.
        rtn_error: error of RTN to the same scheme.
        num_tokens: calibration tokens that reached the linear (routed to it, for experts).
        ratio: exponent of the activation magnitude in the chosen input scales; None: inputs unscaled.
        fallback: why the linear fell back to RTN; None: it did not.
        zeroed_rows: number of rows with tiny weights that became zeros.
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
    zeroed_rows: int = 0


Remeasure = Callable[[Mapping[str, torch.Tensor], Collection[str]], dict[str, InputStatistics]]


@dataclass(frozen=True, slots=True)
class LayerProblem:
    """One decoder layer to quantize; names are relative to `prefix`.

    Attributes:
        prefix: such as `model.layers.3`.
        scale_dtypes: dtypes in which each linear's scales are stored.
        statistics: statistics of these linears' inputs. With a sequential method and `remeasure`, initially
            empty: the method fills it stage by stage.
        norms, norm_biases: weights and biases of norms, in the dtype of the checkpoint.
        routers: float32 weights that stay floats but read an input that may be scaled.
        held_out: statistics of held-out inputs, for the report only; may be empty.
        remeasure: runs the layer with some weights replaced and returns new statistics of the named linears;
            None with cached statistics.
        block: the layer itself, to be run with gradients; only for blockwise methods, and None for the output
            projection.
        layer_error: squared error of the layer's output with these weights; None: not asked for.
        importance: given mean squares of inputs `[in]`, in place of the statistics' for ggml's blocks.
        measures_errors: True to have errors in the reports; an expert, whose codes depend on them, has them.
        step: called after each linear, or group of them, that is solved or measured.
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
    layer_error: Callable[[Mapping[str, torch.Tensor]], float] | None = None
    options: MethodOptions = field(default_factory=MethodOptions)
    importance: dict[str, torch.Tensor] = field(default_factory=dict)
    measures_errors: bool = True
    step: Callable[[], None] | None = None
    _energies: dict[str, float] = field(default_factory=dict, init=False, repr=False)

    def energy(self, linear: str) -> float:
        """Squared norm `|XWᵀ|²` of the linear's output on the calibration data, computed once."""
        if linear not in self._energies:
            errors = self.statistics[linear].row_errors(self.weights[linear])
            self._energies[linear] = float(errors.sum())
        return self._energies[linear]

    def report(
        self,
        linear: str,
        effective: torch.Tensor,
        rounded: torch.Tensor,
        *,
        error: float | None = None,
        rtn_error: float | None = None,
        **others: Any,
    ) -> ModuleReport:
        """The report of a linear, by its dequantized weight and RTN's, and relative errors where known."""
        module = full_name(self.prefix, linear)
        if linear not in self.statistics:
            return ModuleReport(module, None, None, fallback=others.get("fallback"))
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
            **others,
        )


class Unsolved(RuntimeError):
    """A solver raised; the message names the linears that it was about, `reason` is what it raised."""

    def __init__(self, modules: Collection[str], error: BaseException) -> None:
        self.modules, self.error = modules, error
        first, *others = modules
        more = f" (and {len(others)} with it)" if others else ""
        self.reason = f"{type(error).__name__}: {first_line(error)}"
        super().__init__(f"{first}{more}: {self.reason}")

    def __reduce__(self) -> tuple[type[Unsolved], tuple[list[str], BaseException]]:
        return Unsolved, ([*self.modules], self.error)


@contextmanager
def solving(problem: LayerProblem, linears: Collection[str]) -> Iterator[None]:
    """A context for these linears: all errors become `Unsolved`, but bad input and a lost worker."""
    try:
        yield
    except (BadInput, Unsolved):
        raise
    except Exception as error:
        if workers.is_lost(error):
            raise
        raise Unsolved([full_name(problem.prefix, name) for name in linears], error) from error
    if problem.step is not None:
        problem.step()


def each_linear(problem: LayerProblem, solve: Callable[[str], Answer]) -> dict[str, Answer]:
    """Solve every linear of a layer, shared out among the workers; raises as `solving`."""

    def solved(name: str) -> Answer:
        with solving(problem, [name]):
            return solve(name)

    costs = [float(weight.numel()) for weight in problem.weights.values()]
    names = list(problem.weights)
    return dict(zip(names, workers.shared_out(names, costs, solved), strict=True))


@dataclass(frozen=True, slots=True)
class LayerResult:
    """A quantized layer: its linears, a report of each, and the norms and routers that changed."""

    weights: dict[str, QuantizedTensor]
    norms: dict[str, torch.Tensor]
    reports: list[ModuleReport]
    routers: dict[str, torch.Tensor] = field(default_factory=dict)
    norm_biases: dict[str, torch.Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, solved: Mapping[str, tuple[QuantizedTensor, ModuleReport]]) -> LayerResult:
        weights = {name: codes for name, (codes, _) in solved.items()}
        return cls(weights, {}, [report for _, report in solved.values()])
