"""`llmopt check`: which engines load a checkpoint, on a card, with which kernel."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

import typer

from ..base.errors import BadInput
from ..base.option import at_least, check_limits, option
from .options.command import with_options
from .options.shared import json_option, trust_option

if TYPE_CHECKING:
    from ..engine.planner.answer import FormatSpeed

PLANNED_CLIENTS, PLANNED_CONTEXT = 8, "2k"
"""Load of the plan that says what a fallback costs."""


@dataclass(frozen=True, slots=True)
class CheckOptions:
    """Engine, card and ranks."""

    PANEL: ClassVar = "Where it should load"

    engine: Literal["vllm", "sglang", "trtllm", "llama.cpp", "transformers", "llmopt"] | None = (
        option(None, "One engine. Default: a table of all.", common=True)
    )
    engine_version: str | None = option(None, "Its version. Default: the newest that is known.")
    gpu: str | None = option(
        None, "A GPU of kv-plan's table, or cpu. Default: any GPU.", common=True
    )
    tp: int = option(
        1,
        "Tensor-parallel ranks.",
        hidden_flags=("--tensor-parallel-size",),
        limit=at_least(1),
        common=True,
    )
    values: bool = option(False, "Read every value too, and find silent damage.", common=True)
    reference: Path | None = option(
        None, "The plain checkpoint to compare the values with, tensor by tensor."
    )
    as_json: bool = json_option()
    markdown: bool = option(False, "Print the answer as Markdown.")

    def __post_init__(self) -> None:
        check_limits(self, by_flag=True)


@with_options
def check(
    checkpoint: Annotated[
        str,
        typer.Argument(help="A folder, a .gguf file, a config.json next to an index, or a hub id."),
    ],
    options: CheckOptions,
    trust_remote_code: bool = trust_option(),
) -> None:
    """Say which engines load a checkpoint, with which kernels; exit 1 if none does."""
    from ..base.atomic_io import expanded
    from ..quant.source.hub_headers import headers_of
    from ..quant.source.models import resolve_model

    if options.engine_version is not None and options.engine not in ("vllm", "sglang", "trtllm"):
        raise BadInput("--engine-version goes with --engine vllm, sglang or trtllm")
    path = expanded(checkpoint)
    if path.exists():
        _check(path, options, trust_remote_code)
    elif options.values or options.reference is not None:
        _check(resolve_model(checkpoint), options, trust_remote_code)
    else:
        with headers_of(checkpoint) as path:
            _check(path, options, trust_remote_code)


def _check(path: Path, options: CheckOptions, trust_remote_code: bool) -> None:
    """Print the answers for a checkpoint; exit 1 or 3 where it does not load as meant."""
    from ..engine.planner.devices import find_device
    from ..quant.check.check import check as run  # torch
    from ..quant.check.engines import ENGINES, Target
    from ..quant.check.kernels import CPU
    from .output.check_tables import markdown_of, show_check
    from .output.console import result_console

    engines = tuple(ENGINES) if options.engine is None else (options.engine,)
    on_cpu = (options.gpu or "").lower() == "cpu"
    device = None if options.gpu is None or on_cpu else find_device(options.gpu)
    capability = CPU if on_cpu else device and device.capability
    target = Target(options.engine_version, options.gpu, capability, options.tp)
    how = {"reference": options.reference, "trust_remote_code": trust_remote_code}
    report = run(path, engines, target, values=options.values, **how)
    slow = next((engine.engine for engine in report.engines if engine.falls_back), None)
    speeds = [] if slow is None or device is None else _planned_speeds(path, slow, options)
    if options.markdown and not options.as_json:
        print(markdown_of(report))
    else:
        document = report.as_dict() | {"planned": [asdict(speed) for speed in speeds]}
        show_check(report, result_console(options.as_json, document), speeds)
    if report.exit_code:
        raise typer.Exit(report.exit_code)


def _planned_speeds(path: Path, engine: str, options: CheckOptions) -> list[FormatSpeed]:
    """Planned speeds of a checkpoint that falls back to 16-bit products, and of other formats; none where
    the planner does not know the model or the engine."""
    from ..engine.config.plan_options import PlanRequest
    from ..engine.planner.answer import format_speeds
    from ..engine.planner.plan_request import plan_for

    ask = PlanRequest(
        str(path),
        context=PLANNED_CONTEXT,
        sequences=PLANNED_CLIENTS,
        gpus=(options.gpu or "",),
        engine=engine,
        tp=options.tp,
    )
    try:
        plan = plan_for(ask)
    except BadInput:
        return []
    return format_speeds(plan, plan.first_that_fits)
