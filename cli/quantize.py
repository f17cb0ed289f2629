"""`llmopt quantize`: quantize a model and report the errors."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, ClassVar

import typer

from ..base.atomic_io import check_output
from ..base.errors import BadInput
from ..base.option import at_least, check_limits, keywords_of_words, option
from ..quant.plan.request import QuantizeRequest, check_free
from .options.command import From, Words, with_options
from .options.shared import ModelOptions, json_option, output_option

_RUN = ("tensor_parallel", "trust_remote_code", "restart", "mock", "model_free")


@dataclass(frozen=True, slots=True)
class RunOptions:
    """Dry run, processes, and printed output."""

    PANEL: ClassVar = "Run"

    dry_run: bool = option(
        False,
        "Only predict sizes, time, memory and compatible loaders, from config and headers.",
        common=True,
    )
    time: bool = option(
        False,
        "With --dry-run: read the data and quantize a layer, for a better estimate of the time.",
    )
    nproc: int | None = option(
        None,
        "Processes of this machine that share the work, started by torchrun; any number writes the same "
        "bytes. `torchrun -m llmopt quantize` starts them on several machines.",
        limit=at_least(1),
        common=True,
    )
    as_json: bool = json_option()

    def __post_init__(self) -> None:
        check_limits(self, by_flag=True)
        if self.time and not self.dry_run:
            raise BadInput("--time refines the estimate of --dry-run: give both")


@with_options
def quantize(
    context: typer.Context,
    model: ModelOptions,
    asked: Annotated[Words, From(QuantizeRequest, but=_RUN)],
    output: Path | None = output_option(
        "folder", "Folder to create. Default: ./MODEL-METHOD-BITSbit."
    ),
    *,
    run: Annotated[Words, From(QuantizeRequest, only=_RUN)],
    chosen: RunOptions,
) -> None:
    """Quantize a model's weights; an interrupted run is resumed."""
    from ..base.processor import keep_few_gemms
    from ..engine.base.units import parse_size
    from ..quant.methods.registry import METHODS
    from ..quant.model.checkpoint import GGUF_SUFFIX
    from ..quant.source.models import resolve_model
    from ..recipes import DEFAULT_MODEL

    name = model.name or DEFAULT_MODEL
    label = Path(name).name.removesuffix(GGUF_SUFFIX) or resolve_model(name).resolve().name
    given = keywords_of_words(QuantizeRequest, asked | run)
    bpw, size = asked["target_bpw"], asked["target_size"]
    if size is not None:
        given["target_bytes"] = parse_size(size)
    request = QuantizeRequest.of(name, output or Path(), **given)
    if output is None:
        kind = request.gguf_type or (f"{bpw:g}bpw" if bpw else size)
        if kind is None:
            bits = request.bits
            if bits is None and request.method in METHODS:
                bits = METHODS[request.method].bits
            kind = f"{request.method}-{bits or 4}bit"
        request = replace(request, output=Path(f"{label}-{kind}"))
    keep_few_gemms()
    if output is not None or not chosen.dry_run:
        check_output(request.output, "--output", folder=True)
    # Nothing before imports torch.
    if chosen.dry_run:
        _dry_run(request, chosen)
        return
    check_free(request.output)
    if chosen.nproc is not None:
        from ..quant.base import workers

        if not workers.is_worker():
            raise typer.Exit(workers.launch(chosen.nproc, "llmopt", context.find_root().obj))
    _run(request, chosen.as_json)


def _dry_run(request: QuantizeRequest, chosen: RunOptions) -> None:
    from ..engine.base.units import format_gib
    from ..engine.planner.catalog import facts_of
    from ..quant.plan.sketch import sketched_bytes, sketched_readers
    from .output.console import TerminalProgress, emit_json, result_console, say

    if os.environ.get("RANK", "0") == "0":  # of torchrun's processes the first
        size = sketched_bytes(request)
        result = "" if size is None else f"; quantized about {format_gib(size)}"
        line = f"{facts_of(request.model).line}{result}{sketched_readers(request)}"
        say(f"{request.model_name}: {line}")
    # What follows imports torch and transformers' model.
    from ..quant.base.workers import is_first
    from ..quant.pipeline.pipeline import predict
    from .output.quantize_tables import show_preflight

    with TerminalProgress() as progress:
        answer = predict(request, progress, chosen.nproc, timed=chosen.time)
    if not is_first():
        return
    if chosen.as_json:
        emit_json(answer.as_dict())
    else:
        show_preflight(answer, result_console(chosen.as_json))


def _run(request: QuantizeRequest, as_json: bool) -> None:
    from ..quant.base.workers import is_first, is_worker
    from ..quant.pipeline.pipeline import quantize as run
    from ..quant.plan.request import work_folder
    from .output.console import TerminalProgress, result_console
    from .output.quantize_tables import show_result

    def kept() -> str:
        folder = work_folder(request.output)
        if not folder.exists():
            return "interrupted before any layer was finished"
        return (
            f"interrupted: the finished layers are in {folder}; the same command resumes from there"
        )

    began = time.monotonic()
    with TerminalProgress(kept, names_load=not is_worker()) as progress:
        result = run(request, progress)
    if not is_first():
        return
    seconds = time.monotonic() - began
    record = {
        "output": str(result.output),
        "seconds": round(seconds, 3),
        "layer_seconds": [round(value, 3) for value in result.layer_seconds],
        "peak_bytes": result.peak_bytes,
        "preflight": result.preflight.as_dict(),
        "resumed_layers": result.resumed_layers,
        "loads_in": result.loads_in,
        "notes": list(result.notes),
        "manifest": result.manifest,
    }
    show_result(result, seconds, result_console(as_json, record))
