"""Numbers of one weight that tell damage: its size, its tails, its spread by row and column, its codes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..kinds.base.tensor import QuantizedTensor
from ..kinds.integer.kind import IntTensor
from .findings import Finding

_ROWS = 1024
_VARIED = 0.25  # standard deviation of zero points, in codes, from which a slope is told
_TINY = 1e-30


@dataclass(frozen=True, slots=True)
class CodeStatistics:
    """Integer codes of a weight.

    Attributes:
        bits: width of the codes.
        offset: mean of code minus zero point, in steps; near 0 for weights whose mean is 0.
        follows: slope of the groups' mean codes over their zero points, near 1; None: these hardly vary.
        unreached: share of the groups whose codes reach neither end of the range.
    """

    bits: int
    offset: float
    follows: float | None
    unreached: float


@dataclass(frozen=True, slots=True)
class WeightStatistics:
    """One weight `[out, in]`.

    Attributes:
        shape: logarithms of the root mean square, of the kurtosis, and of the spread of rows and columns: the
            standard deviation of the logarithms of their norms.
        faults: findings about numbers that are wrong in any model.
        digest: hash of the values, to find equal experts.
    """

    module: str
    shape: Mapping[str, float]
    faults: tuple[Finding, ...]
    digest: int
    codes: CodeStatistics | None = None


def statistics_of(module: str, weight: torch.Tensor) -> WeightStatistics:
    """The statistics of a plain weight of any float dtype, a chunk of rows in float32 at a time."""
    faults: list[Finding] = []
    columns = torch.zeros(weight.shape[1], dtype=torch.float64)
    rows, fourth, digest = [], 0.0, []
    for chunk in weight.split(_ROWS):
        values = chunk.to(torch.float32)
        squares = values.square()
        rows.append(squares.sum(dim=1, dtype=torch.float64))
        columns += squares.sum(dim=0, dtype=torch.float64)
        fourth += float(squares.square_().sum(dtype=torch.float64))
        digest.append(float(values.sum(dtype=torch.float64)))
    by_row = torch.cat(rows)
    energy = float(by_row.sum())
    if not torch.isfinite(by_row).all():
        faults.append(not_finite(module))
    elif not energy:
        faults.append(Finding("zero-weight", module, "its weight is zero everywhere", "suspect"))
    mean = energy / weight.numel()
    shape = {
        "root mean square": _log(mean) / 2,
        "kurtosis": _log(fourth / weight.numel()) - 2 * _log(mean),
        "spread of its rows": _spread(by_row),
        "spread of its columns": _spread(columns),
    }
    return WeightStatistics(module, shape, tuple(faults), hash((*digest, energy, fourth)))


def quantized_statistics(module: str, tensor: QuantizedTensor) -> WeightStatistics:
    """The statistics of a quantized weight, dequantized, with those of its codes and scales."""
    floats = (part for part in tensor.parts().values() if part.is_floating_point())
    if not all(bool(torch.isfinite(part.to(torch.float32)).all()) for part in floats):
        return WeightStatistics(module, {}, (not_finite(module),), 0)
    weight = tensor.dequantize()
    statistics = statistics_of(module, weight)
    codes = code_statistics(tensor) if isinstance(tensor, IntTensor) else None
    if not (lost := _lost(tensor, weight)):
        return replace(statistics, codes=codes)
    message = f"scales of zero erase {lost} of its weights that have codes: quantize it again"
    return replace(statistics, faults=(Finding("zero-scale", module, message),))


def not_finite(name: str) -> Finding:
    return Finding(
        "not-finite", name, "it holds NaN or infinite values: fetch or quantize it again"
    )


def code_statistics(tensor: IntTensor) -> CodeStatistics:
    codes, zeros = tensor.codes, tensor.zeros.to(torch.float32)
    if tensor.group_index is not None:
        codes = codes[:, tensor.group_index.argsort(stable=True)]
    grouped = codes.view(tensor.out_features, tensor.num_groups, -1)
    means = grouped.to(torch.float32).mean(dim=-1)
    low, high = grouped.aminmax(dim=-1)
    most = tensor.scheme.max_code
    inside = (low > most // 8) & (high < most - most // 8)
    follows = None
    if zeros.numel() > 1 and float(zeros.std()) > _VARIED:
        away = zeros - zeros.mean()
        follows = float((away * means).sum() / away.square().sum())
    offset, unreached = float((means - zeros).mean()), float(inside.float().mean())
    return CodeStatistics(tensor.scheme.bits, offset, follows, unreached)


def _lost(tensor: QuantizedTensor, weight: torch.Tensor) -> int:
    """The number of weights that are zero because of their scale alone."""
    named: Any = tensor
    scales = tensor.parts().get("scales")
    if scales is None or scales.dtype == torch.uint8 or (scales.to(torch.float32) != 0).all():
        return 0
    full = replace(named, scales=torch.ones_like(scales.to(torch.float32)).to(scales.dtype))
    return int(((full.dequantize() != 0) & (weight == 0)).sum())


def _spread(energies: torch.Tensor) -> float:
    """Standard deviation of the logarithms of norms, by their squares; zeros do not count."""
    used = energies[energies > 0]
    return float(used.log().std() / 2) if len(used) > 1 else 0.0


def _log(value: float) -> float:
    return float(torch.tensor(max(value, _TINY), dtype=torch.float64).log())
