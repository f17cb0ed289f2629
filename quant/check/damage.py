"""Silent damage of a checkpoint: values that load and are wrong, with and without a plain reference.

Every tensor is read alone. Without a reference a weight is compared with those of the same name in the other
layers and experts. The bounds leave room for what sound models hold: next to the largest deviations of
SmolLM2-135M and the bundled models (measured 2026-11-29, each in layer 0, 20 or 21) a factor of two or more.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from statistics import median

import torch

from ...base.errors import BadInput
from ..formats.registry import checkpoint_format, marked_modules, quantized_modules, read_quantized
from ..kinds.base.format import CACHE_SCALES
from ..model.checkpoint import MANIFEST_NAME, Checkpoint, read_json
from .findings import Finding
from .reference import Comparison, family_of
from .statistics import WeightStatistics, not_finite, quantized_statistics, statistics_of

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
            families[family_of(module)].append(statistics)
            if comparison is not None:
                yield from comparison.add(module, tensor)
        checkpoint.release()
    for statistics in _plain(checkpoint, modules):
        if isinstance(statistics, Finding):
            yield statistics
            continue
        yield from statistics.faults
        if not statistics.faults:
            families[family_of(statistics.module)].append(statistics)
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
