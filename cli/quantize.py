"""`llmopt quantize`: a model in, a quantized checkpoint and its error report out."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .options import ModelArgument, ModelOption

if TYPE_CHECKING:
    from rich.console import Console

    from ..quant.pipeline import QuantizeResult


def quantize(
    model: ModelArgument = None,
    model_option: ModelOption = None,
    method: Annotated[str, typer.Option(help="How codes are chosen: awq or rtn.")] = "awq",
    bits: Annotated[
        int | None, typer.Option(help="Bits of a weight. Default: the method's own, mostly 4.")
    ] = None,
    group_size: Annotated[
        int | None,
        typer.Option(
            help="Input channels that share a scale; -1: one scale per output channel. "
            "Default: the largest of 128, 64, 32, 16 that divides every width."
        ),
    ] = None,
    symmetric: Annotated[
        bool | None,
        typer.Option(
            "--symmetric/--asymmetric",
            help="Zero in the middle, or wherever fits. Default: as the format prefers.",
        ),
    ] = None,
    format_name: Annotated[
        str | None,
        typer.Option(
            "--format",
            help="awq or compressed-tensors. Default: awq for 4-bit asymmetric --method awq, "
            "else compressed-tensors.",
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Folder to create. Default: ./MODEL-METHOD-BITSbit."),
    ] = None,
    calibration: Annotated[
        str | None,
        typer.Option(help="A .txt or .jsonl file or a hub dataset id. Default: bundled stories."),
    ] = None,
    num_samples: Annotated[int, typer.Option(help="Calibration samples.")] = 64,
    seq_len: Annotated[
        int | None,
        typer.Option(help="Tokens in a sample. Default: 256, or the model's context if shorter."),
    ] = None,
    ignore: Annotated[
        list[str] | None,
        typer.Option(
            help="Regular expression: linears that it finds stay as they are. Repeatable."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Shuffles the calibration texts.")] = 0,
    restart: Annotated[
        bool, typer.Option("--restart", help="Throw away the unfinished work of an earlier run.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the result alone, as JSON, on stdout.")
    ] = False,
) -> None:
    """Quantize a model's weights; an interrupted run goes on where it stopped."""
    import time

    from ..quant.errors import BadInput
    from ..quant.journal import work_folder
    from ..quant.models import resolve_model
    from ..recipes import DEFAULT_MODEL
    from .output import TerminalProgress, emit_json, people, result_console

    if model is not None and model_option is not None and model != model_option:
        raise BadInput(f"two models were given, {model!r} and {model_option!r}: give one")
    name = model or model_option or DEFAULT_MODEL
    folder = resolve_model(name)
    label = Path(name).name or folder.resolve().name
    target = output or Path(f"{label}-{method}-{bits or 4}bit")

    from ..quant.pipeline import quantize as run
    from ..quant.plan import QuantizeRequest

    request = QuantizeRequest(
        model=folder,
        output=target,
        method=method,
        bits=bits,
        group_size=group_size,
        symmetric=symmetric,
        format=format_name,
        calibration=calibration,
        num_samples=num_samples,
        seq_len=seq_len,
        ignore=tuple(ignore or ()),
        seed=seed,
        restart=restart,
        model_name=label,
    )
    progress = TerminalProgress()
    began = time.monotonic()
    try:
        result = run(request, progress)
    except KeyboardInterrupt:
        progress.finish()
        where = work_folder(target)
        if where.exists():
            people.print(
                f"interrupted: the finished layers are in {where}; the same command goes on from there",
                soft_wrap=True,
            )
        else:
            people.print("interrupted before any layer was finished")
        raise typer.Exit(130) from None
    finally:
        progress.finish()
    seconds = time.monotonic() - began
    if as_json:
        emit_json(
            {
                "output": str(result.output),
                "seconds": round(seconds, 3),
                "resumed_layers": result.resumed_layers,
                "loads_in": result.loads_in,
                "notes": list(result.notes),
                "manifest": result.manifest,
            }
        )
    _show(result, seconds, result_console(as_json))


def _show(result: QuantizeResult, seconds: float, console: Console) -> None:
    """One row a layer, then the figures of the whole."""
    from itertools import groupby

    from rich.table import Table

    manifest, summary = result.manifest, result.manifest["summary"]
    label = manifest["scheme"]
    table = Table(title=f"{manifest['model']}: {manifest['method']}, {label}, {manifest['format']}")
    table.add_column("layer")
    for column in ("linears", "error", "rtn error", "error / rtn", "worst linear"):
        table.add_column(column, justify="left" if column == "worst linear" else "right")
    for layer, group_of in groupby(manifest["modules"], key=lambda m: m["module"].split(".")[2]):
        modules = list(group_of)
        error = sum(module["error"] for module in modules) / len(modules)
        rtn = sum(module["rtn_error"] for module in modules) / len(modules)
        worst = max(modules, key=lambda module: module["error"])
        table.add_row(
            layer,
            str(len(modules)),
            f"{error:.3e}",
            f"{rtn:.3e}",
            f"{error / rtn:.3f}" if rtn else "-",
            f"{worst['module'].split('.')[-1]} {worst['error']:.2e}",
        )
    console.print(table)
    before, after = summary["source_bytes"], summary["checkpoint_bytes"]
    ratio = summary["error"] / summary["rtn_error"] if summary["rtn_error"] else 1.0
    console.print(
        f"mean relative output error {summary['error']:.3e}, {ratio:.3f} × that of plain rounding",
        soft_wrap=True,
    )
    console.print(
        f"weights {after / 2**20:.2f} MiB, from {before / 2**20:.2f} MiB "
        f"({before / after:.2f} × smaller); {summary['bits_per_weight']:.2f} bits per quantized weight",
        soft_wrap=True,
    )
    console.print(f"loads in: {result.loads_in}", soft_wrap=True)
    console.print(f"written to {result.output} in {seconds:.1f} s", soft_wrap=True)
