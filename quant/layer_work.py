"""One decoder layer, or the output projection, quantized: from its tensors to what goes on disk."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from .families import Family
from .manifest import module_record
from .methods.base import (
    InputStatistics,
    LayerProblem,
    LayerResult,
    ModuleReport,
    Remeasure,
)
from .methods.rounding import round_weight
from .plan import Plan
from .selection import HEAD

HEAD_FAMILY = Family(shared_inputs=((HEAD,),), folds=(), unclipped=frozenset({HEAD}))
WORSE = "worse than plain rounding"


@dataclass(frozen=True, slots=True)
class Measured:
    """What is known about the inputs of a layer.

    Attributes:
        statistics: of calibration tokens, for each linear and router.
        held_out: of tokens that no method may use; may be empty.
        remeasure: see `LayerProblem`.
    """

    statistics: dict[str, InputStatistics]
    held_out: dict[str, InputStatistics] = field(default_factory=dict)
    remeasure: Remeasure | None = None


@dataclass(frozen=True, slots=True)
class Work:
    """A layer that was quantized.

    Attributes:
        result: of the method, after reverting what was worse than plain rounding.
        others: the float tensors that stay, as they will be stored, by the name relative to the layer.
        seconds: what choosing the codes took.
    """

    prefix: str
    result: LayerResult
    others: dict[str, torch.Tensor]
    seconds: float

    def packed(self, plan: Plan, format_index: int) -> dict[str, torch.Tensor]:
        """What lies on disk in one of the formats, by full name."""
        weight_format = plan.formats[format_index]
        stored = {full_name(self.prefix, name): tensor for name, tensor in self.others.items()}
        for name, quantized in self.result.weights.items():
            stored |= weight_format.pack(full_name(self.prefix, name), quantized)
        return stored

    def records(self) -> list[dict[str, Any]]:
        """The modules for journal and manifest."""
        return [
            module_record(report, tensor)
            for report, tensor in zip(
                self.result.reports, self.result.weights.values(), strict=True
            )
        ]


def full_name(prefix: str, name: str) -> str:
    """A name relative to a layer in full; the output projection belongs to none."""
    return f"{prefix}.{name}" if prefix else name


def quantize_tensors(
    plan: Plan,
    family: Family,
    prefix: str,
    tensors: Mapping[str, torch.Tensor],
    weights: Mapping[str, torch.Tensor] | None,
    measured: Measured,
    *,
    revert_worse: bool,
) -> Work:
    """Choose the codes of a layer.

    Args:
        tensors: of the layer in the checkpoint's dtype, by relative name.
        weights: its linears in float32, where they are in memory already.
    """
    began = time.perf_counter()
    linears = [name for name in family.linears if full_name(prefix, name) in plan.modules]
    schemes = {name: plan.schemes[full_name(prefix, name)] for name in linears}
    sources = {fold.source for fold in family.folds} - set(family.linears)
    problem = LayerProblem(
        prefix=prefix,
        family=family,
        schemes=schemes,
        scale_dtypes={
            name: plan.format.scale_dtype(tensors[f"{name}.weight"].dtype, scheme)
            for name, scheme in schemes.items()
        },
        weights={
            name: weights[name] if weights else tensors[f"{name}.weight"].to(torch.float32)
            for name in linears
        },
        statistics={
            name: measured.statistics[name]
            for name in (*linears, *family.routers)
            if name in measured.statistics
        },
        norms={name: tensors[f"{name}.weight"] for name in sources},
        with_bias=frozenset(name for name in linears if f"{name}.bias" in tensors),
        routers={name: tensors[f"{name}.weight"].to(torch.float32) for name in family.routers},
        held_out={name: one for name, one in measured.held_out.items() if name in schemes},
        remeasure=measured.remeasure,
        options=plan.options,
    )
    with torch.no_grad():
        result = plan.method.quantize_layer(problem) if linears else LayerResult({}, {}, [])
        if revert_worse:
            result = reverted(problem, result)
    if not prefix:  # no layer: the module's name is the linear's
        reports = [replace(report, module=report.module.lstrip(".")) for report in result.reports]
        result = replace(result, reports=reports)
    others = dict(tensors)
    for name in linears:
        del others[f"{name}.weight"]
    for name, tensor in (*result.norms.items(), *result.routers.items()):
        others[f"{name}.weight"] = tensor.to(tensors[f"{name}.weight"].dtype)
    return Work(prefix, result, others, time.perf_counter() - began)


def is_worse(error: float, rounded: float) -> bool:
    """Whether an error is above that of plain rounding by more than the last digits of a sum."""
    return error > rounded * (1 + 1e-6)


def judged(report: ModuleReport) -> tuple[float, float]:
    """The errors that decide, of the method and of plain rounding: on held-out tokens where there are."""
    if report.held_out_error is not None and report.rtn_held_out_error is not None:
        return report.held_out_error, report.rtn_held_out_error
    return report.error, report.rtn_error


def reverted(problem: LayerProblem, result: LayerResult) -> LayerResult:
    """The result with plain rounding wherever the method did worse.

    Linears whose neighbours or norms carry their scales cannot be taken back one by one: there the
    whole layer is rounded plainly, if the sum of its errors is worse.
    """
    errors = [judged(report) for report in result.reports]
    folded = bool(result.norms or result.routers) or any(
        report.ratio is not None for report in result.reports
    )
    if folded:
        worse = is_worse(sum(error for error, _ in errors), sum(rtn for _, rtn in errors))
        taken_back = [worse] * len(errors)
    else:
        taken_back = [is_worse(*pair) for pair in errors]
    if not any(taken_back):
        return result
    weights, reports = dict(result.weights), []
    for name, report, back in zip(result.weights, result.reports, taken_back, strict=True):
        if not back:
            reports.append(report)
            continue
        weights[name] = round_weight(problem, name, problem.weights[name])
        rounded = weights[name].dequantize()
        reports.append(problem.report(name, rounded, rounded, fallback=WORSE))
    return LayerResult(
        weights=weights,
        norms={} if folded else result.norms,
        reports=reports,
        routers={} if folded else result.routers,
    )
