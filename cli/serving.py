"""Checks of the options of `llmopt serve-local` and `batch` beside the engine's, and the handover to others.

With `--engine vllm|sglang|trtllm` they are translated, and that engine's server takes the process over.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from ..base.atomic_io import expanded
from ..base.errors import BadInput
from ..base.option import keywords_of_words
from ..engine.server.protocol.server_options import ServedModelOptions
from .options.command import Words, shown_name

if TYPE_CHECKING:
    from ..engine.server.protocol.server_options import ServerOptions


_log = logging.getLogger(__name__)


def require_server(command: str) -> None:
    """Raises BadInput where a package of the server is missing, before a model loads."""
    from ..base.extras import require

    modules = ("fastapi", "uvicorn", "prometheus_client", "llguidance", "httpx", "httpcore", "PIL")
    require(f"llmopt {command}", "serve", *modules)


def server_options(words: Words, *, host: str) -> ServerOptions:
    """The server's options, all checked: files, packages and addresses.

    A server that asks for no key answers to known names alone: a page of the web may be pointed at it by
    another name, whatever address it listens on. Beyond the loopback these are the machine's own too.

    Raises:
        BadInput: what is wrong with one of them.
    """
    from ..engine.server.launch import is_loopback, own_names
    from ..engine.server.protocol.server_options import ServerOptions

    given = keywords_of_words(ServerOptions, words)
    names, is_local = given.pop("host_names", None), is_loopback(host)
    options = ServerOptions(**given)
    if "*" in (names or ()) or not (is_local or names or not options.requires_key):
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
    from ..engine.server.launch import is_loopback

    if options.requires_key or is_loopback(host):
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
    return {
        "chat_template": chat_template(served),
        "tool_call_parser": served.tool_call_parser,
        "reasoning_parser": served.reasoning_parser,
        "pooling_type": served.pooling_type,
    }


def chat_template(served: ServedModelOptions) -> str | None:
    """The chat template from --chat-template. Raises `BadInput`: its file cannot be read."""
    if served.chat_template is None:
        return None
    try:
        return Path(served.chat_template).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = (isinstance(error, OSError) and error.strerror) or "it is not UTF-8 text"
        raise BadInput(f"--chat-template {served.chat_template}: {reason}") from error


_OF_THE_HANDOVER = ("model", "model_option", "engine", "print_command", "debug", "config")


def options_given(context: typer.Context) -> dict[str, Any]:
    """Options set explicitly: on the command line, in the environment, or in the file of `--config`."""
    named = ("COMMANDLINE", "ENVIRONMENT", "DEFAULT_MAP")
    return {
        shown_name(name): value
        for name, value in context.params.items()
        if getattr(context.get_parameter_source(name), "name", "") in named
    }


def refuse_handover_options(given: Mapping[str, Any]) -> None:
    """Raises `BadInput` for options of other engines with llmopt's."""
    for name in ("pipeline_parallel_size", "ray", "print_command"):
        if name in given:
            raise BadInput(f"--{name.replace('_', '-')} is for another --engine")


def hand_over(engine: str, name: str, given: Mapping[str, Any]) -> None:
    """Replace this process by another engine's server for the model `name`, or only print the command. Raises
    `BadInput`: an option without a counterpart, or an engine that is unknown or not installed."""
    import os
    import shlex
    from pathlib import Path

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
