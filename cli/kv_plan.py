"""`llmopt kv-plan`: memory, concurrency, speed and cost of serving a model, from its config."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer

from ..base.atomic_io import write_atomically
from ..base.errors import BadInput
from ..base.option import keywords_of_words, option
from ..engine.config.plan_options import PlanRequest
from .options.command import From, Words, with_options
from .options.shared import ModelOptions, output_option

if TYPE_CHECKING:
    from ..engine.planner.plan import DeploymentPlan


@dataclass(frozen=True, slots=True)
class PlanOutputOptions:
    """Output options."""

    PANEL: ClassVar = "Output"

    explain: bool = option(False, "Each formula with its numbers.", common=True)
    names: bool = option(
        False, "List the models and GPUs of the table.", flag="--list", common=True
    )
    output: Path | None = output_option(
        "file", "Write the plan as JSON to this file.", hidden_flags=("--out",)
    )
    html: Path | None = option(None, "Write the plan as a page.", writes="file")
    as_json: bool = option(False, "Print the plan as JSON.", flag="--json", common=True)


@dataclass(frozen=True, slots=True)
class PlannedModelOptions(ModelOptions):
    """The model argument, which has no default."""

    model: Annotated[
        str | None,
        typer.Argument(
            help="A name of the bundled table (--list), a folder, a config.json, a .gguf file, or a hub id."
        ),
    ] = None


@with_options
def kv_plan(
    model: PlannedModelOptions,
    words: Annotated[Words, From(PlanRequest, but=("model",))],
    output: PlanOutputOptions,
) -> None:
    """Plan memory, speed and price of serving a model, from its config alone. No GPU and no network."""
    from ..engine.planner.answer import answer_as_dict, answer_of
    from ..engine.planner.plan_json import plan_as_dict
    from ..engine.planner.plan_request import plan_for
    from .output.console import emit_json, result_console, say
    from .output.plan_tables import show_engines, show_explanation, show_names, show_plan

    if output.names:
        show_names(result_console(output.as_json), as_json=output.as_json)
        return
    if (name := model.name) is None:
        raise BadInput(
            "no model: name one, such as llama-70b, or with --model; --list shows the table's: see llmopt "
            "kv-plan --help"
        )
    for target in (output.output, output.html):
        if target is not None and not target.parent.is_dir():
            raise BadInput(f"there is no folder {target.parent} to write {target.name} into")
    plan = plan_for(PlanRequest(name, **keywords_of_words(PlanRequest, words)))
    for warning in plan.warnings:
        say(f"warning: {warning}")
    plan_answer = answer_of(plan)
    answer = plan_as_dict(plan) | {"answer": answer_as_dict(plan_answer)}
    _write(plan, answer, output)
    if output.as_json:
        emit_json(answer)
    else:
        console = result_console(output.as_json)
        show_plan(plan, plan_answer, console)
        if words["engine"] == "all":
            show_engines(answer, console)
        if output.explain:
            show_explanation(plan, console)


def _write(plan: DeploymentPlan, answer: dict[str, Any], output: PlanOutputOptions) -> None:
    from .output.console import say

    if output.output is not None:
        write_atomically(output.output, (json.dumps(answer, indent=2) + "\n").encode())
        say(f"plan: {output.output}")
    if output.html is not None:
        from ..bench.report.plan_page import plan_page

        write_atomically(output.html, plan_page(plan).encode())
        say(f"page: {output.html}")
