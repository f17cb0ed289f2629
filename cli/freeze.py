"""`llmopt bench freeze`: freeze a workload into a file, to be replayed anywhere, token for token."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..engine.config.config import EngineConfig
from .options.common import Json, ModelOptions, writable
from .options.config_words import words_of
from .options.conversation import ConversationOptions
from .options.groups import Hidden, values_of, with_groups
from .options.workload import ArrivalOptions, DataOptions


class FittedOptions(words_of(EngineConfig, ArrivalOptions.PANEL, ("max_model_len", "seed"))):
    """Engine options that the workload depends on."""


@with_groups
def freeze(
    model: ModelOptions,
    data: DataOptions,
    conversation: ConversationOptions,
    arrivals: ArrivalOptions,
    fitted: FittedOptions,
    output: Annotated[
        Path,
        typer.Option("--output", "-o", callback=writable, help="The file to write; JSON lines."),
        Hidden("--out"),
    ] = Path("workload.jsonl"),
    as_json: Json = False,
) -> None:
    """Write a workload with its token ids, lengths, arrival times and hash.

    Run it with `llmopt bench --dataset FILE`. The results name the hash.
    """
    from ..bench.options.options import BenchOptions, checked
    from ..quant.models import resolve_model
    from .output.console import emit_json, people, result_console

    asked = values_of(data, conversation, arrivals, fitted) | {"model": model.name}
    given = {key: value for key, value in asked.items() if value is not None}
    options = checked(BenchOptions, given, "option")
    resolve_model(options.model)  # before torch is imported
    from ..bench.workloads.datasets import freeze_workload

    workload = freeze_workload(options, output)
    for note in workload.notes:
        people.print(f"{workload.name}: {note}", markup=False, soft_wrap=True)
    found = {
        "path": str(output),
        "sha256": workload.sha256,
        "num_requests": workload.num_requests,
        "num_conversations": len(workload.items) if workload.is_multi_turn else None,
        "prompt_tokens": workload.prompt_tokens,
        "output_tokens": workload.output_tokens,
        "last_arrival_seconds": workload.items[-1].arrival_seconds,
    }
    if as_json:
        emit_json(found)
    threads = f"{len(workload.items)} conversations, " if workload.is_multi_turn else ""
    result_console(as_json).print(
        f"{output}: {threads}{found['num_requests']} requests, {workload.prompt_tokens:,} prompt and "
        f"{workload.output_tokens:,} output tokens, the last due at "
        f"{found['last_arrival_seconds']:.2f} s\nsha256 {workload.sha256}",
        markup=False,
        soft_wrap=True,
    )
