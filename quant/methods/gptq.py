"""GPTQ: quantize input channels one by one, with error feedback into the remaining ones.

Frantar et al., ICLR 2023 (arXiv:2210.17323). `error_feedback.py` has the matrix and the column loop; here are
the order of the linears, their statistics, and the fallback to RTN.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from ..base import workers
from ..base.scheme import Scheme
from ..families.layer_map import LayerMap
from ..kinds.base.kind import kind_of
from ..kinds.base.tensor import QuantizedTensor
from ..kinds.integer.kind import IntTensor
from .base import REPORTED_ROWS, LayerProblem, LayerResult, ModuleReport, full_name, solving
from .error_feedback import Feedback, Solver, asymmetric_shift, feedback, rounding_order
from .rounding import (
    WORSE_EXPERT,
    gram_of,
    linear_grid,
    own_gram,
    round_plain,
    round_weight,
    router_of,
    routers_of,
    too_few,
    worse_expert,
)

_NUMBER = re.compile(r"\.\d+(?=\.)")


def quantize_layer(problem: LayerProblem) -> LayerResult:
    return quantize_stages(problem, StageWork(problem))


def quantize_stages(problem: LayerProblem, work: StageWork) -> LayerResult:
    """Quantize stage by stage; with true-sequential, stages are measured after quantized ones."""
    stages = execution_stages(problem.family, problem.weights)
    if problem.options.true_sequential and problem.remeasure is not None:
        for stage in stages:
            work.measure({name for linears in stage for name in linears})
            work.quantize_all(stage)
    else:
        work.quantize_all([linears for stage in stages for linears in stage])
    work.report_all()
    names = list(problem.weights)
    return LayerResult(
        {name: work.codes[name] for name in names}, {}, [work.reports[name] for name in names]
    )


def execution_stages(family: LayerMap, linears: Collection[str]) -> list[list[tuple[str, ...]]]:
    """Groups of linears that share an input, by stage, in execution order (true-sequential). First
    projections of all experts are one stage. Linears beyond the family's are single stages last."""
    present = [tuple(name for name in group if name in linears) for group in family.shared_inputs]
    known = {name for group in present for name in group}
    alone = [(name,) for name in linears if name not in known]
    stages: dict[str, list[tuple[str, ...]]] = {}
    for group in [*filter(None, present), *alone]:
        stages.setdefault(_NUMBER.sub("", group[0]), []).append(group)
    return list(stages.values())


