"""`llmopt batch`: OpenAI's batch files, answered offline by the engine in this process."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..base.atomic_io import check_output
from ..base.errors import BadInput
from ..base.option import keywords_of_words, option
from ..engine.base.image_input import MediaLimits
from ..engine.config.config import EngineConfig
from ..engine.server.protocol.server_options import ServedModelOptions
from .options.command import From, Words, with_options
from .options.shared import check_models, json_option, output_option
from .serve_local import app_options, require_server

if TYPE_CHECKING:
    from ..engine.server.batch import AnswerJournal, BatchFile


@with_options
def batch(
    file: Annotated[Path, typer.Argument(help="JSON lines of custom_id, method, url and body.")],
    served: ServedModelOptions,
    engine: Annotated[Words, From(EngineConfig)],
    media: Annotated[Words, From(MediaLimits)],
    model: str | None = option(
        None,
        "A folder, a .gguf file, a bundled model's name or a hub id. Default: stories3M.",
        common=True,
    ),
    output: Path | None = output_option(
        "file", "The file of answers to write. Default: FILE with .out.jsonl."
    ),
    restart: bool = option(False, "Throw away the answers of an earlier run.", common=True),
    as_json: bool = json_option(),
) -> None:
    """Answer an OpenAI batch file with the engine in this process; an interrupted run is resumed."""
    require_server("batch")
    from ..engine.server.batch import AnswerJournal, digest_of, read_batch
    from ..quant.source.models import resolve_model
    from ..recipes import DEFAULT_MODEL
    from .output.console import result_console, say

    name = model or DEFAULT_MODEL
    keywords = keywords_of_words(EngineConfig, engine)
    check_models(keywords)
    config = EngineConfig(model=name, **keywords)
    for_app = {"model_name": served.served_name(name), **app_options(served)}
    limits = MediaLimits(**keywords_of_words(MediaLimits, media))
    target = output or file.with_suffix(".out.jsonl")
    names = [served.served_name(name), *config.loras]
    check_output(target, "--output", folder=False)
    requests = read_batch(file, names, digest_of(resolve_model(name), config, for_app))
    if target.resolve() == file.resolve():
        raise BadInput(f"--output {target} is the batch file itself: name another")
    with AnswerJournal(target, requests.requests, restart=restart) as answers:
        for note in answers.notes:
            say(note)
        num_resumed, began = len(answers), time.monotonic()
        num_tokens = 0
        if num_resumed < len(requests.requests):
            num_tokens = _run(config, for_app, limits, requests, answers)
        answers.finish()
        seconds = time.monotonic() - began
        num_failed = answers.num_failed
    seconds = round(seconds, 3)
    counts = {"num_requests": len(requests.requests), "num_resumed": num_resumed}
    counts |= {"num_failed": num_failed, "total_tokens": num_tokens}
    earlier = f", {num_resumed} of them before" if num_resumed else ""
    say(
        f"{target}: {len(requests.requests)} requests answered{earlier}, {num_failed} of them "
        f"with an error; {num_tokens:,} tokens in {seconds:.1f} s",
        result_console(as_json, {"output": str(target), **counts, "seconds": seconds}),
    )
    raise typer.Exit(1 if num_failed else 0)


def _run(
    config: EngineConfig,
    for_app: dict[str, str | None],
    limits: MediaLimits,
    requests: BatchFile,
    answers: AnswerJournal,
) -> int:
    """Load the model and answer what is left; returns the tokens of it."""
    from ..engine.server.launch import bound_memory
    from .output.console import TerminalProgress, say

    say(f"loading {config.model} ...")
    bound_memory()
    from ..engine.core.engine import Engine
    from ..engine.server.app import create_app
    from ..engine.server.batch import OPTIONS, BatchRun

    opened = Engine(config)
    options = replace(OPTIONS, media=limits)
    app = create_app(opened, options=options, **for_app)  # type: ignore[arg-type]

    again = "interrupted: {} answers are in {}; the same command goes on"
    with TerminalProgress(lambda: again.format(len(answers), answers.journal)) as progress:
        run = BatchRun(app, requests, answers, progress)
        progress.start("batch", len(requests.requests) - len(answers), "requests")
        run.run(opened.scheduler.config.max_num_seqs)
    return run.num_tokens
