"""GPTQ: quantize input channels one by one, with error feedback into the remaining ones.

Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers", ICLR
2023 (arXiv:2210.17323). The feedback matrix is in `gptq_feedback`, the column loop in `gptq_solve`;
here are the order of the linears, their statistics, and the fallback to RTN.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import replace

import torch

from ..base.scheme import PER_CHANNEL, IntScheme, Scheme
from ..model.families import Family
from ..tensors.base import QuantizedTensor
from ..tensors.integer import IntTensor
from .base import InputStatistics, LayerProblem, LayerResult, ModuleReport, SchemeOptions
from .gptq_feedback import Feedback, feedback, rounding_order
from .gptq_solve import solve
from .options import refuse_options
from .rounding import linear_grid, round_weight

_NUMBER = re.compile(r"\.\d+(?=\.)")


class Gptq:
    """The method `gptq`.

    By default static act-order: sequential groups whose grids are fixed before any channel is rounded, and
    channels by decreasing Hessian diagonal; it needs no `g_idx` and is as accurate as permuted groups.
    """

    name = "gptq"
    num_samples = 512
    default_format = "gptq"
    needs_statistics = True
    grouped = True
    sequential = True

    def scheme(self, options: SchemeOptions) -> Scheme:
        refuse_options(self.name, options, "bits", "group_size", "symmetric", "act_order")
        group_size = options.group_size or 128
        return IntScheme(
            options.bits or 4,
            group_size,
            symmetric=True if options.symmetric is None else options.symmetric,
            permuted=options.act_order == "dynamic" and group_size != PER_CHANNEL,
        )

    def quantize_layer(self, problem: LayerProblem) -> LayerResult:
        """See `Method.quantize_layer`; with true-sequential, stages are measured behind quantized ones."""
        work = _Work(problem)
        for stage in execution_stages(problem.family, problem.weights):
            if problem.options.true_sequential and problem.remeasure is not None:
                work.measure({name for linears in stage for name in linears})
            for linears in stage:
                work.quantize(linears)
        names = list(problem.weights)
        return LayerResult(
            {name: work.codes[name] for name in names}, {}, [work.reports[name] for name in names]
        )


def execution_stages(family: Family, linears: Collection[str]) -> list[list[tuple[str, ...]]]:
    """Groups of linears that share an input, by stage, in execution order (true-sequential).

    The first projections of all experts are one stage: quantizing one expert does not change the input of
    another.

    Args:
        linears: the quantized linears of the family, and any others, which form single stages at the end.
    """
    present = [tuple(name for name in group if name in linears) for group in family.shared_inputs]
    known = {name for group in present for name in group}
    alone = [(name,) for name in linears if name not in known]
    stages: dict[str, list[tuple[str, ...]]] = {}
    for group in [*filter(None, present), *alone]:
        stages.setdefault(_NUMBER.sub("", group[0]), []).append(group)
    return list(stages.values())


class _Work:
    """State of a layer during quantization.

    Attributes:
        codes, reports: of the finished linears.
    """

    def __init__(self, problem: LayerProblem):
        self.problem = problem
        self.codes: dict[str, QuantizedTensor] = {}
        self.reports: dict[str, ModuleReport] = {}

    def measure(self, linears: set[str]) -> None:
        """Measure the inputs of these linears behind the finished ones."""
        assert self.problem.remeasure is not None
        done = {name: codes.dequantize() for name, codes in self.codes.items()}
        self.problem.statistics.update(self.problem.remeasure(done, linears))

    def quantize(self, linears: tuple[str, ...]) -> None:
        """Quantize linears that share their input, with one Cholesky factorisation."""
        statistics = self.problem.statistics[linears[0]]
        factors: dict[bool, Feedback | None] = {}
        for scheme, names in self._alike(linears):
            reason = _unusable(statistics)
            if reason:
                self._round(names, reason)
                continue
            permuted = isinstance(scheme, IntScheme) and scheme.permuted
            by_importance = permuted or self.problem.options.act_order != "none"
            if by_importance not in factors:
                order = rounding_order(statistics.gram, by_importance=by_importance)
                factors[by_importance] = feedback(statistics.gram, order, self.problem.options.damp)
            factor = factors[by_importance]
            if factor is None:
                self._round(names, "the Hessian is not positive definite under any damping up to 1")
                continue
            static_groups = by_importance and not permuted
            for together in self._together(names):
                self._solve(together, factor, static_groups=static_groups)

    def _alike(self, linears: tuple[str, ...]) -> Iterator[tuple[Scheme, list[str]]]:
        """Linears grouped by scheme and scale dtype, which can be solved together."""
        kinds: dict[tuple[Scheme, torch.dtype], list[str]] = {}
        for name in linears:
            kind = self.problem.schemes[name], self.problem.scale_dtypes[name]
            kinds.setdefault(kind, []).append(name)
        for (scheme, _), names in kinds.items():
            yield scheme, names

    def _together(self, names: list[str]) -> list[list[str]]:
        """Linears of one scheme, joined where their rows are independent."""
        alone = linear_grid(self.problem, names[0], self.problem.weights[names[0]])
        return [names] if alone.rows_alone else [[name] for name in names]

    def _solve(self, names: list[str], factor: Feedback, *, static_groups: bool) -> None:
        problem = self.problem
        scheme = problem.schemes[names[0]]
        permuted = isinstance(scheme, IntScheme) and scheme.permuted
        weights = [problem.weights[name] for name in names]
        weight = weights[0] if len(weights) == 1 else torch.cat(weights)
        grid = linear_grid(problem, names[0], weight)
        slots = factor.channels
        if permuted:  # groups are made of channels that are next to each other in rounding order
            slots = torch.arange(len(slots)).flip(0)
        solved = solve(
            weight, factor, grid, slots=slots, static_groups=static_groups, weighted=False
        )
        if solved is None:
            self._round(names, "the corrections grew beyond what its scales can hold")
            return
        whole = grid.tensor(solved.values, solved.parameters)
        if permuted:
            whole = _permuted(whole, factor.channels.flip(0))
        first = 0
        for name, weight in zip(names, weights, strict=True):
            plain = round_weight(problem, name, weight)
            codes = whole.rows(slice(first, first + weight.shape[0])) if len(names) > 1 else whole
            self.codes[name] = codes
            self.reports[name] = problem.report(
                name, codes.dequantize(), plain.dequantize(), damp=factor.damp
            )
            first += weight.shape[0]

    def _round(self, names: list[str], reason: str) -> None:
        for name in names:
            self.codes[name] = round_weight(self.problem, name, self.problem.weights[name])
            rounded = self.codes[name].dequantize()
            self.reports[name] = self.problem.report(name, rounded, rounded, fallback=reason)


def _permuted(tensor: QuantizedTensor, channels: torch.Tensor) -> IntTensor:
    """Codes whose columns are the channels `[in]` in that order, as the weight with a group index."""
    assert isinstance(tensor, IntTensor)
    position = torch.empty_like(channels)
    position[channels] = torch.arange(len(channels))
    size = len(channels) // tensor.num_groups
    index = (position // size).to(torch.int32)
    codes = tensor.codes.index_select(1, position)
    return replace(tensor, codes=codes, group_index=index)


def _unusable(statistics: InputStatistics) -> str | None:
    """Why these statistics give no Hessian; None: they do."""
    diagonal = statistics.gram.diagonal()
    if not bool(torch.isfinite(diagonal).all()):
        return "calibration gave it NaN or infinite inputs"
    if not bool((diagonal > 0).any()):
        return "no calibration token reached it"
    return None
