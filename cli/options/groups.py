"""Option groups: a dataclass of Typer options is expanded into a command's options and built for the call.

    @dataclass(frozen=True, slots=True)
    class LoadOptions:
        PANEL: ClassVar = "Load"
        max_concurrency: Annotated[int | None, typer.Option(help="Requests in flight.")] = None

    @with_groups
    def bench(load: LoadOptions, as_json: Json = False) -> None: ...

`PANEL` is the default help-screen heading of the group's options.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import MISSING, fields, is_dataclass
from functools import wraps
from inspect import Parameter, Signature, signature
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer
from typer.models import OptionInfo

_HIDDEN = "__hidden"


class Hidden:
    """Marker beside a `typer.Option` in `Annotated`: aliases that are accepted but hidden from help."""

    def __init__(self, *flags: str) -> None:
        self.flags = flags


def with_groups(command: Callable[..., None]) -> Callable[..., None]:
    """Decorate a command for Typer: dataclass parameters are expanded into one option per field."""
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {}
    shown: list[Parameter] = []
    for parameter in signature(command).parameters.values():
        hint = hints[parameter.name]
        if is_dataclass(hint):
            groups[parameter.name] = hint
            shown += _parameters(hint)
        else:
            shown.append(_parameter(parameter.name, hint, parameter.default))
    known = {parameter.name: parameter for parameter in shown}
    every = [*shown, *(alias for parameter in shown for alias in _hidden_parameters(parameter))]

    @wraps(command)
    def call(**given: Any) -> None:
        given = _by_shown_name(given, known)
        built = {
            name: group(**{field.name: given.pop(field.name) for field in fields(group)})
            for name, group in groups.items()
        }
        command(**built, **given)

    call.__signature__ = Signature(every)  # type: ignore[attr-defined]
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in every}
    return call


def values_of(*groups: Any) -> dict[str, Any]:
    """{field: value} of several built groups."""
    return {field.name: getattr(group, field.name) for group in groups for field in fields(group)}


def shown_name(parameter: str) -> str:
    """The visible parameter of a hidden alias, or the parameter itself."""
    return parameter.partition(_HIDDEN)[0]


def _parameters(group: Any) -> Iterator[Parameter]:
    hints = get_type_hints(group, include_extras=True)
    for field in fields(group):
        default = Parameter.empty if field.default is MISSING else field.default
        yield _parameter(field.name, hints[field.name], default, getattr(group, "PANEL", None))


def _parameter(name: str, hint: Any, default: Any, panel: str | None = None) -> Parameter:
    if get_origin(hint) is Annotated:
        kind, *notes = get_args(hint)
        hint = Annotated[kind, *(_in_panel(note, panel) for note in notes)]
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=hint)


def _in_panel(note: Any, panel: str | None) -> Any:
    if isinstance(note, OptionInfo) and note.rich_help_panel is None:
        note = copy(note)
        note.rich_help_panel = panel
    return note


def _hidden_parameters(parameter: Parameter) -> Iterator[Parameter]:
    """A separate hidden option for the aliases of an option."""
    if get_origin(parameter.annotation) is not Annotated:
        return
    kind, *notes = get_args(parameter.annotation)
    callback = next((note.callback for note in notes if isinstance(note, OptionInfo)), None)
    for note in notes:
        if isinstance(note, Hidden) and note.flags:
            info = typer.Option(*note.flags, hidden=True, callback=callback)
            yield Parameter(
                parameter.name + _HIDDEN,
                Parameter.KEYWORD_ONLY,
                default=None,
                annotation=Annotated[kind | None, info],
            )


def _by_shown_name(given: dict[str, Any], known: dict[str, Parameter]) -> dict[str, Any]:
    """`given`, with values of hidden aliases moved to their visible options."""
    found = {name: value for name, value in given.items() if name in known}
    for name, value in given.items():
        if name in known or value is None:
            continue
        shown = shown_name(name)
        if found[shown] != known[shown].default:
            from ...quant.base.errors import BadInput

            raise BadInput(f"{_flag(shown)} was given by two spellings: give one")
        found[shown] = value
    return found


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
