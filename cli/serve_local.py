"""`llmopt serve-local`: OpenAI-compatible HTTP server of the engine on this machine.

With `--engine vllm|sglang|trtllm` the options are translated, and that server takes the process over.
"""

from __future__ import annotations

import json
import logging
import os
import shlex
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..base.atomic_io import expanded
from ..base.errors import BadInput
from ..base.option import keywords_of_words
from ..engine.config.config import EngineConfig
from ..engine.server.protocol.server_options import (
    HandoverOptions,
    ServedModelOptions,
    ServerOptions,
    ServingOptions,
)
from .options.command import TYPED, ConfigFile, From, Words, shown_name, with_options
from .options.shared import ModelOptions, check_models

if TYPE_CHECKING:
    from ..engine.core.engine import Engine


_log = logging.getLogger("llmopt.cli")

MORE_LORAS = 8
"""Adapters that may be loaded by request where --max-loras does not say."""


@with_options
def serve_local(
    context: typer.Context,
    model: ModelOptions,
    other: HandoverOptions,
    serving: ServingOptions,
    engine: Annotated[Words, From(EngineConfig)],
    server: Annotated[Words, From(ServerOptions)],
    config: ConfigFile = None,
) -> None:
    """Serve a model with OpenAI's completions and chat endpoints, until Ctrl-C."""
    from ..quant.source.models import refuse_mock, resolve_model
    from ..recipes import DEFAULT_MODEL

    name = model.name or DEFAULT_MODEL
    given = options_given(context)
    if other.engine != "llmopt":
        hand_over(other.engine, name, given)
        return
    for option in ("pipeline_parallel_size", "ray", "print_command"):
        if option in given:
            raise BadInput(f"--{option.replace('_', '-')} is for another --engine")
    require_server("serve-local")
    folder = resolve_model(name)  # before torch is imported
    refuse_mock(folder, "serve-local")

    keywords = keywords_of_words(EngineConfig, engine)
    served = serving.served_name(name)
    if served in keywords.get("loras", {}):
        raise BadInput(f"--lora {served}: the model itself is served by that name")
    check_models(keywords)
    engine_config = EngineConfig(model=name, **keywords)
    options = server_options(server, host=serving.host)
    if options.lora_folders and engine_config.max_loras is None:
        engine_config = replace(engine_config, max_loras=len(engine_config.loras) + MORE_LORAS)
    _serve(engine_config, folder, served, options, serving)


def _serve(
    config: EngineConfig, folder: Path, served: str, options: ServerOptions, serving: ServingOptions
) -> None:
    """Validate all options before the model loads, then serve."""
    from ..engine.planner.catalog import facts_of
    from ..engine.server.launch import answering_while_loading, base_url, bind, bound_memory
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
    facts = _facts(opened, describe_template(app.state.service.text))
    as_json = serving.as_json
    serve(app, listener, on_ready=lambda: _announce(url, served, facts, options, as_json))
    _tell(options, "stopped", "stopped")


def _tell(options: ServerOptions, event: str, text: str, **fields: object) -> None:
    from ..engine.server.requests.observe import LogEvent
    from .output.console import people

    if options.log_format == "json":
        _log.info(LogEvent(event, fields))
    else:
        people.print(text, soft_wrap=True)


GGUF_KL = 0.0027
"""Mean KL from the original, in nats, with 8-bit activations: docs/measured/cpu/cpu-activations.json."""


def _facts(engine: Engine, template: str) -> str:
    """Dtype, context, caches and activations of the engine, and its chat template, for the ready line."""
    from ..engine.base.units import format_gib

    config, stats, states = engine.config, engine.stats, engine.scheduler.states
    facts = [f"{str(engine.dtype).removeprefix('torch.')} on {engine.device}"]
    eviction = engine.scheduler.config.eviction
    if config.stream is not None:
        window = f"sliding window: last {config.stream.length} tokens"
        facts.append(f"attention sinks: first {config.stream.sinks}, {window}")
    else:
        facts.append(f"context {engine.scheduler.longest_sequence} tokens")
        if eviction is not None:
            kept = f"of which {eviction.method} keeps {eviction.budget} of a prompt"
            facts[-1] += f", {kept}"
    if stats.kv_bytes:
        size = (
            f"{format_gib(stats.kv_bytes)} ({stats.kv_tokens_total:,} tokens in {stats.kv_dtype})"
        )
        facts.append(f"KV cache: up to {size}, {stats.kv_slots_used:,} used")
    if states.num_slots:
        saved = f"{states.num_checkpoints} checkpoints of them for the prefix cache"
        if not states.num_checkpoints:
            saved = "no checkpoint of them, so that no prefix is shared"
        facts.append(f"states of {states.num_slots} sequences and {saved}")
    if engine.activation_bits != 16:  # quantized weights on a CPU
        why = "asked" if config.cpu_activations else "in llama.cpp"
        measured = "" if config.cpu_activations else f" (KL {GGUF_KL} on SmolLM2-135M's Q4_1)"
        facts.append(f"8-bit activations as {why}{measured}")
    return ", ".join([*facts, f"chat template: {template}"])


