"""`--config FILE`: options of a command from a YAML file, by their names on the command line.

    @with_config
    @with_options
    def serve_local(context: typer.Context, ...) -> None: ...

The file's values are the command's defaults (click's `default_map`): the command line and the environment
win. The name and the precedence are vLLM's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any

import typer

from .options.command import shown_name

SAME = {"model_option": "model"}
"""Parameters that are another spelling of one."""

KEPT = ("bool", "null", "merge")
"""Kinds that YAML may read a bare word as."""


def with_config(command: Callable[..., None]) -> Callable[..., None]:
    """Decorate a command of `with_options` that takes its `typer.Context`: it gets `--config`."""
    shape = signature(command)
    parameters = [*shape.parameters.values()]
    context_name = next(p.name for p in parameters if p.annotation is typer.Context)
    option = Parameter("config", Parameter.KEYWORD_ONLY, default=None, annotation=_CONFIG)

    @wraps(command)
    def call(**given: Any) -> None:
        if given.pop("config") is not None:
            given |= _overruled(given[context_name], shape)
        command(**given)

    call.__signature__ = Signature([*parameters, option])  # type: ignore[attr-defined]
    call.__annotations__ = {**command.__annotations__, "config": _CONFIG}
    return call


def read_config(path: Path, command: Any) -> dict[str, Any]:
    """The values of a YAML file by the names of a click command's parameters.

    Raises:
        BadInput: it cannot be read, is not a mapping, or has an unknown name or a value of another kind.
    """
    from ..quant.base.errors import BadInput

    options = {}
    for parameter in command.params:
        for flag in parameter.opts if parameter.param_type_name == "option" else ():
            options[flag.removeprefix("--")] = (parameter, True)
        for flag in parameter.secondary_opts:
            options[flag.removeprefix("--")] = (parameter, False)
    del options["config"]
    values: dict[str, Any] = {}
    origin: dict[str, str] = {}
    for key, value in _mapping(path).items():
        name = str(key).replace("_", "-")
        if name not in options or options[name][0].is_eager:
            near = get_close_matches(name, options, n=1, cutoff=0.0)
            raise BadInput(f"--config {path}: {key} is no option; the nearest is {near[0]}")
        parameter, is_on = options[name]
        if parameter.name in origin:
            raise BadInput(
                f"--config {path}: {origin[parameter.name]} and {key} are the same option"
            )
        origin[parameter.name] = str(key)
        if value is not None:
            try:
                values[parameter.name] = _value(parameter, value, is_on)
            except ValueError as error:
                raise BadInput(f"--config {path}: {key}: {error}") from error
    return values


def _apply(context: typer.Context, path: Path | None) -> Path | None:
    """Callback of `--config`, before the other options are processed."""
    if path is not None and not context.resilient_parsing:
        values = read_config(path, context.command)
        for parameter in context.command.params:
            if parameter.name in values:
                _check(context, path, parameter, values[parameter.name])
        context.default_map = {**(context.default_map or {}), **values}
    return path


def _check(context: typer.Context, path: Path, parameter: Any, value: Any) -> None:
    """Raises `BadInput` that names the file, where click would only name the option."""
    from ..quant.base.errors import BadInput

    try:
        parameter.process_value(context, value)
    except Exception as error:
        if (message := getattr(error, "message", None)) is None:
            raise
        name = parameter.opts[0].removeprefix("--")
        raise BadInput(f"--config {path}: {name}: {message}") from error


_CONFIG = Annotated[
    Path | None,
    typer.Option(
        help="YAML file of options, by their names here; the command line wins.",
        callback=_apply,
        is_eager=True,
    ),
]


def _mapping(path: Path) -> Mapping[Any, Any]:
    import yaml

    from ..quant.base.errors import BadInput

    try:
        document = yaml.load(path.read_bytes(), Loader=_loader())  # a safe one
    except OSError as error:
        raise BadInput(f"--config {path}: {error.strerror}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        line = f" at line {mark.line + 1}" if mark is not None else ""
        raise BadInput(f"--config {path}: not YAML{line}") from error
    if document is None:
        return {}
    if not isinstance(document, dict):
        raise BadInput(f"--config {path}: give one option a line, such as port: 8000")
    return document


def _loader() -> Any:
    """YAML's safe loader, with numbers and times as they are written: click converts them, and a key such as
    0123 or 12:34:56 is a text."""
    import yaml

    class AsWritten(yaml.SafeLoader):
        pass

    AsWritten.yaml_implicit_resolvers = {
        first: [(tag, form) for tag, form in resolvers if tag.rpartition(":")[2] in KEPT]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    return AsWritten


def _value(parameter: Any, value: Any, is_on: bool) -> Any:
    """The value as click takes it from a command line: words, which it converts and checks.

    Raises:
        ValueError: it is of another kind.
    """
    if parameter.is_flag:
        if not isinstance(value, bool):
            raise ValueError("give true or false")
        return value is is_on
    if parameter.multiple:
        return [_word(item) for item in (value if isinstance(value, list) else [value])]
    return _word(value)


def _word(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(
            "give a number or a text; YAML reads on, off, yes and no without quotes as switches"
        )
    return value


def _overruled(context: typer.Context, shape: Signature) -> dict[str, Any]:
    """Defaults for the file's values of options that the command line gives in another spelling."""

    def source(name: str) -> str:
        return getattr(context.get_parameter_source(name), "name", "")

    def option(name: str) -> str:
        return SAME.get(shown_name(name), shown_name(name))

    said = {
        option(name) for name in context.params if source(name) in ("COMMANDLINE", "ENVIRONMENT")
    }
    overruled = [
        name for name in context.params if source(name) == "DEFAULT_MAP" and option(name) in said
    ]
    return {name: shape.parameters[name].default for name in overruled}
