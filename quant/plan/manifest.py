"""Manifest of a checkpoint, which `verify` checks, model cards, and the report by part of a model."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any

from ...base.atomic_io import entry_bytes, raw_bytes
from ..check.engines import loaders
from ..check.loaders import loads_in
from ..kinds.base.tensor import QuantizedTensor
from ..kinds.registry import scheme_record
from ..methods.base import ModuleReport
from ..model.checkpoint import MANIFEST_NAME
from ..model.parameters import by_kind
from .journal import sha256_of, sha256_of_file
from .plan import QuantizePlan, stored
from .selection import PROJECTOR, TEXT, VISION, part_of

CARD_NAME = "README.md"


def is_worse(error: float, rounded: float) -> bool:
    return error > rounded * (1 + 1e-6)


def judged(report: ModuleReport) -> tuple[float, float]:
    """The errors to compare, of the method and of RTN: on held-out tokens where there are any; else zeros."""
    if report.held_out_error is not None and report.rtn_held_out_error is not None:
        return report.held_out_error, report.rtn_held_out_error
    return report.error or 0.0, report.rtn_error or 0.0


def tensor_record(tensor: QuantizedTensor) -> dict[str, Any]:
    """Shape, scheme, and digests of the parts of a quantized weight, before packing."""
    return {
        "out_features": tensor.out_features,
        "in_features": tensor.in_features,
        "scheme": scheme_record(tensor.scheme),
        "sha256": {name: sha256_of(raw_bytes(part)) for name, part in tensor.parts().items()},
    }


def module_record(report: ModuleReport, tensor: QuantizedTensor) -> dict[str, Any]:
    worse = {"worse_than_rounding": is_worse(*judged(report))}
    return asdict(report) | worse | tensor_record(tensor)


def summarise(
    plan: QuantizePlan,
    modules: list[dict[str, Any]],
    *,
    checkpoint_bytes: int,
    quantized_bytes: int,
) -> dict[str, Any]:
    """Summary figures of a checkpoint over all `modules` records, against RTN on held-out tokens where there
    are any; `quantized_bytes` are those of the quantized linears with their scales and zeros."""
    num_weights = sum(out * inner for out, inner in plan.modules.values())
    return {
        "num_modules": len(modules),
        "num_worse": sum(module["worse_than_rounding"] for module in modules),
        "num_fallbacks": sum(module["fallback"] is not None for module in modules),
        "error": _mean(modules, "error"),
        "rtn_error": _mean(modules, "rtn_error"),
        "source_bytes": plan.checkpoint.weight_bytes,
        "checkpoint_bytes": checkpoint_bytes,
        "bits_per_weight": quantized_bytes * 8 / num_weights,
    }


def describe_files(folder: Path, *, digests: bool = True) -> dict[str, dict[str, Any]]:
    """Size and, with `digests`, SHA-256 of every file except the manifest and the card."""
    return {
        path.name: {"bytes": path.stat().st_size}
        | ({"sha256": sha256_of_file(path)} if digests else {})
        for path in sorted(folder.iterdir())
        if path.name not in (MANIFEST_NAME, CARD_NAME)
    }


def to_json(value: dict[str, Any]) -> bytes:
    """JSON for a file: indented, and refusing NaN."""
    return json.dumps(value, indent=2, allow_nan=False).encode() + b"\n"


def model_card(plan: QuantizePlan, number: int, manifest: dict[str, Any]) -> bytes:
    summary, calibration = manifest["summary"], manifest["calibration"]
    origin = manifest.get("dequantized_from")
    rows = []
    if summary["error"] is not None:
        worst = max(manifest["modules"], key=lambda module: module["error"])
        rows += [
            f"| mean relative output error | {summary['error']:.3e} "
            f"(round-to-nearest: {summary['rtn_error']:.3e}) |",
            f"| largest | {worst['error']:.3e} in `{worst['module']}` |",
        ]
    for part in manifest.get("parts", ()):  # of a model that has more than text
        error = "" if part["error"] is None else f", mean error {part['error']:.3e}"
        bits = "" if part["bits_per_weight"] is None else f" at {part['bits_per_weight']:.2f} bits"
        rows.append(
            f"| {part['part']} | {part['quantized']} of {part['quantized'] + part['plain']} linears "
            f"quantized{bits}, {part['bytes']:,} bytes from {part['source_bytes']:,}{error} |"
        )
    mock = bool(manifest.get("mock"))
    tables = plan.table_types(plan.formats[number].name)
    # A GGUF file has no second copy of a tied head.
    own = (n for n in plan.unquantized if not tables or f"{n}.weight" in plan.checkpoint)
    left = by_kind(name for name in own if name not in tables)
    lines = [
        f"# {manifest['model']}, {plan.label}",
        "",
        f"Weights of `{manifest['model']}` quantized by llmopt {manifest['llmopt']} with the method "
        f"`{manifest['method']}`, solver `{manifest['solver']}`, and stored in the format "
        f"`{manifest['format']}`.",
        "",
        *(
            ["**A mock: its codes are random. It shows what loads, and answers nothing.**", ""]
            * mock
        ),
        "| | |",
        "|---|---|",
        *([f"| dequantized from | {origin}, which was quantized already |"] if origin else []),
        f"| quantized linears | {summary['num_modules']} |",
        *(f"| {module} | {block}, as the mix has it |" for module, block in tables.items()),
        f"| left as they were | {', '.join(left) or 'none'} (norms always) |",
        f"| bits per quantized weight | {summary['bits_per_weight']:.2f} |",
        f"| bytes of all weights | {summary['checkpoint_bytes']:,}, from {summary['source_bytes']:,} |",
        *rows,
        f"| calibration | {calibration['samples']} × {calibration['tokens_per_sample']} tokens, "
        f"{calibration['source']} |",
        f"| loads in | {loads_in(loaders(stored(plan), plan.formats[number].name))} |",
        "",
        f"The error is {manifest['error']}. All figures by module, and digests of the computed codes, are in "
        f"`{MANIFEST_NAME}`; `llmopt verify` checks the files against them.",
        "",
    ]
    return "\n".join(lines).encode()


@dataclass(frozen=True, slots=True)
class Conversion:
    """A converted checkpoint; in its records `error` is 0 and `reason` empty where lossless."""

    output: Path
    source_format: str
    target_format: str
    scheme: str
    modules: dict[str, dict[str, Any]]
    loads_in: str

    @property
    def lossless(self) -> bool:
        return not any(module["reason"] for module in self.modules.values())


def conversion_card(result: Conversion, manifest: dict[str, Any]) -> bytes:
    """A short README of a converted checkpoint, made from its manifest."""
    origin = manifest["converted_from"]
    worst = max(manifest["modules"], key=lambda module: module["error"])
    changed = (
        "every dequantized weight is unchanged"
        if result.lossless
        else f"some weights were requantized, `{worst['module']}` the most: by {worst['error']:.2e} "
        "of its square"
    )
    lines = [
        f"# {manifest['model']}, {result.scheme}",
        "",
        f"Converted by llmopt {manifest['llmopt']} from the format `{origin['format']}` to "
        f"`{result.target_format}`: {changed}.",
        "",
        f"Loads in: {result.loads_in}.",
        "",
        f"`{MANIFEST_NAME}` holds digests of every part of every quantized linear and of the files that "
        "they came from; `llmopt verify` checks the files against them.",
        "",
    ]
    return "\n".join(lines).encode()


def parts_of(plan: QuantizePlan) -> dict[str, str]:
    """The part of every tensor on disk: `text`, `vision` or `projector`."""
    model = plan.architecture.meta_model
    targets, text = model.weight_map.targets, model.text_path
    embeddings = model.model.get_input_embeddings(), model.model.get_output_embeddings()
    around = {
        f"{path}.weight"
        for path, module in model.model.named_modules()
        if any(module is embedding for embedding in embeddings)
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
    with_part = [(module, parts[f"{module['module']}.weight"]) for module in modules]
    return [{**module, **({} if part == TEXT else {"part": part})} for module, part in with_part]


def part_reports(
    plan: QuantizePlan, modules: Sequence[Mapping[str, Any]], stored: Mapping[str, int]
) -> list[dict[str, Any]]:
    """A report for each part of a model with a vision side, none where there is text alone, from records of
    the linears and bytes of the stored tensors by name."""
    parts = parts_of(plan)
    if set(parts.values()) == {TEXT}:
        return []
    by_module = {name.rpartition(".")[0]: part for name, part in parts.items()}
    checkpoint = plan.checkpoint
    sizes = {name: entry_bytes(checkpoint.entry(name)) for name in checkpoint.names}
    codes = {f"{module}.weight" for module in plan.modules}
    after = {name: size for name, size in sizes.items() if name not in codes} | dict(stored)
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
        written = {
            name: size
            for name, size in after.items()
            if parts.get(name, by_module.get(name.rpartition(".")[0], TEXT)) == part
        }
        linear_bytes = sum(
            size
            for name, size in written.items()
            if name.rpartition(".")[0] in {*chosen, *plain} and not name.endswith(".bias")
        )
        errors = [records[name] for name in chosen if name in records]
        reports.append(
            {
                "part": part,
                "quantized": len(chosen),
                "plain": len(plain),
                "bits_per_weight": linear_bytes * 8 / weights if weights else None,
                "bytes": sum(written.values()),
                "source_bytes": sum(sizes[name] for name in mine),
                "error": _mean(errors, "error"),
                "rtn_error": _mean(errors, "rtn_error"),
            }
        )
    return reports


def _mean(records: Sequence[Mapping[str, Any]], name: str) -> float | None:
    errors = [record[name] for record in records]
    return None if None in errors or not errors else sum(errors) / len(errors)