def _announce(url: str, model: str, facts: str, options: ServerOptions, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps({"url": url, "model": model, "pid": os.getpid()}))
        return
    body = json.dumps({"model": model, "prompt": "Once upon a time", "max_tokens": 64})
    key = " -H 'Authorization: Bearer YOUR_KEY'" if options.api_keys else ""
    typer.echo(f"ready: {model} at {url}/v1 ({facts})")
    if options.log_format == "json":
        _tell(options, "ready", "", url=url, model=model)
        return
    typer.echo(
        f"try: curl {url}/v1/completions{key} -H 'Content-Type: application/json' -d '{body}'",
        err=True,
    )
    typer.echo("Ctrl-C stops it", err=True)


def require_server(command: str) -> None:
    """Raises BadInput where a package of the server is missing, before a model loads."""
    from ..base.extras import require

    modules = ("fastapi", "uvicorn", "prometheus_client", "llguidance", "httpx", "httpcore", "PIL")
    require(f"llmopt {command}", "serve", *modules)


def server_options(values: Words, *, host: str) -> ServerOptions:
    """The server's options, all checked: files, packages and addresses. A server that asks for no key answers
    to known names alone: a page of the web may be pointed at it by another name, whatever address it listens
    on. Beyond the loopback these are the machine's own too."""
    from ..engine.base.host import is_loopback
    from ..engine.server.launch import own_names

    given = keywords_of_words(ServerOptions, values)
    names, is_local = given.pop("host_names", None), is_loopback(host)
    options = ServerOptions(**given)
    if "*" in (names or ()) or not (is_local or names or not options.api_keys):
        names = None
    else:
        names = (names or frozenset()) | (frozenset() if is_local else own_names(host))
    options = replace(options, host_names=names)
    if options.allow_runtime_lora_updating != bool(options.lora_folders):
        raise BadInput(
            "--allow-runtime-lora-updating and --allowed-lora-path go together: adapters are loaded from "
            "below that folder alone"
        )
    if options.tls is not None:
        options.tls.check_files()
    return options


def warn_if_open(options: ServerOptions, host: str) -> None:
    """Log a warning where others than this machine's users may ask, without a key."""
    from ..engine.base.host import is_loopback

    if options.api_keys or is_loopback(host):
        return
    names = options.host_names
    shown = "any name" if names is None else ", ".join(["addresses, localhost", *sorted(names)])
    _log.warning(
        "--host %s without --api-key: whoever reaches this machine may ask. Hosts answered to: %s "
        "(--allowed-host adds a name, * all)",
        host,
        shown,
    )


def app_options(served: ServedModelOptions) -> dict[str, str | None]:
    """Keyword arguments for `create_app`. Raises `BadInput`: no such parser, or a template file that cannot
    be read."""
    from ..engine.base.sampling_params import PoolingParams
    from ..engine.server.parsing.formats import reasoning_format, tool_format

    if served.tool_call_parser is not None:
        tool_format(served.tool_call_parser)
    if served.reasoning_parser is not None:
        reasoning_format(served.reasoning_parser)
    if served.pooling_type is not None:
        PoolingParams(served.pooling_type.lower())
    template = None
    try:
        if served.chat_template is not None:
            template = Path(served.chat_template).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = (isinstance(error, OSError) and error.strerror) or "it is not UTF-8 text"
        raise BadInput(f"--chat-template {served.chat_template}: {reason}") from error
    return {
        "chat_template": template,
        "tool_call_parser": served.tool_call_parser,
        "reasoning_parser": served.reasoning_parser,
        "pooling_type": served.pooling_type,
    }


_OF_THE_HANDOVER = ("model", "model_option", "engine", "print_command", "debug", "config")


def options_given(context: typer.Context) -> dict[str, Any]:
    """Options set explicitly: on the command line, in the environment, or in the file of `--config`."""
    named = (*TYPED, "DEFAULT_MAP")
    return {
        shown_name(name): value
        for name, value in context.params.items()
        if getattr(context.get_parameter_source(name), "name", "") in named
    }


def hand_over(engine: str, name: str, given: Mapping[str, Any]) -> None:
    """Replace this process by another engine's server for the model `name`, or only print the command. Raises
    `BadInput`: an option without a counterpart, or an engine that is unknown or not installed."""
    from ..engine.deploy.engine_commands import server_command
    from ..quant.source.models import bundled_models, resolve_model, short_name
    from .output.console import people

    server = server_command(engine)
    options = {key: value for key, value in given.items() if key not in _OF_THE_HANDOVER}
    path = expanded(name)
    is_here = name in bundled_models() or path.exists()
    if is_here and not path.is_file():
        path = resolve_model(name)
    model = str(path.absolute()) if is_here else name
    if is_here and "served_model_name" in server.table:
        options.setdefault("served_model_name", short_name(Path(model)))
    command = server.command(model, options)
    key = next(iter(given.get("api_key") or ()), "").strip()
    environment = {server.key_variable: key} if key and server.key_variable else {}
    shown = " ".join([*(f"{variable}=..." for variable in environment), shlex.join(command)])
    if given.get("print_command"):
        typer.echo(shown)
        return
    program = server.find()
    people.print(f"handing over: {shown}", soft_wrap=True)
    os.execve(program, command, {**os.environ, **environment})
