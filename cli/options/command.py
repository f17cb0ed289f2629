"""Commands from definitions: the options of dataclasses are expanded into a Typer command's parameters.

    @dataclass(frozen=True, slots=True)
    class TableOptions:
        PANEL: ClassVar = "Output"
        rows: int | None = option(None, "Rows of the table.")

    @with_options
    def bench(
        engine: Annotated[Words, From(EngineConfig)],
        table: TableOptions,
        label: str | None = option(None, "A label in the result."),
    ) -> None: ...

A parameter that is such a dataclass gets one; a parameter of `From` gets the words of configs as they were
written, for a reader that parses and checks them together. An option may also be a parameter's default.

`--config FILE`, of a command with `ConfigFile`, reads options from a YAML file: its values are the command's
defaults (click's `default_map`), so that the command line and the environment win. The name and the
precedence are vLLM's. A command of more than `MOST_SHOWN` options, some of them `common`, gets `--help-all`,
and its `--help` leaves the others out (`cli/output/help_screen.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass, replace
from difflib import get_close_matches
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_type_hints

import typer

from ...base.atomic_io import check_output
from ...base.errors import BadInput
from ...base.option import (
    Option,
    flag_of,
    keywords,
    option_in,
    word_and_default,
    word_name,
)

_HIDDEN = "__hidden"
MOST_SHOWN = 30
SHOW_ALL = "llmopt.help_all"
"""Key of a context's `meta`: the help screen shows every option."""
Words = dict[str, Any]
"""Words of a command line by the names of their flags; None, or a default, for those not given."""


class From:
    """Marker of a parameter that takes the words of configs.

    Args:
        panel: heading of the options; None: the configs' own.
        only: fields to take; empty: all.
        but: fields to leave out.
        nested: True if the configs' field may be None, so that no option is required.
        is_group: True if the parameter takes the only config itself: options are named by its fields, and a
            field without one is an argument, as Typer has it.
    """

    def __init__(
        self,
        *configs: type,
        panel: str | None = None,
        only: Collection[str] = (),
        but: Collection[str] = (),
        nested: bool = False,
        is_group: bool = False,
    ) -> None:
        self.configs, self._panel, self._only, self._but = configs, panel, only, but
        self._nested, self._is_group = nested, is_group

    def parameters(self) -> Iterator[Parameter]:
        """A parameter for each option, and for those of nested configs."""
        for config in self.configs:
            hints = get_type_hints(config, include_extras=True)
            for field in fields(config):
                option, hint = option_in(field), hints[field.name]
                is_wanted = not self._only or field.name in self._only
                if option is None and self._is_group:
                    yield _keyword(field.name, hint, field.default)
                if option is None or field.name in self._but or not is_wanted:
                    continue
                if option.config is not None:
                    yield from From(option.config, nested=True).parameters()
                    continue
                panel = option.panel or self._panel or getattr(config, "PANEL", None)
                name = field.name if self._is_group else word_name(field.name, option)
                is_required = field.default is field.default_factory is MISSING and not self._nested
                default = Parameter.empty if is_required else field.default
                yield from _parameters(name, replace(option, panel=panel), hint, default)

    def value(self, given: Words) -> Any:
        """Make the value of the parameter from the words given on a command line."""
        return self.configs[0](**keywords(self.configs[0], given)) if self._is_group else given


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """Decorate a command for Typer: its parameters are expanded into one for each option."""
    hints = get_type_hints(command, include_extras=True)
    # The source of a parameter's value, and the names of its options.
    made_of: dict[str, tuple[From, list[str]]] = {}
    shown: list[Parameter] = []
    for parameter in signature(command).parameters.values():
        hint = hints[parameter.name]
        source = next((note for note in get_args(hint) if isinstance(note, From)), None)
        if isinstance(hint, type) and is_dataclass(hint):
            source = From(hint, is_group=True)
        if (option := option_in(parameter.default)) is not None:
            default = parameter.default.default
            default = Parameter.empty if default is MISSING else default
            shown += _parameters(parameter.name, option, hint, default)
            continue
        if source is None:
            shown.append(_keyword(parameter.name, hint, parameter.default))
            continue
        added = [*source.parameters()]
        made_of[parameter.name] = source, [p.name for p in added if shown_name(p.name) == p.name]
        shown += added
    known = {p.name: p for p in shown if shown_name(p.name) == p.name}
    # Aliases come last: Typer lists arguments and options in the order of parameters.
    every = [*known.values(), *(p for p in shown if p.name not in known)]
    defined = {
        name: note
        for name, parameter in known.items()
        for note in get_args(parameter.annotation)
        if isinstance(note, Option)
    }
    is_long = len(known) > MOST_SHOWN and any(option.common for option in defined.values())
    rare = (name for name, option in defined.items() if is_long and not option.common)
    if is_long:
        every.append(_keyword("help_all", _HELP_ALL, False))
    defaults = {parameter.name: parameter.default for parameter in every}

    @wraps(command)
    def call(**given: Any) -> None:
        given.pop("help_all", None)
        if given.get("config") is not None:
            given |= _overruled(given["context"], defaults)
        given = _by_shown_name(given, known)
        made = {
            name: source.value({word: given.pop(word) for word in names})
            for name, (source, names) in made_of.items()
        }
        for name in defined.keys() & given.keys():
            given[name] = defined[name].value(given[name])
        command(**made, **given)

    call.__signature__ = Signature(every)  # type: ignore[attr-defined]
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in every}
    call.rare = frozenset(rare)  # type: ignore[attr-defined]
    return call


