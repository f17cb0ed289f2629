"""Tensor-parallel slices of dense and quantized weights, along rows (outputs) or columns (inputs)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ....quant.base.errors import BadInput
from ....quant.tensors.base import QuantizedTensor
from ....quant.tensors.codebook import CodebookTensor
from ....quant.tensors.e8p import E8pTensor
from ....quant.tensors.fp4 import Fp4Tensor
from ....quant.tensors.fp8 import BLOCK, Fp8Tensor
from ....quant.tensors.gguf import GgufTensor
from ....quant.tensors.integer import IntTensor
from ....quant.tensors.lookup import LookupTensor
from ....quant.tensors.trellis import TrellisTensor
from ....quant.tensors.vectorwise import VectorwiseTensor
from ....quant.trellis.hadamard import BLOCK as TRANSFORMED
from ....quant.trellis.tiles import TILE

Weight = torch.Tensor | QuantizedTensor


@dataclass(frozen=True, slots=True)
class WeightSlice:
    """Row ranges of each of several stacked linears, or a column range of one.

    With `columns` (row-parallel) the outputs need an all-reduce.
    """

    rows: tuple[tuple[slice, ...], ...] = ()
    columns: slice | None = None


def take(module: str, weight: Weight, rows: Sequence[slice], columns: slice | None) -> Weight:
    """Slice a weight to some outputs (all, where `rows` is empty) and some inputs, as a copy.

    Raises:
        BadInput: the quantized weight of `module` cannot be split there.
    """
    if rows:
        weight = _take_rows(module, weight, rows)
    if columns is not None:
        weight = _take_columns(module, weight, columns)
    return weight


def take_rows(tensor: torch.Tensor, rows: Sequence[slice]) -> torch.Tensor:
    """Rows of a dense tensor, as a copy."""
    return torch.cat([tensor[run] for run in rows])


def _take_rows(module: str, weight: Weight, rows: Sequence[slice]) -> Weight:
    if isinstance(weight, torch.Tensor):
        return take_rows(weight, rows)
    if isinstance(weight, E8pTensor):
        raise _refusal(module, weight, "along its outputs")
    blocks = isinstance(weight, Fp8Tensor) and weight.scheme.granularity == "block"
    if blocks or isinstance(weight, CodebookTensor | TrellisTensor):
        for run in rows:
            if run.start % BLOCK or (run.stop % BLOCK and run.stop != weight.out_features):
                raise _refusal(module, weight, f"between outputs {run.start} and {run.stop}", BLOCK)
    slices = [weight.rows(run) for run in rows]
    first, whole = slices[0], weight.parts()
    parts = {}
    for name, part in first.parts().items():
        # Parts without an output dimension, such as a permutation of the inputs, are the same in all slices.
        shared = name in whole and whole[name].shape == part.shape
        along = 1 if name == "trellis" else 0
        parts[name] = (
            part if shared else torch.cat([one.parts()[name] for one in slices], dim=along)
        )
    return _changed(first, parts)


def _take_columns(module: str, weight: Weight, columns: slice) -> Weight:
    if isinstance(weight, torch.Tensor):
        return weight[:, columns].clone()
    step = _columns_together(weight)
    if step is None:
        raise _refusal(module, weight, "along its inputs")
    if columns.start % step or columns.stop % step:
        where = f"between inputs {columns.start} and {columns.stop}"
        raise _refusal(module, weight, where, step)
    runs = slice(columns.start // step, columns.stop // step)
    return _changed(weight, {n: p.clone() for n, p in _columns(weight, columns, runs).items()})


def _columns_together(weight: QuantizedTensor) -> int | None:
    """Group size along the inputs: how many share a scale or a block; None: no split is possible."""
    if isinstance(weight, IntTensor):
        if weight.group_index is not None:
            return None
        return 1 if weight.num_groups == 1 else weight.in_features // weight.num_groups
    if isinstance(weight, Fp8Tensor):
        return BLOCK if weight.scheme.granularity == "block" else 1
    if isinstance(weight, CodebookTensor):
        size = weight.scheme.block_size
        return None if weight.scheme.double_quant or weight.in_features % size else size
    if isinstance(weight, Fp4Tensor):
        return weight.scheme.block_size
    if isinstance(weight, GgufTensor):
        return weight.scheme.block[0]
    if isinstance(weight, TrellisTensor):
        return TRANSFORMED
    if isinstance(weight, LookupTensor):
        return 1 if weight.sparse_rows is None else None
    return 1 if isinstance(weight, VectorwiseTensor) else None


def _columns(weight: QuantizedTensor, columns: slice, runs: slice) -> dict[str, torch.Tensor]:
    """The weight's parts sliced along the inputs; `runs` is the range of groups or blocks."""
    if isinstance(weight, IntTensor):
        groups = slice(None) if weight.num_groups == 1 else runs
        return {
            "codes": weight.codes[:, columns],
            "scales": weight.scales[:, groups],
            "zeros": weight.zeros[:, groups],
        }
    if isinstance(weight, Fp8Tensor):
        blocks = runs if weight.scheme.granularity == "block" else slice(None)
        return {"values": weight.values[:, columns], "scales": weight.scales[:, blocks]}
    if isinstance(weight, CodebookTensor):
        magnitudes = weight.absmax.view(weight.out_features, -1)[:, runs]
        return {"codes": weight.codes[:, columns], "absmax": magnitudes.flatten()}
    if isinstance(weight, Fp4Tensor):
        return {"codes": weight.codes[:, columns], "scales": weight.scales[:, runs]}
    if isinstance(weight, GgufTensor):
        size = weight.scheme.block[1]
        return {"data": weight.data[:, runs.start * size : runs.stop * size]}
    if isinstance(weight, TrellisTensor):
        tiles = slice(columns.start // TILE, columns.stop // TILE)
        return {"trellis": weight.trellis[tiles], "suh": weight.suh[columns]}
    assert isinstance(weight, LookupTensor | VectorwiseTensor)
    return {"codes": weight.codes[:, columns]}


def _changed(weight: Any, parts: Mapping[str, torch.Tensor]) -> QuantizedTensor:
    return replace(weight, **parts)


def _refusal(module: str, weight: QuantizedTensor, where: str, step: int | None = None) -> BadInput:
    multiple = "" if step is None else f": only at multiples of {step}"
    return BadInput(
        f"{module}: {weight.scheme.label} cannot be divided {where}{multiple}; choose another "
        "tensor_parallel_size"
    )