class StageWork:
    """Codes and reports of a layer. Of several workers each solves some of the linears; errors are measured
    together with the next stage, by the workers that have time."""

    def __init__(self, problem: LayerProblem):
        self.problem = problem
        self.codes: dict[str, QuantizedTensor] = {}
        self.reports: dict[str, ModuleReport] = {}
        self.damps: dict[str, float] = {}
        self._unmeasured: list[tuple[str, bool]] = []  # linears, with True on held-out inputs
        self._errors: dict[tuple[str, bool], list[float]] = {}

    def measure(self, linears: set[str]) -> None:
        assert self.problem.remeasure is not None
        done = {name: codes.dequantize() for name, codes in self.codes.items()}
        routers = routers_of(self.problem.family, linears)  # experts' are shrunk towards theirs
        self.problem.statistics.update(self.problem.remeasure(done, linears | routers))

    def quantize_all(self, groups: list[tuple[str, ...]]) -> None:
        """Quantize independent groups, which workers share; a stage's only group by linears."""
        if workers.together() and len(groups) == 1:
            groups = [(name,) for name in groups[0]]
        if workers.count() == 1:
            for linears in groups:
                with solving(self.problem, linears):
                    self.quantize(linears)
            return
        solved = self._shared_out(groups)
        for tensors, reports, damps in solved:
            for name, codes in tensors.items():
                self.codes[name] = codes.to(self.problem.weights[name].device)
            self.reports |= reports
            self.damps |= damps
            for name in damps:
                sets = (False, True) if name in self.problem.held_out else (False,)
                self._unmeasured += [(name, held_out) for held_out in sets]

    def _shared_out(
        self, groups: Sequence[tuple[str, ...]]
    ) -> list[tuple[dict[str, QuantizedTensor], dict[str, ModuleReport], dict[str, float]]]:
        """Codes, reports and dampings of groups, and errors of what is not measured yet."""
        measured, self._unmeasured = self._unmeasured, []
        shapes = [self.problem.weights[name].shape for name, _ in measured]
        costs = [float(columns**2 * min(rows, REPORTED_ROWS)) for rows, columns in shapes]
        tasks: list[Callable[[], Any]] = [partial(self._apart, linears) for linears in groups]
        tasks += [partial(self._measured, *measurement) for measurement in measured]
        costs = [*map(self._cost, groups), *costs]
        answers = workers.shared_out(tasks, costs, lambda task: task())
        self._errors |= zip(measured, answers[len(groups) :], strict=True)
        return answers[: len(groups)]

    def _measured(self, name: str, held_out: bool) -> list[float]:
        problem = self.problem
        with solving(problem, [name]):
            weight = problem.weights[name]
            both = self.codes[name].dequantize(), round_plain(problem, name, weight).dequantize()
            record = (problem.held_out if held_out else problem.statistics)[name]
            return record.sampled_errors(weight, *both)

    def report_all(self) -> None:
        """Report what is solved and not yet reported; the workers meet if there is any."""
        if not self.damps:
            return
        self._shared_out([])
        for name, damp in self.damps.items():
            self.reports[name] = ModuleReport(
                full_name(self.problem.prefix, name),
                *self._errors[name, False],
                *self._errors.get((name, True), (None, None)),
                num_tokens=self.problem.statistics[name].num_tokens,
                damp=damp,
            )

    def _cost(self, linears: tuple[str, ...]) -> float:
        shapes = [self.problem.weights[name].shape for name in linears]
        return float(shapes[0][1] ** 2 * (shapes[0][1] + sum(rows for rows, _ in shapes)))

    def _apart(
        self, linears: tuple[str, ...]
    ) -> tuple[dict[str, QuantizedTensor], dict[str, ModuleReport], dict[str, float]]:
        """Codes, reports and dampings of one group."""
        work = type(self)(self.problem)
        with solving(self.problem, linears):
            work.quantize(linears)
        return work.codes, work.reports, work.damps

    def quantize(self, linears: tuple[str, ...]) -> None:
        """Quantize linears that share their input, with one Cholesky factorisation."""
        problem = self.problem
        reason = unusable(problem, linears[0])
        if reason:
            self._round(linears, reason)
            return
        gram = gram_of(problem, linears[0])
        factors: dict[tuple[str, int, int], Feedback | None] = {}
        alike: dict[tuple[Scheme, torch.dtype], list[str]] = {}  # can be solved together
        for name in linears:
            scheme = problem.schemes[name], problem.scale_dtypes[name]
            alike.setdefault(scheme, []).append(name)
        for names in alike.values():
            if refusal := kind_of(problem.schemes[names[0]]).refuses_solver:
                self._round(names, refusal, weighted=True)
                continue
            grid = linear_grid(problem, names[0], problem.weights[names[0]])
            aware = problem.options.act_order == "group-aware"
            kind = problem.options.act_order, grid.group if aware else grid.vector, grid.vector
            if kind not in factors:
                order = rounding_order(gram, *kind)
                factors[kind] = feedback(gram, order, problem.options.damp)
            factor = factors[kind]
            if factor is None:
                self._round(names, "the Hessian is not positive definite under any damping up to 1")
                continue
            for together in [names] if grid.rows_alone else [[name] for name in names]:
                self._solve(together, factor)

    def _solve(self, names: list[str], factor: Feedback) -> None:
        problem, options = self.problem, self.problem.options
        scheme = problem.schemes[names[0]]
        permuted = scheme.permuted
        weights = [problem.weights[name] for name in names]
        weight = weights[0] if len(weights) == 1 else torch.cat(weights)
        cross = problem.statistics[names[0]].cross
        if cross is not None:
            own = own_gram(problem, names[0])
            weight = weight + asymmetric_shift(weight, cross, factor, own)
        grid = linear_grid(problem, names[0], weight)
        slots = factor.channels
        if permuted:  # groups are made of channels that are next to each other in rounding order
            slots = torch.arange(len(slots)).flip(0)
        static, weighted = options.act_order == "static", options.ranges == "weighted"
        whole = Solver(
            weight, factor, grid, slots=slots, static_groups=static, weighted=weighted
        ).run()
        if whole is None:
            self._round(names, "the corrections grew beyond what its scales can hold")
            return
        if permuted:  # columns in rounding order become the weight's, with a group index
            assert isinstance(whole, IntTensor)
            channels = factor.channels.flip(0)
            position = torch.empty_like(channels)
            position[channels] = torch.arange(len(channels))
            index = (position // (len(channels) // whole.num_groups)).to(torch.int32)
            codes = whole.codes.index_select(1, position)
            whole = replace(whole, codes=codes, group_index=index)
        first = 0
        for name, weight in zip(names, weights, strict=True):
            codes = whole.rows(slice(first, first + weight.shape[0])) if len(names) > 1 else whole
            first += weight.shape[0]
            is_expert = router_of(problem, name) is not None
            if not (is_expert or problem.measures_errors):
                unmeasured = full_name(problem.prefix, name), None, None
                self.codes[name] = codes
                self.reports[name] = ModuleReport(*unmeasured, damp=factor.damp)
                continue
            if workers.count() > 1 and not is_expert:
                self.codes[name], self.damps[name] = codes, factor.damp
                continue
            plain = round_plain(problem, name, weight)
            rounded = plain.dequantize()
            report = problem.report(name, codes.dequantize(), rounded, damp=factor.damp)
            if worse_expert(problem, name, report):
                codes = plain
                report = problem.report(name, rounded, rounded, fallback=WORSE_EXPERT)
            self.codes[name], self.reports[name] = codes, report

    def _round(self, names: Collection[str], reason: str, *, weighted: bool = False) -> None:
        """Round to nearest; `weighted`: in ranges of least weighted error, as the statistics are usable."""
        problem = self.problem
        for name in names:
            plain = round_plain(problem, name, problem.weights[name])
            effective = rounded = plain.dequantize()
            self.codes[name] = plain
            if weighted:
                self.codes[name] = round_weight(problem, name, problem.weights[name])
                effective = self.codes[name].dequantize()
            self.reports[name] = problem.report(name, effective, rounded, fallback=reason)


def unusable(problem: LayerProblem, linear: str) -> str | None:
    """Why a linear's statistics give no Hessian; None: they do."""
    statistics = problem.statistics[linear]
    diagonal = statistics.gram.diagonal()
    if not bool(torch.isfinite(diagonal).all()):
        return "calibration gave it NaN or infinite inputs"
    if not bool((diagonal > 0).any()):
        return "no calibration token reached it"
    if too_few(problem, linear):
        return f"only {statistics.num_tokens} calibration tokens were routed to it"
    return None
