"""Tables of `llmopt quantize`: dry run and result."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Any

from rich import box

from .console import say, table_of

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from ...quant.pipeline.pipeline import QuantizeResult
    from ...quant.pipeline.preflight import Preflight

MIB = 2**20
CENTRED: dict[str, Any] = {"title_justify": "center"}


def show_preflight(answer: Preflight, console: Console) -> None:
    """Print predicted sizes, memory, time and compatible loaders."""
    parts = sorted({kind.part for kind in answer.kinds})
    rows = (
        (
            kind.name if len(parts) == 1 else f"{kind.part}: {kind.name}",
            str(kind.count),
            kind.scheme or "not quantized",
            f"{kind.bytes / MIB:.2f}",
            f"{kind.bits_per_weight:.3f}",
        )
        for kind in answer.kinds
    )
    header = ("module", "count", "scheme", "MiB", "bits / weight")
    console.print(table_of(header, rows, title="quantization of the linears", **CENTRED))
    for name, size in answer.tensor_bytes.items():
        files = f"{answer.file_bytes[name]:,} of files, from {answer.source_bytes:,}"
        bits = f"{answer.bits_per_weight:.3f} bits per quantized weight"
        say(f"{name}: {size:,} bytes of tensors, {files}; {bits}", console)
    memory = answer.memory
    sizes = ((name, getattr(memory, name) / MIB) for name in memory.__dataclass_fields__)
    parts = ", ".join(f"{name} {size:.1f}" for name, size in sizes)
    say(f"peak memory beyond the start: about {memory.bytes / MIB:.0f} MiB ({parts})", console)
    say(f"time: {answer.time}", console)
    rows = (
        (loader.format, loader.name, "yes" if loader.loads else "no", loader.reason)
        for loader in answer.loaders
    )
    header = ("format", "loader", "", "why")
    console.print(table_of(header, rows, left=range(4), title="loads in", **CENTRED))


def show_result(result: QuantizeResult, seconds: float, console: Console) -> None:
    """Print one row per layer, then the totals."""
    manifest, summary = result.manifest, result.manifest["summary"]
    title = f"{manifest['model']}: {manifest['method']}, {manifest['scheme']}, {manifest['format']}"
    if summary["error"] is None:
        say(f"{title}; {summary['num_modules']} linears", console)
    else:
        by_layer = groupby(manifest["modules"], key=_layer)
        rows = (_row(layer, list(members)) for layer, members in by_layer)
        errors = ("error", "rtn error", "error / rtn", "held out", "worst linear")
        style = {**CENTRED, "box": box.HEAVY_HEAD}
        console.print(
            table_of(("layer", "linears", *errors), rows, left=(0, 6), title=title, **style)
        )
    if manifest.get("parts"):
        console.print(_parts(manifest["parts"]))
    before, after = summary["source_bytes"], summary["checkpoint_bytes"]
    mean = []
    if summary["error"] is not None:
        ratio = summary["error"] / summary["rtn_error"] if summary["rtn_error"] else 1.0
        error = f"mean relative output error {summary['error']:.3e}"
        mean = [f"{error}, {ratio:.3f} × that of round-to-nearest"]
    lines = [
        *mean,
        *_few_tokens(manifest),
        *_remarks(manifest["modules"]),
        f"weights {after / MIB:.2f} MiB, from {before / MIB:.2f} MiB "
        f"({before / after:.2f} × smaller); {summary['bits_per_weight']:.2f} bits per quantized weight",
        f"peak memory {result.peak_bytes / MIB:.0f} MiB beyond the start, "
        f"predicted {result.preflight.memory.bytes / MIB:.0f} MiB",
        f"loads in: {result.loads_in}",
        f"written to {result.output} in {seconds:.1f} s",
    ]
    for line in lines:
        say(line, console)


def _parts(parts: list[dict[str, Any]]) -> Table:
    """Linears, bits, bytes and errors of the text, the vision tower and the projector."""
    header = ["part", "quantized", "plain", "bits / weight", "MiB", "from", "error", "rtn error"]
    table = table_of(header, title="by part", **CENTRED)
    for part in parts:
        bits, error, rtn = (part[name] for name in ("bits_per_weight", "error", "rtn_error"))
        table.add_row(
            part["part"],
            str(part["quantized"]),
            str(part["plain"]),
            "-" if bits is None else f"{bits:.2f}",
            f"{part['bytes'] / MIB:.2f}",
            f"{part['source_bytes'] / MIB:.2f}",
            "-" if error is None else f"{error:.3e}",
            "-" if rtn is None else f"{rtn:.3e}",
        )
    return table


def _layer(module: dict[str, Any]) -> str:
    numbers = [part for part in module["module"].split(".") if part.isdigit()]
    if module.get("part") in ("vision", "projector"):
        return " ".join([module["part"], *numbers[:1]])
    return numbers[0] if numbers else "head"


def _row(layer: str, modules: list[dict[str, Any]]) -> list[str]:
    error, rtn = (_mean(modules, name) for name in ("error", "rtn_error"))
    assert error is not None and rtn is not None
    held_out, rtn_held_out = (
        _mean(modules, name) for name in ("held_out_error", "rtn_held_out_error")
    )
    worse = (
        error > rtn if held_out is None or rtn_held_out is None else held_out > rtn_held_out
    ) and any(module["error"] != module["rtn_error"] for module in modules)
    worst = max(modules, key=lambda module: module["error"])
    return [
        layer,
        str(len(modules)),
        f"{error:.3e}",
        f"{rtn:.3e}",
        (f"{error / rtn:.3f}" if rtn else "-") + (" worse" if worse else ""),
        f"{held_out:.3e}" if held_out is not None else "-",
        f"{worst['module'].split('.')[-1]} {worst['error']:.2e}",
    ]


def _mean(modules: list[dict[str, Any]], name: str) -> float | None:
    values = [module[name] for module in modules if module[name] is not None]
    return sum(values) / len(values) if values else None


def _few_tokens(manifest: dict[str, Any]) -> list[str]:
    """A warning where fewer tokens than inputs reached a linear of a calibrated method, such as an expert."""
    from ...quant.methods.registry import METHODS

    modules = manifest["modules"] if METHODS[manifest["method"]].needs_statistics else []
    few = [module for module in modules if 0 < module["num_tokens"] < module["in_features"]]
    if not few:
        return []
    worst = min(few, key=lambda module: module["num_tokens"] / module["in_features"])
    return [
        f"warning: fewer calibration tokens than inputs reached {len(few)} linears such as "
        f"{worst['module']} ({worst['num_tokens']} tokens, {worst['in_features']} inputs)"
    ]


def _remarks(modules: list[dict[str, Any]]) -> list[str]:
    lines = []
    fallbacks: dict[str, list[str]] = {}
    for module in modules:
        if module["fallback"]:
            fallbacks.setdefault(module["fallback"], []).append(module["module"])
    for reason, names in fallbacks.items():
        lines.append(
            f"fell back to round-to-nearest: {len(names)} linears such as {names[0]} ({reason})"
        )
    worse = [module["module"] for module in modules if module["worse_than_rounding"]]
    if worse:
        lines.append(
            f"warning: worse than round-to-nearest: {len(worse)} linears such as {worse[0]}; "
            "--revert-worse makes them fall back"
        )
    return lines
