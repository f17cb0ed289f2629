"""Report by part: what the language model, the vision tower and the projector hold, in linears and bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from .plan import QuantizePlan
from .selection import BYTES_OF, PROJECTOR, TEXT, VISION, part_of


@dataclass(frozen=True, slots=True)
class PartReport:
    """One part of a model.

    Attributes:
        quantized, plain: how many linears have codes, and how many kept their floats.
        bits_per_weight: of all these linears, with scales and zeros; None: there are none.
        bytes, source_bytes: of all its tensors, after and before.
        error, rtn_error: means over its quantized linears; None: none, or not measured.
    """

    part: str
    quantized: int
    plain: int
    bits_per_weight: float | None
    bytes: int
    source_bytes: int
    error: float | None
    rtn_error: float | None


def parts_of(plan: QuantizePlan) -> dict[str, str]:
    """The part of every tensor on disk: `text`, `vision` or `projector`."""
    model = plan.architecture.meta_model
    targets, text = model.weight_map.targets, model.text_path
    embeddings = model.model.get_input_embeddings(), model.model.get_output_embeddings()
    around = {
        f"{path}.weight"
        for path, module in model.model.named_modules()
        if any(module is each for each in embeddings)
    }
    parts = {}
    for name in plan.checkpoint.names:
        target = targets.get(name, name)
        inside = not text or target.startswith(f"{text}.") or target in around
        known = target in model.sources
        parts[name] = TEXT if inside or not known else part_of(target.rpartition(".")[0])
    return parts


def with_parts(plan: QuantizePlan, modules: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Records of quantized linears, those of the vision side with their part."""
    parts = parts_of(plan)
    return [
        {
            **module,
            **({} if (part := parts[f"{module['module']}.weight"]) == TEXT else {"part": part}),
        }
        for module in modules
    ]


def part_reports(
    plan: QuantizePlan, modules: Sequence[Mapping[str, Any]], stored: Mapping[str, int]
) -> list[PartReport]:
    """A report for each part of a model with a vision side; none where there is text alone.

    Args:
        modules: records of the quantized linears.
        stored: bytes of the tensors of the quantized layers, by name.
    """
    parts = parts_of(plan)
    if set(parts.values()) == {TEXT}:
        return []
    by_module = {name.rpartition(".")[0]: part for name, part in parts.items()}
    checkpoint = plan.checkpoint
    sizes = {
        name: prod(checkpoint.shape(name)) * BYTES_OF.get(checkpoint.dtype_name(name), 1)
        for name in checkpoint.names
    }
    after = {name: size for name, size in sizes.items() if not _is_requantized(plan, name)}
    after |= stored
    records = {module["module"]: module for module in modules}
    reports = []
    for part in (TEXT, VISION, PROJECTOR):
        mine = {name for name, of in parts.items() if of == part}
        if not mine:
            continue
        chosen = [module for module in plan.modules if f"{module}.weight" in mine]
        plain = [name for name in plan.architecture.unquantized if f"{name}.weight" in mine]
        plain = [name for name in plain if name not in plan.modules]
        plain += [name for name in plan.ignored if f"{name}.weight" in mine and name not in plain]
        weights = sum(prod(checkpoint.shape(f"{name}.weight")) for name in (*chosen, *plain))
        held = {
            name: size
            for name, size in after.items()
            if parts.get(name, by_module.get(name.rpartition(".")[0], TEXT)) == part
        }
        linear_bytes = sum(
            size
            for name, size in held.items()
            if name.rpartition(".")[0] in {*chosen, *plain} and not name.endswith(".bias")
        )
        errors = [records[name] for name in chosen if name in records]
        reports.append(
            PartReport(
                part=part,
                quantized=len(chosen),
                plain=len(plain),
                bits_per_weight=linear_bytes * 8 / weights if weights else None,
                bytes=sum(held.values()),
                source_bytes=sum(sizes[name] for name in mine),
                error=_mean(errors, "error"),
                rtn_error=_mean(errors, "rtn_error"),
            )
        )
    return reports


def _is_requantized(plan: QuantizePlan, name: str) -> bool:
    """Whether a tensor is replaced by codes."""
    module, _, leaf = name.rpartition(".")
    return leaf == "weight" and module in plan.modules


def _mean(records: Sequence[Mapping[str, Any]], name: str) -> float | None:
    errors = [record[name] for record in records]
    return None if None in errors or not errors else sum(errors) / len(errors)
