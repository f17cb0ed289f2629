"""Config options, each defined once, in the metadata of its dataclass field.

The command line, a benchmark's options, recipes and keyword arguments are all generated from these
definitions: name, default, limits and help of an option cannot differ between them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import cache
from typing import Any, ParamSpec, get_origin

from ...quant.base.errors import BadInput

Limit = Callable[[Any], str | None]
"""The error message for a value; None: it is valid."""

_KEY = "option"
_Details = ParamSpec("_Details")


@dataclass(frozen=True, slots=True)
class Option:
    """Help, spelling, parser and limit of a field.

    Attributes:
        help: for help screens; the field's documentation.
        flag: the command-line option; None: `--` and the field's name.
        hidden_flags: accepted aliases that help screens omit: earlier ones, or vLLM's where it differs.
            A switch has them in pairs, as in `--overlapped-loop/--serial-loop`.
        former_names: deprecated names of the field in keywords and recipes.
        word: type of the value on a command line, if it is not the field's.
        parse: converts a value of type `word` to the field's; other values are passed through.
        limit: validates values other than None.
        show_default: how a help screen describes a derived default.
        config: the field holds a nested config, whose options appear on the command line under the heading
            `help`. Its constructor `asked` makes it from the options given there, or None.
    """

    help: str
    flag: str | None = None
    hidden_flags: tuple[str, ...] = ()
    former_names: tuple[str, ...] = ()
    word: Any = None
    parse: Callable[[Any], Any] | None = None
    limit: Limit | None = None
    show_default: str | None = None
    config: type[Any] | None = None

    def value(self, value: Any) -> Any:
        """The field's value, parsed if it is of type `word`."""
        if self.parse is None or not isinstance(value, get_origin(self.word) or self.word):
            return value
        return self.parse(value)


def _as_metadata(
    make: Callable[_Details, Option],
) -> Callable[_Details, Mapping[str, Option]]:
    return lambda *details, **named: {_KEY: make(*details, **named)}


option = _as_metadata(Option)
"""`field(default=..., metadata=option(...))`: a field that is an option; the arguments are `Option`'s."""


@cache
def options_of(config: type) -> Mapping[str, Option]:
    """{field: its option}, in the order of the fields; fields without an option are left out."""
    return {field.name: field.metadata[_KEY] for field in fields(config) if _KEY in field.metadata}


def keywords(config: type, given: Mapping[str, Any]) -> dict[str, Any]:
    """Keywords for a config, of `given`, with former names replaced and strings parsed.

    Raises:
        BadInput: a string that does not parse, or an option by two names.
    """
    options = options_of(config)
    present = {former: name for name, option in options.items() for former in option.former_names}
    values: dict[str, Any] = {}
    for key, value in given.items():
        name = present.get(key, key)
        if name in values:
            raise BadInput(f"{key} is another name of {name}: give one")
        values[name] = options[name].value(value) if name in options else value
    return values


def check_limits(config: Any) -> None:
    """Check every option of a config against its limit.

    Raises:
        BadInput: naming the field and its limit.
    """
    for name, option in options_of(type(config)).items():
        value = getattr(config, name)
        if option.limit is None or value is None or (problem := option.limit(value)) is None:
            continue
        shown = f"{name} {value!r}" if isinstance(value, str) else f"{name} = {value}"
        raise BadInput(f"{shown}: {problem}")


def at_least(least: int) -> Limit:
    return lambda value: None if value >= least else f"need {least} or more"


def one_of(*choices: object) -> Limit:
    words = (" or " if len(choices) == 2 else ", ").join(map(str, choices))
    return lambda value: None if value in choices else f"choose {words}"


def share(value: float) -> str | None:
    """A limit: more than 0 and at most 1."""
    return None if 0 < value <= 1 else "a share in (0, 1] is needed"
