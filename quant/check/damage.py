"""Silent damage of a checkpoint: values that load and are wrong, with and without a plain reference.

Every tensor is read alone. Without a reference a weight is compared with those of the same name in the other
layers and experts. The bounds leave room for what sound models hold: next to the largest deviations of
SmolLM2-135M and the bundled models (measured 2026-11-29, each in layer 0, 20 or 21) a factor of two or more.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch

from ...base.errors import BadInput
from ..formats.registry import checkpoint_format, marked_modules, quantized_modules, read_quantized
from ..kinds.base.format import CACHE_SCALES
from ..kinds.base.tensor import QuantizedTensor
from ..kinds.integer.kind import IntTensor
from ..model.checkpoint import MANIFEST_NAME, Checkpoint, kind_name, read_json
from .findings import Finding
from .reference import Comparison

# Deviation of a logarithm from the family's median, with the largest of the sound models after it.
_FARTHEST = {
    "root mean square": 3.0,  # 1.30
    "kurtosis": 4.0,  # 1.87
    "spread of its rows": 0.8,  # 0.27
    "spread of its columns": 1.3,  # 0.61
}
_ROBUST_DEVIATIONS = 6.0
_MAD = 1.4826  # of the standard deviation of a normal distribution
_LEAST_FAMILY = 4
_OFFSET, _SAME_SIGN, _LEAST_MODULES = 0.6, 0.95, 5
_ONE_OFFSET, _FEW_BITS = 0.8, 4
_FOLLOWS = 0.3  # sound: 0.56 to 1
_UNREACHED = 0.5  # sound: 0
_FLOATS = ("F16", "BF16", "F32")


def damage(checkpoint: Checkpoint, reference: Checkpoint | None = None) -> Iterator[Finding]:
    """Read every value of a checkpoint, and compare it with the plain `reference` where that is given."""
    manifest = checkpoint.folder / MANIFEST_NAME
    if manifest.is_file() and read_json(manifest).get("mock"):
        yield Finding("mock", str(checkpoint.path), "its codes are random (--mock)", "note")
        return
    comparison = None if reference is None else Comparison(reference)
    families: dict[str, list[WeightStatistics]] = defaultdict(list)
    try:
        modules, refusal = _modules(checkpoint)
    except BadInput as error:
        yield Finding(
            "not-read", str(checkpoint.path), f"its values are not compared: {error}", "note"
        )
        return
    faulty = False
    for module in modules:
        try:
            tensor = read_quantized(checkpoint, module)
            statistics = quantized_statistics(module, tensor)
        except (BadInput, ValueError) as error:
            faulty = True
            yield Finding("unreadable", module, f"it cannot be read: {error}")
            continue
        yield from statistics.faults
        if not statistics.faults:
            families[kind_name(module)].append(statistics)
            if comparison is not None:
                yield from comparison.add(module, tensor)
        checkpoint.release()
    for statistics in _plain(checkpoint, modules):
        if isinstance(statistics, Finding):
            yield statistics
            continue
        yield from statistics.faults
        if not statistics.faults:
            families[kind_name(statistics.module)].append(statistics)
    if refusal and not faulty:
        yield Finding("unreadable", str(checkpoint.path), refusal)
    yield from _zero_points([weight for family in families.values() for weight in family])
    for family in families.values():
        yield from _apart(family)
        yield from _equal_experts(family)
        for statistics in family:
            yield from _codes(statistics)
    if comparison is not None:
        yield from comparison.findings()


def _modules(checkpoint: Checkpoint) -> tuple[list[str], str]:
    """The quantized linears, and why the tensors do not fit them. BadInput: an unsupported format."""
    if checkpoint.quantization_config is None:
        return [], ""
    weight_format = checkpoint_format(checkpoint)
    try:
        return sorted(quantized_modules(checkpoint)), ""
    except BadInput as error:
        return sorted(marked_modules(checkpoint, weight_format)), str(error)


def _plain(checkpoint: Checkpoint, modules: Sequence[str]) -> Iterator[WeightStatistics | Finding]:
    """The statistics of plain matrices, and findings about all other float tensors."""
    owners = set(modules)
    for name in checkpoint.names:
        module = name.removesuffix(".weight")
        is_float = checkpoint.dtype_name(name) in _FLOATS
        if not is_float or module in owners or name.rpartition(".")[0] in owners:
            continue
        tensor = checkpoint.tensor(name)
        if tensor.dim() == 2 and tensor.numel() and module != name:
            yield statistics_of(module, tensor)
        elif not torch.isfinite(tensor).all():
            yield not_finite(name)
        elif name.endswith(CACHE_SCALES) and not (tensor > 0).all():
            message = "a scale of the KV cache is not positive: quantize it again"
            yield Finding("zero-scale", name, message)


def _zero_points(all_statistics: Sequence[WeightStatistics]) -> Iterator[Finding]:
    """Zero points that are off by one in all linears (GPTQ's v1 read as v2), or in one."""
    offsets = {s.module: s.codes.offset for s in all_statistics if s.codes}
    if len(offsets) < _LEAST_MODULES:
        return
    middle = median(offsets.values())
    same = sum(value * middle > 0 for value in offsets.values()) / len(offsets)
    if abs(middle) > _OFFSET and same >= _SAME_SIGN:
        yield Finding(
            "zero-points-off",
            f"{len(offsets)} linears",
            f"codes lie {middle:+.1f} steps from their zero points, in the median: these are off by one, as "
            "of GPTQ's format v1 read as v2 or the reverse; correct checkpoint_format, or convert it again",
        )
        return
    for statistics in all_statistics:
        codes = statistics.codes
        if codes and codes.bits <= _FEW_BITS and abs(codes.offset) > _ONE_OFFSET:
            yield Finding(
                "zero-points-off",
                statistics.module,
                f"its codes lie {codes.offset:+.1f} steps from their zero points, those of other linears "
                f"{middle:+.1f}: quantize it again",
                "suspect",
            )


def _codes(statistics: WeightStatistics) -> Iterator[Finding]:
    codes = statistics.codes
    if codes is None:
        return
    if codes.follows is not None and codes.follows < _FOLLOWS:
        yield Finding(
            "packing-order",
            statistics.module,
            "its codes and zero points belong to different groups or channels: the order of packing is "
            "another one (AWQ's against GPTQ's), or one of them is transposed; convert it again",
        )
    if codes.unreached > _UNREACHED:
        yield Finding(
            "unused-range",
            statistics.module,
            f"{codes.unreached:.0%} of its groups use neither end of the range of codes: the bits of the "
            "config are not those of the codes, or the scales are too large; quantize it again",
            "suspect",
        )


def _apart(family: Sequence[WeightStatistics]) -> Iterator[Finding]:
    """Weights whose statistics are far from those of the other layers and experts."""
    if len(family) < _LEAST_FAMILY:
        return
    for name, farthest in _FARTHEST.items():
        values = {statistics.module: statistics.shape[name] for statistics in family}
        middle = median(values.values())
        spread = _MAD * median(abs(value - middle) for value in values.values())
        for module, value in values.items():
            away = abs(value - middle)
            if away > max(farthest, _ROBUST_DEVIATIONS * spread):
                yield Finding(
                    "unlike-its-family",
                    module,
                    f"the {name} of its weight is {math.exp(value - middle):.2g} times that in the "
                    f"other {len(family) - 1} like it: compare it with --reference, or quantize it again",
                    "suspect",
                )


def _equal_experts(family: Sequence[WeightStatistics]) -> Iterator[Finding]:
    first: dict[int, str] = {}
    for statistics in family:
        if ".experts." not in statistics.module:
            return
        other = first.setdefault(statistics.digest, statistics.module)
        if other != statistics.module:
            yield Finding(
                "equal-experts",
                statistics.module,
                f"its weight is that of {other}: one of the two was written twice",
                "suspect",
            )


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
