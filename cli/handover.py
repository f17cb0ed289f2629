"""`llmopt serve-local --engine vllm|sglang|trtllm`: translate the options and exec that engine's server."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import typer

from .options.command import shown_name

_OF_THE_HANDOVER = ("model", "model_option", "engine", "print_command", "debug", "config")


def asked(context: typer.Context) -> dict[str, Any]:
    """Options set explicitly: on the command line, in the environment, or in the file of `--config`."""
    named = ("COMMANDLINE", "ENVIRONMENT", "DEFAULT_MAP")
    return {
        shown_name(name): value
        for name, value in context.params.items()
        if getattr(context.get_parameter_source(name), "name", "") in named
    }


def refuse_handover_options(given: Mapping[str, Any]) -> None:
    """Raises `BadInput` for options of other engines with llmopt's."""
    from ..quant.base.errors import BadInput

    for name in ("pipeline_parallel_size", "ray", "print_command"):
        if name in given:
            raise BadInput(f"--{name.replace('_', '-')} is for another --engine")


def hand_over(engine: str, name: str, given: Mapping[str, Any]) -> None:
    """Replace this process by another engine's server for the model `name`, or only print the command.

    Raises:
        BadInput: an option without a counterpart, or an engine that is unknown or not installed.
    """
    import os
    import shlex
    from pathlib import Path

    from ..engine.deploy.engine_commands import server_command
    from ..quant.models import bundled_models, resolve_model, short_name
    from .output.console import people

    server = server_command(engine)
    options = {key: value for key, value in given.items() if key not in _OF_THE_HANDOVER}
    path = Path(name).expanduser()
    is_here = name in bundled_models() or path.exists()
    if is_here and not path.is_file():
        path = resolve_model(name)
    model = str(path.absolute()) if is_here else name
    if is_here and "served_model_name" in server.table:
        options.setdefault("served_model_name", short_name(Path(model)))
    command = server.command(model, options)
    key = next(iter(given.get("api_key") or ()), None)
    environment = {server.key_variable: key} if key and server.key_variable else {}
    shown = " ".join([*(f"{variable}=..." for variable in environment), shlex.join(command)])
    if given.get("print_command"):
        typer.echo(shown)
        return
    program = server.find()
    people.print(f"handing over: {shown}", soft_wrap=True, markup=False)
    os.execve(program, command, {**os.environ, **environment})
