"""Layers without a model: those of an unknown one, rounded some rows at a time, and mock layers.

A mock has the names, shapes and dtypes of a real run, and random codes. One random weight is rounded for
every scheme and shape, and stands for all linears of that kind. The largest
tensor of a linear, and every plain matrix above `HOLLOW_BYTES`, is a hole in its file after its first bytes.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from ...base.atomic_io import HOLLOW_BYTES
from ..base.scheme import Scheme
from ..families.layer_map import LayerMap, fused_name
from ..kinds.base.format import WeightFormat
from ..kinds.base.kind import kind_of
from ..kinds.base.tensor import QuantizedTensor, edges, require_finite, zeroed_rows
from ..methods.base import LayerProblem, ModuleReport
from ..plan.manifest import module_record, tensor_record
from ..plan.plan import QuantizePlan
from ..plan.selection import TORCH_DTYPES
from ..stream.calls import KvRanges, kv_heads
from .quantized_layer import QuantizedLayer, direct_layer
from .stages import Stage

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


_ROUNDED_ROWS = 128
_DEVIATION, _LARGEST = 0.02, 0.08
# Parts that follow from the shape of the weight.
_STRUCTURE = ("group_index", "sparse_rows", "sparse_columns", "left", "right")


def mock_module(
    plan: QuantizePlan, weight_format: WeightFormat, module: str
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The packed tensors of a linear by full name, and its record."""
    scheme = plan.schemes[module]
    dtype = TORCH_DTYPES[plan.checkpoint.dtype_name(f"{module}.weight")]
    scale_dtype = weight_format.scale_dtype(dtype, scheme)
    parts, record = _packed(weight_format, scheme, plan.modules[module], scale_dtype)
    report = asdict(ModuleReport(module, None, None)) | {"worse_than_rounding": False}
    return {module + suffix: part for suffix, part in parts.items()}, report | record


def mock_layer(plan: QuantizePlan, stage: Stage, index: int) -> QuantizedLayer:
    """A layer of a stage by its number there, with scales of a KV cache where they are stored."""
    layer = direct_layer(plan, stage.stream, index, mock_module, hollow=True)
    if plan.kv_cache is None or stage.vision or not layer.prefix:
        return layer
    ones = torch.ones(kv_heads(plan.checkpoint.text_config))
    scales = KvRanges(key=ones, value=ones).scales(plan.kv_cache, plan.kv_cache_strategy)
    return replace(layer, others={**layer.others, **scales})


def hollow_names(tensors: dict[str, torch.Tensor], modules: Collection[str]) -> set[str]:
    """The tensors to leave as holes: the largest one of each module, and large ones of no module."""
    largest: dict[str, str] = {}
    for name, tensor in tensors.items():
        owner = name.rpartition(".")[0]
        while owner and owner not in modules:
            owner = owner.rpartition(".")[0]
        owner = owner or name
        if owner == name and tensor.nbytes <= HOLLOW_BYTES:
            continue
        if owner not in largest or tensor.nbytes > tensors[largest[owner]].nbytes:
            largest[owner] = name
    return set(largest.values())


@lru_cache(maxsize=64)
def _packed(
    weight_format: WeightFormat, scheme: Scheme, shape: tuple[int, int], scale_dtype: torch.dtype
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The packed tensors by suffix, and their record, without digests."""
    tensor = random_weight(scheme, shape, scale_dtype)
    packed = weight_format.pack("", tensor)
    return packed, tensor_record(tensor) | {"sha256": {}}


def random_weight(
    scheme: Scheme, shape: tuple[int, int], scale_dtype: torch.dtype
) -> QuantizedTensor:
    """A weight `[out, in]` of a scheme: a normal one of few rows, rounded and repeated to the full shape."""
    kind = kind_of(scheme)
    blank: Any = kind.blank(*shape, scale_dtype)
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(min(shape[0], _ROUNDED_ROWS), shape[1], generator=generator).mul_(
        _DEVIATION
    )
    values.clamp_(-_LARGEST, _LARGEST)[0, 0] = _LARGEST
    largest, input_scale = values.abs().max(), getattr(blank, "input_scale", None)
    rounded = kind.round(values, scale_dtype, input_scale=input_scale, largest=largest).parts()
    repeated = {
        name: _repeated(rounded[name], part)
        for name, part in blank.parts().items()
        if name in rounded and name not in _STRUCTURE
    }
    return replace(blank, **repeated)


def _repeated(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    flat = values.flatten()
    times = -(-like.numel() // max(1, flat.numel()))
    return flat.repeat(times)[: like.numel()].view(like.shape)
