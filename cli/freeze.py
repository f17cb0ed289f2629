"""`llmopt bench freeze`: freeze a workload into a file, to be replayed anywhere, token for token."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from ..bench.options.definitions import ArrivalOptions, ConversationOptions, DataOptions
from ..engine.config.config import EngineConfig
from .options.command import From, Words, with_options
from .options.shared import ModelOptions, json_option, output_option


@with_options
def freeze(
    model: ModelOptions,
    workload: Annotated[Words, From(DataOptions, ConversationOptions, ArrivalOptions)],
    fitted: Annotated[
        Words, From(EngineConfig, panel=ArrivalOptions.PANEL, only=("max_model_len", "seed"))
    ],
    output: Path = output_option(
        "file",
        "The file to write; JSON lines.",
        Path("workload.jsonl"),
        hidden_flags=("--out",),
    ),
    as_json: bool = json_option(),
) -> None:
    """Write a workload with its token ids, lengths, arrival times and hash.

    Run it with `llmopt bench --dataset FILE`. The results name the hash.
    """
    from ..bench.options.options import BenchOptions, checked
    from ..quant.source.models import resolve_model
    from .output.console import result_console, say

    described = {**workload, **fitted, "model": model.name}
    given = {key: value for key, value in described.items() if value is not None}
    options = checked(BenchOptions, given, "")
    resolve_model(options.model)  # before torch is imported
    from ..bench.workloads.datasets import freeze_workload

    made = freeze_workload(options, output)
    for note in made.notes:
        say(f"{made.name}: {note}")
    record = {
        "path": str(output),
        "sha256": made.sha256,
        "num_requests": made.num_requests,
        "num_conversations": len(made.items) if made.is_multi_turn else None,
        "prompt_tokens": made.prompt_tokens,
        "output_tokens": made.output_tokens,
        "last_arrival_seconds": made.items[-1].arrival_seconds,
    }
    threads = f"{len(made.items)} conversations, " if made.is_multi_turn else ""
    say(
        f"{output}: {threads}{record['num_requests']} requests, {made.prompt_tokens:,} prompt and "
        f"{made.output_tokens:,} output tokens, the last due at "
        f"{record['last_arrival_seconds']:.2f} s\nsha256 {made.sha256}",
        result_console(as_json, record),
    )
