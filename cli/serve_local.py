"""`llmopt serve-local`: OpenAI-compatible HTTP server of the engine on this machine."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from ..base.errors import BadInput
from ..base.option import keywords_of_words
from ..engine.config.config import EngineConfig
from ..engine.server.protocol.server_options import HandoverOptions, ServerOptions, ServingOptions
from .options.command import From, Words, with_config, with_options
from .options.shared import ModelOptions, check_models
from .serving import (
    app_options,
    hand_over,
    options_given,
    refuse_handover_options,
    require_server,
    server_options,
    warn_if_open,
)

if TYPE_CHECKING:
    from pathlib import Path

    from ..engine.core.engine import Engine


MORE_LORAS = 8
"""Adapters that may be loaded by request where --max-loras does not say."""


@with_config
@with_options
def serve_local(
    context: typer.Context,
    model: ModelOptions,
    other: HandoverOptions,
    serving: ServingOptions,
    engine: Annotated[Words, From(EngineConfig)],
    server: Annotated[Words, From(ServerOptions)],
) -> None:
    """Serve a model with OpenAI's completions and chat endpoints, until Ctrl-C."""
    from ..quant.source.models import resolve_model
    from ..recipes import DEFAULT_MODEL

    name = model.name or DEFAULT_MODEL
    asked = options_given(context)
    if other.engine != "llmopt":
        hand_over(other.engine, name, asked)
        return
    refuse_handover_options(asked)
    require_server("serve-local")
    folder = resolve_model(name)  # before torch is imported

    keywords = keywords_of_words(EngineConfig, engine)
    served = serving.served_name(name)
    if served in keywords.get("loras", {}):
        raise BadInput(f"--lora {served}: the model itself is served by that name")
    check_models(keywords)
    config = EngineConfig(model=name, **keywords)
    options = server_options(server, host=serving.host)
    if options.lora_folders and config.max_loras is None:
        config = replace(config, max_loras=len(config.loras) + MORE_LORAS)
    _serve(config, folder, served, options, serving)


def _serve(
    config: EngineConfig,
    folder: Path,
    served: str,
    options: ServerOptions,
    serving: ServingOptions,
) -> None:
    """Validate all options before the model loads, then serve."""
    from ..engine.planner.facts import facts_of
    from ..engine.server.launch import (
        answering_while_loading,
        base_url,
        bind,
        bound_memory,
    )
    from ..engine.server.requests.observe import configure_logging

    described = facts_of(folder).line
    for_app = app_options(serving)
    listener = bind(serving.host, serving.port)
    configure_logging(options.log_format)
    warn_if_open(options, serving.host)
    _tell(options, "loading", f"loading {folder} ({described}) ...", model=str(folder))
    bound_memory()
    with answering_while_loading(listener, options.tls):
        from ..engine.core.engine import Engine
        from ..engine.server.app import create_app, describe_template
        from ..engine.server.launch import serve

        opened = Engine(config)
        app = create_app(opened, model_name=served, options=options, **for_app)
    url = base_url(listener, options.tls)
    facts = (
        f"{str(opened.dtype).removeprefix('torch.')} on {opened.device}, "
        f"{_context(opened)}, {_kv_cache(opened)}{_states(opened)}{_activations(opened)}"
        f"chat template: {describe_template(app.state.service.text)}"
    )
    as_json = serving.as_json
    serve(app, listener, on_ready=lambda: _announce(url, served, facts, options, as_json))
    _tell(options, "stopped", "stopped")


def _tell(options: ServerOptions, event: str, text: str, **fields: object) -> None:
    import logging

    from ..engine.server.requests.observe import LogEvent
    from .output.console import people

    if options.log_format == "json":
        logging.getLogger("llmopt.cli").info(LogEvent(event, fields))
    else:
        people.print(text, soft_wrap=True)


def _context(engine: Engine) -> str:
    if (stream := engine.config.stream) is not None:
        return f"attention sinks: first {stream.sinks}, sliding window: last {stream.length} tokens"
    context = f"context {engine.scheduler.longest_sequence} tokens"
    if (eviction := engine.scheduler.config.eviction) is not None:
        context += f", of which {eviction.method} keeps {eviction.budget} of a prompt"
    return context


def _kv_cache(engine: Engine) -> str:
    from ..engine.base.units import format_gib

    stats = engine.stats
    if not stats.kv_bytes:
        return ""
    size = f"{format_gib(stats.kv_bytes)} ({stats.kv_tokens_total:,} tokens in {stats.kv_dtype})"
    return f"KV cache: up to {size}, {stats.kv_slots_used:,} used, "


def _states(engine: Engine) -> str:
    states = engine.scheduler.states
    if not states.num_slots:
        return ""
    saved = f"{states.num_checkpoints} checkpoints of them for the prefix cache"
    if not states.num_checkpoints:
        saved = "no checkpoint of them, so that no prefix is shared"
    return f"states of {states.num_slots} sequences and {saved}, "


GGUF_KL = 0.0027
"""Mean KL from the original, in nats, with 8-bit activations: docs/measured/cpu/cpu-activations.json."""


def _activations(engine: Engine) -> str:
    """How quantized weights are multiplied on a CPU."""
    if engine.activation_bits == 16:
        return ""
    if engine.config.cpu_activations:
        return "8-bit activations as asked, "
    return f"8-bit activations as in llama.cpp (KL {GGUF_KL} on SmolLM2-135M's Q4_1), "


def _announce(url: str, model: str, facts: str, options: ServerOptions, as_json: bool) -> None:
    import json
    import os

    if as_json:
        typer.echo(json.dumps({"url": url, "model": model, "pid": os.getpid()}))
        return
    body = json.dumps({"model": model, "prompt": "Once upon a time", "max_tokens": 64})
    key = " -H 'Authorization: Bearer YOUR_KEY'" if options.requires_key else ""
    typer.echo(f"ready: {model} at {url}/v1 ({facts})")
    if options.log_format == "json":
        _tell(options, "ready", "", url=url, model=model)
        return
    typer.echo(
        f"try: curl {url}/v1/completions{key} -H 'Content-Type: application/json' -d '{body}'",
        err=True,
    )
    typer.echo("Ctrl-C stops it", err=True)
