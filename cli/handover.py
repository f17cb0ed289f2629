"""`llmopt serve-local --engine vllm`: translate the options and exec `vllm serve`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import typer

from .options.groups import shown_name

_OF_THE_HANDOVER = ("model", "model_option", "engine", "print_command", "debug")


def asked(context: typer.Context) -> dict[str, Any]:
    """Options set explicitly, on the command line or in the environment."""
    named = ("COMMANDLINE", "ENVIRONMENT")
    return {
        shown_name(name): value
        for name, value in context.params.items()
        if getattr(context.get_parameter_source(name), "name", "") in named
    }


def refuse_handover_options(given: Mapping[str, Any]) -> None:
    """Raises `BadInput` for vLLM-only options with llmopt's engine."""
    from ..quant.base.errors import BadInput

    for name in ("pipeline_parallel_size", "ray", "print_command"):
        if name in given:
            raise BadInput(f"--{name.replace('_', '-')} is for --engine vllm")


def hand_over(name: str, given: Mapping[str, Any]) -> None:
    """Replace this process by `vllm serve` for the model `name`, or only print the command.

    Raises:
        BadInput: an option without a vLLM counterpart, or vLLM is not installed.
    """
    import os
    import shlex
    from pathlib import Path

    from ..engine.deploy.vllm_command import find_vllm, vllm_command
    from ..quant.model.models import bundled_models, resolve_model
    from .output.console import people

    options = {key: value for key, value in given.items() if key not in _OF_THE_HANDOVER}
    is_here = name in bundled_models() or Path(name).expanduser().is_dir()
    model = str(resolve_model(name).resolve()) if is_here else name
    if is_here:
        options.setdefault("served_model_name", Path(model).name)
    command = vllm_command(model, options)
    key = next(iter(given.get("api_key") or ()), None)
    shown = ("VLLM_API_KEY=... " if key else "") + shlex.join(command)
    if given.get("print_command"):
        typer.echo(shown)
        return
    program = find_vllm()
    people.print(f"handing over: {shown}", soft_wrap=True, markup=False)
    environment = {**os.environ, **({"VLLM_API_KEY": key} if key else {})}
    os.execve(program, command, environment)
