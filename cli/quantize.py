"""`llmopt quantize`: quantize a model and report the errors."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from .options.common import ModelOptions
from .options.groups import values_of, with_groups
from .options.quantization import (
    CalibrationOptions,
    CheckpointOptions,
    GridOptions,
    LinearOptions,
    QuantizeRunOptions,
    SearchOptions,
    SolverOptions,
)

if TYPE_CHECKING:
    from ..quant.request.request import QuantizeRequest


@with_groups
def quantize(
    model: ModelOptions,
    checkpoint: CheckpointOptions,
    grid: GridOptions,
    linears: LinearOptions,
    solver: SolverOptions,
    search: SearchOptions,
    data: CalibrationOptions,
    run: QuantizeRunOptions,
) -> None:
    """Quantize a model's weights; an interrupted run is resumed."""
    from ..engine.base.units import parse_bytes
    from ..quant.base.atomic_io import check_output
    from ..quant.methods.settings import MethodOptions
    from ..quant.model.checkpoint import GGUF_SUFFIX
    from ..quant.models import resolve_model
    from ..quant.request.request import QuantizeRequest
    from ..recipes import DEFAULT_MODEL

    name = model.name or DEFAULT_MODEL
    folder = resolve_model(name)

    label = Path(name).name.removesuffix(GGUF_SUFFIX) or folder.resolve().name
    bpw, size = search.target_bpw, search.target_size
    kind = grid.gguf_type or (f"{bpw:g}bpw" if bpw else size)
    default = _default_output(label, checkpoint.method, grid.bits, kind)
    request = QuantizeRequest(
        model=folder,
        model_name=label,
        output=checkpoint.output or Path(default),
        method=checkpoint.method,
        format=checkpoint.format,
        options=MethodOptions(**values_of(solver)),
        overrides=tuple(linears.overrides or ()),
        ignore=tuple(linears.ignore or ()),
        lm_head=linears.lm_head,
        vision=linears.vision,
        target_bpw=bpw,
        target_bytes=None if size is None else parse_bytes(size),
        kv_cache=search.kv_cache,
        kv_cache_strategy=search.kv_cache_strategy,
        rotations=_rotations(search.rotate),
        revert_worse=search.revert_worse,
        tensor_parallel=run.tensor_parallel,
        restart=run.restart,
        trust_remote_code=run.trust_remote_code,
        **values_of(grid, data),
    )
    # Nothing before imports torch.
    if run.dry_run:
        _dry_run(request, run.as_json)
        return
    check_output(request.output, "--output", folder=True)
    _run(request, run.as_json)


def _rotations(asked: str | None) -> tuple[str, ...] | None:
    """The rotations by name; None leaves them to the method."""
    if asked is None:
        return None
    return tuple(name for part in asked.split(",") if (name := part.strip()) not in ("", "none"))


def _default_output(label: str, method: str, bits: int | None, kind: str | None) -> str:
    """Default folder name: model, method and bits."""
    from ..quant.methods.settings import METHOD_FACTS

    if kind is not None:
        return f"{label}-{kind}"
    if bits is None and method in METHOD_FACTS:
        bits = METHOD_FACTS[method].bits
    return f"{label}-{method}-{bits or 4}bit"


def _dry_run(request: QuantizeRequest, as_json: bool) -> None:
    from ..quant.pipeline.pipeline import prepare
    from ..quant.pipeline.preflight import preflight
    from .output.console import TerminalProgress, emit_json, people, result_console
    from .output.quantize_tables import show_preflight

    session = prepare(request, TerminalProgress())
    for note in session.notes:
        people.print(note, soft_wrap=True)
    answer = preflight(session)
    if as_json:
        emit_json(answer.as_dict())
    else:
        show_preflight(answer, result_console(as_json))


def _run(request: QuantizeRequest, as_json: bool) -> None:
    import time

    from ..quant.manifest.journal import work_folder
    from ..quant.pipeline.pipeline import quantize as run
    from .output.console import TerminalProgress, emit_json, people, result_console
    from .output.quantize_tables import show_result

    progress = TerminalProgress()
    began = time.monotonic()
    try:
        result = run(request, progress)
    except KeyboardInterrupt:
        progress.finish()
        where = work_folder(request.output)
        if where.exists():
            people.print(
                f"interrupted: the finished layers are in {where}; the same command resumes from there",
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
                "layer_seconds": [round(value, 3) for value in result.layer_seconds],
                "peak_bytes": result.peak_bytes,
                "preflight": result.preflight.as_dict(),
                "resumed_layers": result.resumed_layers,
                "loads_in": result.loads_in,
                "notes": list(result.notes),
                "manifest": result.manifest,
            }
        )
    show_result(result, seconds, result_console(as_json))
