"""Quantization of one decoder layer or the output projection, and its tensors on disk."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from ...base.errors import BadInput
from ..base.device import HOST
from ..families.layer_map import LayerMap
from ..kinds.base.format import KV_SCALES, WeightFormat
from ..kinds.base.tensor import QuantizedTensor, zeroed_rows
from ..methods import rounding
from ..methods.base import (
    InputStatistics,
    LayerProblem,
    LayerResult,
    Remeasure,
    Unsolved,
    full_name,
    solving,
)
from ..methods.sign_descent import TunableBlock
from ..plan.manifest import is_worse, judged, module_record
from ..plan.plan import QuantizePlan
from ..plan.selection import HEAD, TORCH_DTYPES
from ..stream.calls import KvRanges
from ..stream.layer_stream import LayerStream

_log = logging.getLogger(__name__)

HEAD_FAMILY = LayerMap(shared_inputs=((HEAD,),), folds=(), unclipped=frozenset({HEAD}))
WORSE = "worse than plain rounding"


@dataclass(frozen=True, slots=True)
class LayerStatistics:
    """Statistics of calibration tokens for each linear and router, and of held-out tokens for reports only;
    `remeasure`, `block` and `layer_error` as in `LayerProblem`."""

    statistics: dict[str, InputStatistics]
    held_out: dict[str, InputStatistics] = field(default_factory=dict)
    remeasure: Remeasure | None = None
    kv_ranges: KvRanges | None = None
    block: TunableBlock | None = None
    layer_error: Callable[[Mapping[str, torch.Tensor]], float] | None = None


Pack = Callable[
    [QuantizePlan, WeightFormat, str], tuple[Mapping[str, torch.Tensor], dict[str, Any]]
]
"""The packed tensors of a module, by its full name, and its record."""


@dataclass(frozen=True, slots=True)
class QuantizedLayer:
    """A layer whose linears are packed one by one.

    Attributes:
        linears: full names of the quantized linears.
        others: remaining tensors in their stored dtype, by relative name.
        pack: called for each linear; BadInput for scales that a format lacks.
        result: result of the method; empty where `pack` makes the codes itself.
        hollow: True if large tensors are to be holes in the files.
    """

    prefix: str
    linears: tuple[str, ...]
    others: dict[str, torch.Tensor]
    pack: Pack
    result: LayerResult
    seconds: float = 0.0
    hollow: bool = False

    def packed(
        self, plan: QuantizePlan, weight_format: WeightFormat
    ) -> tuple[dict[str, torch.Tensor], list[dict[str, Any]]]:
        """The packed tensors by full name, and the module records."""
        stored = {full_name(self.prefix, name): tensor for name, tensor in self.others.items()}
        if plan.kv_cache is not None and weight_format.holds_kv_scales:
            stored = {
                weight_format.kv_scale_name(name) if name.endswith(KV_SCALES) else name: tensor
                for name, tensor in stored.items()
            }
        records = []
        for module in self.linears:
            parts, record = self.pack(plan, weight_format, module)
            stored |= parts
            records.append(record)
        return stored, records


def direct_layer(
    plan: QuantizePlan, stream: LayerStream, index: int, pack: Pack, *, hollow: bool
) -> QuantizedLayer:
    """A layer of a stream by its number, whose codes `pack` makes; after the last, the output projection."""
    prefix, linears, others = "", (HEAD,), {}
    if index < stream.num_layers:
        prefix, family = stream.prefix(index), stream.family(index)
        linears = tuple(n for n in family.linears if full_name(prefix, n) in plan.modules)
        others = stream.tensors(index, {f"{linear}.weight" for linear in linears})
    elif (bias := f"{HEAD}.bias") in plan.checkpoint:
        others = {bias: plan.checkpoint.tensor(bias)}
    names = tuple(full_name(prefix, linear) for linear in linears)
    return QuantizedLayer(prefix, names, others, pack, LayerResult({}, {}, []), hollow=hollow)


def _with_scales(
    plan: QuantizePlan, weight_format: WeightFormat, module: str, tensor: QuantizedTensor
) -> QuantizedTensor:
    from ..kinds.fp8.kind import Fp8Tensor
    from ..kinds.integer.kind import IntTensor

    if not isinstance(tensor, (IntTensor, Fp8Tensor)):
        return tensor
    stored = TORCH_DTYPES[plan.checkpoint.dtype_name(f"{module}.weight")]
    scales = tensor.scales.to(weight_format.scale_dtype(stored, tensor.scheme))
    if not torch.equal(scales.to(torch.float32), tensor.scales.to(torch.float32)):
        raise BadInput(
            f"{module} has scales that {tensor.scales.dtype} holds and {scales.dtype} of format "
            f"{weight_format.name} does not: write the formats in separate runs"
        )
    return replace(tensor, scales=scales)


def quantize_tensors(
    plan: QuantizePlan,
    family: LayerMap,
    prefix: str,
    tensors: Mapping[str, torch.Tensor],
    weights: Mapping[str, torch.Tensor] | None,
    measured: LayerStatistics,
    *,
    revert_worse: bool,
    allow_fallback: bool = False,
    measures_errors: bool = True,
    step: Callable[[], None] | None = None,
) -> QuantizedLayer:
    """Quantize the linears of a layer, whose tensors are in the checkpoint's dtype by relative name, and
    whose linears may be in memory in float32; `step` is called after each that is solved. BadInput where the
    method fails and may not fall back."""
    began = time.perf_counter()
    device = plan.device
    linears = [name for name in family.linears if full_name(prefix, name) in plan.modules]
    schemes = {name: plan.schemes[full_name(prefix, name)] for name in linears}
    sources = {fold.source for fold in family.folds} - set(family.linears)
    problem = LayerProblem(
        prefix=prefix,
        family=family,
        schemes=schemes,
        scale_dtypes={name: plan.scale_dtype(full_name(prefix, name)) for name in schemes},
        weights={
            name: weights[name] if weights else tensors[f"{name}.weight"].to(device, torch.float32)
            for name in linears
        },
        statistics={
            name: measured.statistics[name]
            for name in (*linears, *family.routers)
            if name in measured.statistics
        },
        norms={name: tensors[f"{name}.weight"].to(device) for name in sources},
        norm_biases={
            name: tensors[f"{name}.bias"].to(device)
            for name in sources
            if f"{name}.bias" in tensors
        },
        with_bias=frozenset(name for name in linears if f"{name}.bias" in tensors),
        routers={
            name: tensors[f"{name}.weight"].to(device, torch.float32) for name in family.routers
        },
        held_out={name: seen for name, seen in measured.held_out.items() if name in schemes},
        remeasure=measured.remeasure,
        block=measured.block,
        layer_error=measured.layer_error if plan.options.judge == "layer" else None,
        options=plan.options,
        importance={
            name: plan.importance[full_name(prefix, name)]
            for name in linears
            if full_name(prefix, name) in plan.importance
        },
        measures_errors=measures_errors,
        step=step,
    )
    with torch.no_grad(), nullcontext() if device == HOST else device:
        result = _solved(plan, problem, allow_fallback) if linears else LayerResult({}, {}, [])
        if revert_worse:
            result = reverted(problem, result)
        reports = []
        for report, (name, tensor) in zip(result.reports, result.weights.items(), strict=True):
            module = full_name(prefix, name)
            zeroed = zeroed_rows(problem.weights[name], tensor, module)
            if zeroed:
                _log.warning("%s: %d rows of tiny weights became zeros", module, zeroed)
            reports.append(replace(report, zeroed_rows=zeroed))
    result = _on_host(replace(result, reports=reports))
    others = dict(tensors)
    for name in linears:
        del others[f"{name}.weight"]
    for name, tensor in (*result.norms.items(), *result.routers.items()):
        others[f"{name}.weight"] = tensor.to(tensors[f"{name}.weight"].dtype)
    others |= {f"{name}.bias": tensor for name, tensor in result.norm_biases.items()}
    solved = {
        full_name(prefix, name): (tensor, report)
        for report, (name, tensor) in zip(result.reports, result.weights.items(), strict=True)
    }

    def pack(
        plan: QuantizePlan, weight_format: WeightFormat, module: str
    ) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        tensor, report = solved[module]
        if len(plan.formats) > 1:
            tensor = _with_scales(plan, weight_format, module, tensor)
        return weight_format.pack(module, tensor), module_record(report, tensor)

    seconds = time.perf_counter() - began
    return QuantizedLayer(prefix, tuple(solved), others, pack, result, seconds)


def _solved(plan: QuantizePlan, problem: LayerProblem, allow_fallback: bool) -> LayerResult:
    """The layer by the method; where it fails and may fall back, rounded to nearest as a whole."""
    try:
        with solving(problem, problem.weights):
            return plan.method.quantize_layer(problem)
    except Unsolved as failed:
        if not allow_fallback:
            raise BadInput(
                f"method {plan.method.name} fails on {failed}: --allow-fallback rounds the linears of "
                "its layer to nearest instead"
            ) from failed
        reason = f"{plan.method.name} failed: {failed.reason}"
    rounded = rounding.quantize_layer(problem)
    reports = [replace(report, fallback=reason) for report in rounded.reports]
    return replace(rounded, reports=reports)


def _on_host(result: LayerResult) -> LayerResult:
    """The result with its tensors on the host, where they are packed and written."""
    tensors = {
        name: {key: tensor.to(HOST) for key, tensor in getattr(result, name).items()}
        for name in ("weights", "norms", "routers", "norm_biases")
    }
    return replace(result, **tensors)


def reverted(problem: LayerProblem, result: LayerResult) -> LayerResult:
    """The result with a fallback to RTN wherever the method did worse; of a layer with folded scales, whose
    linears cannot fall back one by one, as a whole, if the sum of its errors is worse."""
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
        plain = rounding.round_plain(problem, name, problem.weights[name])
        rounded = plain.dequantize()
        again = problem.report(name, rounded, rounded, fallback=WORSE)
        # Of trellis codes RTN is on integers, and the nearest path may have more error than the method.
        if not folded and judged(again)[0] >= judged(report)[0]:
            reports.append(report)
            continue
        weights[name] = plain
        reports.append(again)
    return LayerResult(
        weights=weights,
        norms={} if folded else result.norms,
        reports=reports,
        routers={} if folded else result.routers,
        norm_biases={} if folded else result.norm_biases,
    )


class WrittenWeights(Mapping[str, torch.Tensor]):
    """Tensors by their names in the plain checkpoint, read from written shards as they are asked for."""

    def __init__(
        self,
        folder: Path,
        shards: Sequence[Mapping[str, Any]],
        weight_format: WeightFormat,
        config: Mapping[str, Any],
    ):
        self._folder, self._format, self._config = folder, weight_format, config
        self._quantized = {
            f"{module['module']}.weight" for shard in shards for module in shard["modules"]
        }
        self._shard_of = {name: shard["shard"] for shard in shards for name in shard["tensors"]}

    def __getitem__(self, name: str) -> torch.Tensor:
        if name in self._quantized:
            module = name.removesuffix(".weight")
            return self._format.unpack(module, self, self._config).dequantize()
        return self.tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._quantized | self._shard_of.keys())

    def __len__(self) -> int:
        return len(self._quantized | self._shard_of.keys())

    def __contains__(self, name: object) -> bool:
        return name in self._quantized or name in self._shard_of

    def tensor(self, name: str) -> torch.Tensor:
        """One tensor as it is stored, codes included."""
        path = self._folder / self._shard_of[name]
        with safe_open(path, framework="pt") as shard:
            return shard.get_tensor(name)
