"""Layers of an unknown model, rounded without a model: some rows of one tensor in memory at a time."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from ..families.layer_map import LayerMap, fused_name
from ..kinds.base.format import WeightFormat
from ..kinds.base.kind import kind_of
from ..kinds.base.tensor import QuantizedTensor, edges, require_finite, zeroed_rows
from ..methods.base import LayerProblem, ModuleReport
from ..plan.manifest import module_record
from ..plan.plan import QuantizePlan

_VALUES = 2**24  # weights in float32 at a time
_ROWS = 128  # blocks of fp8 and of codebooks do not cross such a multiple
_WHOLE = ("global_scale", "input_scale")


def free_module(
    folder: Path, plan: QuantizePlan, weight_format: WeightFormat, module: str
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The packed tensors of a linear by full name, mapped from a file of `folder`, and its record."""
    tensor, zeroed = _rounded(plan, weight_format, module)
    record = module_record(ModuleReport(module, None, None, zeroed_rows=zeroed), tensor)
    path = folder / "packed.safetensors"
    save_file(weight_format.pack(module, tensor), path)
    with safe_open(path, framework="pt") as file:
        stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    path.unlink()  # the mapping keeps its pages
    plan.checkpoint.release()
    return stored, record


def _rounded(
    plan: QuantizePlan, weight_format: WeightFormat, module: str
) -> tuple[QuantizedTensor, int]:
    """A weight by the plan's method, a chunk of rows at a time, and the number of rows that became zeros."""
    scheme = plan.schemes[module]
    weight = plan.checkpoint.tensor(f"{module}.weight")
    whole = getattr(scheme, "granularity", "") == "tensor" or getattr(scheme, "double_quant", False)
    rows = len(weight) if whole else max(_ROWS, _VALUES // weight.shape[1] // _ROWS * _ROWS)
    largest = _largest(plan, module) if scheme.fuses_scales else None
    dtype = weight_format.scale_dtype(weight.dtype, scheme)
    parts, zeroed = [], 0
    for chunk in weight.split(rows):
        values = chunk.to(torch.float32)
        require_finite(values, module)
        if plan.method.module == "rounding":
            part = kind_of(scheme).round(values, dtype, name=module, largest=largest)
        else:
            family = LayerMap(((module,),), (), frozenset())
            problem = LayerProblem(
                "",
                family,
                {module: scheme},
                {module: dtype},
                {module: values},
                options=plan.options,
            )
            part = plan.method.quantize_layer(problem).weights[module]
        zeroed += zeroed_rows(values, part, module)
        parts.append(part)
    return _joined(parts), zeroed


def _joined(parts: list[QuantizedTensor]) -> QuantizedTensor:
    first: Any = parts[0]
    if len(parts) == 1:
        return first
    names = [name for name in first.parts() if name not in _WHOLE]
    return replace(
        first, **{name: torch.cat([part.parts()[name] for part in parts]) for name in names}
    )


def _largest(plan: QuantizePlan, module: str) -> torch.Tensor:
    """The largest magnitude of a weight and of the linears that servers fuse with it."""
    parent = module.rpartition(".")[0]
    fused = (name for name in plan.modules if name.rpartition(".")[0] == parent)
    names = [name for name in fused if fused_name(name) == fused_name(module)]
    ends = (edges(plan.checkpoint.tensor(f"{name}.weight")) for name in {module, *names})
    return torch.tensor(max(abs(value) for pair in ends for value in pair))
