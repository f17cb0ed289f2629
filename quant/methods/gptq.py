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
from ..grids.int_grid import group_ranges, search_ranges
from ..model.families import Family
from ..tensors.base import QuantizedTensor
from ..tensors.integer import IntTensor
from .base import InputStatistics, LayerProblem, LayerResult, ModuleReport, SchemeOptions
from .gptq_feedback import Feedback, feedback, rounding_order
from .gptq_solve import solve
from .options import refuse_options
from .rounding import round_weight

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
            if not isinstance(scheme, IntScheme):
                self._round(names, "gptq supports integer grids only")
                continue
            reason = _unusable(statistics)
            if reason:
                self._round(names, reason)
                continue
            act_order = self.problem.options.act_order
            by_importance = scheme.permuted or act_order != "none"
            if by_importance not in factors:
                order = rounding_order(statistics.gram, by_importance=by_importance)
                factors[by_importance] = feedback(statistics.gram, order, self.problem.options.damp)
            factor = factors[by_importance]
            if factor is None:
                self._round(names, "the Hessian is not positive definite under any damping up to 1")
                continue
            self._solve(names, scheme, factor, by_importance and not scheme.permuted)

    def _alike(self, linears: tuple[str, ...]) -> Iterator[tuple[Scheme, list[str]]]:
        """Linears grouped by scheme and scale dtype, which can be solved together."""
        kinds: dict[tuple[Scheme, torch.dtype], list[str]] = {}
        for name in linears:
            kind = self.problem.schemes[name], self.problem.scale_dtypes[name]
            kinds.setdefault(kind, []).append(name)
        for (scheme, _), names in kinds.items():
            yield scheme, names

    def _solve(
        self, names: list[str], scheme: IntScheme, factor: Feedback, static_groups: bool
    ) -> None:
        weights = [self.problem.weights[name] for name in names]
        solved = solve(
            weights[0] if len(weights) == 1 else torch.cat(weights),
            factor,
            scheme,
            self.problem.scale_dtypes[names[0]],
            search_ranges if self.problem.options.mse else group_ranges,
            static_groups=static_groups,
        )
        if solved is None:
            self._round(names, "the corrections grew beyond what its scales can hold")
            return
        first = 0
        for name, weight in zip(names, weights, strict=True):
            plain = round_weight(self.problem, name, weight)
            assert isinstance(plain, IntTensor)
            codes = solved.rows(slice(first, first + weight.shape[0]))
            self.codes[name] = replace(codes, input_scale=plain.input_scale)
            self.reports[name] = self.problem.report(
                name, codes.dequantize(), plain.dequantize(), damp=factor.damp
            )
            first += weight.shape[0]

    def _round(self, names: list[str], reason: str) -> None:
        for name in names:
            self.codes[name] = round_weight(self.problem, name, self.problem.weights[name])
            rounded = self.codes[name].dequantize()
            self.reports[name] = self.problem.report(name, rounded, rounded, fallback=reason)


def _unusable(statistics: InputStatistics) -> str | None:
    """Why these statistics give no Hessian; None: they do."""
    diagonal = statistics.gram.diagonal()
    if not bool(torch.isfinite(diagonal).all()):
        return "calibration gave it NaN or infinite inputs"
    if not bool((diagonal > 0).any()):
        return "no calibration token reached it"
    return None