def _show_all(context: typer.Context, is_given: bool) -> None:
    if is_given and not context.resilient_parsing:
        context.meta[SHOW_ALL] = True
        typer.echo(context.get_help())
        raise typer.Exit


_HELP_ALL = Annotated[
    bool,
    typer.Option(
        "--help-all", callback=_show_all, is_eager=True, help="Show every option and exit."
    ),
]


def shown_name(parameter: str) -> str:
    return parameter.partition(_HIDDEN)[0]


def _keyword(name: str, hint: Any, default: Any) -> Parameter:
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=hint)


def _parameters(name: str, option: Option, hint: Any, default: Any) -> Iterator[Parameter]:
    """The parameter of an option, and a hidden one for its aliases. Without a default it is required."""
    kind, word = word_and_default(hint, default, option)
    flags = option.flag.split() or [flag_of(name, option)]
    if not (option.flag or option.is_switch) and kind in (bool, bool | None):
        flags = [f"{flags[0]}/--no-{flags[0].removeprefix('--')}"]
    least, most = option.span or (None, None)
    callback = _writes(option.writes) if option.writes else None
    info = typer.Option(
        *flags,
        help=option.help,
        rich_help_panel=option.panel,
        show_default=True if option.show_default is None else option.show_default,
        metavar=option.metavar,
        envvar=option.envvar,
        case_sensitive=False,
        min=least,
        max=most,
        callback=callback,
    )
    default = default if default is Parameter.empty else word
    yield _keyword(name, Annotated[kind, info, option], default)
    if option.hidden_flags:
        alias = typer.Option(
            *option.hidden_flags, hidden=True, case_sensitive=False, callback=callback
        )
        yield _keyword(name + _HIDDEN, Annotated[kind | None, alias], None)


def _writes(kind: Literal["file", "folder", "cache"]) -> Callable[..., Path | None]:
    """The callback of an option that names a file to write, or a folder to write into: it is checked as the
    line is read, before any work. A cache is read where it exists, and else written."""

    def checked(
        context: typer.Context, parameter: typer.CallbackParam, path: Path | None
    ) -> Path | None:
        is_read = kind == "cache" and path is not None and path.exists()
        if path is not None and not is_read and not context.resilient_parsing:
            check_output(path, parameter.opts[0], folder=kind == "folder")
        return path

    return checked


def _by_shown_name(given: Words, known: dict[str, Parameter]) -> Words:
    """`given`, with values of hidden aliases moved to their visible options."""
    values = {name: value for name, value in given.items() if name in known}
    for name, value in given.items():
        if name in known or value is None:
            continue
        shown = shown_name(name)
        if values[shown] != known[shown].default:
            raise BadInput(f"--{shown.replace('_', '-')} was given by two spellings: give one")
        values[shown] = value
    return values


SAME_OPTION = {"model_option": "model"}
"""Parameters that are another spelling of one."""

TYPED = ("COMMANDLINE", "ENVIRONMENT")
"""Click's sources of values that win over the file's."""
KEPT_KINDS = ("bool", "null", "merge")
"""Kinds that YAML may read a bare word as."""


def read_config(path: Path, command: Any) -> dict[str, Any]:
    """The values of a YAML file by the names of a click command's parameters. Raises `BadInput`: it cannot be
    read, is not a mapping, or has an unknown name or a value of another kind."""
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
        for parameter in (p for p in context.command.params if p.name in values):
            try:
                parameter.process_value(context, values[parameter.name])
            except Exception as error:
                # A usage error, which has a message, would only name the option.
                if (message := getattr(error, "message", None)) is None:
                    raise
                name = parameter.opts[0].removeprefix("--")
                raise BadInput(f"--config {path}: {name}: {message}") from error
        context.default_map = {**(context.default_map or {}), **values}
    return path


ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config",
        help="YAML file of options, by their names here; the command line wins.",
        callback=_apply,
        is_eager=True,
    ),
]
"""Parameter `config` of a command that also takes its `context`."""


def _mapping(path: Path) -> Mapping[Any, Any]:
    import yaml

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
        first: [(tag, form) for tag, form in resolvers if tag.rpartition(":")[2] in KEPT_KINDS]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    return AsWritten


def _value(parameter: Any, value: Any, is_on: bool) -> Any:
    """The value as click takes it from a command line: words, which it converts and checks. Raises
    `ValueError`: it is of another kind."""
    if parameter.is_flag:
        if not isinstance(value, bool):
            raise ValueError("give true or false")
        return value is is_on
    texts = value if parameter.multiple and isinstance(value, list) else [value]
    if not all(isinstance(word, str) for word in texts):
        raise ValueError(
            "give a number or a text; YAML reads on, off, yes and no without quotes as switches"
        )
    return texts if parameter.multiple else value


def _overruled(context: typer.Context, defaults: Words) -> Words:
    """Defaults for the file's values of options that the command line gives in another spelling."""
    sources = {
        name: getattr(context.get_parameter_source(name), "name", "") for name in context.params
    }

    def option(name: str) -> str:
        return SAME_OPTION.get(shown_name(name), shown_name(name))

    typed = {option(name) for name, source in sources.items() if source in TYPED}
    return {
        name: defaults[name]
        for name, source in sources.items()
        if source == "DEFAULT_MAP" and option(name) in typed
    }
