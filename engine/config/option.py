"""An option of a config, defined once, as metadata of the dataclass field that holds its value.

The command line, a benchmark's options, recipes and keyword arguments are all made from these definitions:
name, default, limits and explanation of an option cannot differ between them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import cache
from typing import Any, ParamSpec, get_origin

from ...quant.base.errors import BadInput

Limit = Callable[[Any], str | None]
"""What is wrong with a value; None: nothing."""

_KEY = "option"
_Details = ParamSpec("_Details")


@dataclass(frozen=True, slots=True)
class Option:
    """How a field is explained, spelled, read and limited.

    Attributes:
        help: for help screens; the field's documentation.
        flag: its spelling on a command line; None: `--` and the field's name.
        hidden_flags: spellings that are taken too but not shown: earlier ones, or vLLM's where ours differs.
            A switch has them in pairs, as in `--overlapped-loop/--serial-loop`.
        former_names: earlier names of the field, which keywords and recipes may still use.
        word: type of the value as it stands on a command line, where it is not the field's own.
        parse: makes the field's value of such a word; a value that is no word is taken as it is.
        limit: what values there may be, None aside.
        show_default: what a help screen says of a default that is derived.
        config: the field holds a config of its own, whose options stand beside these on a command line under
            `help` as their heading. It has a constructor `asked` for what was asked there, if anything was.
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

    def value(self, given: Any) -> Any:
        """The field's value, of a word or of a value."""
        if self.parse is None or not isinstance(given, get_origin(self.word) or self.word):
            return given
        return self.parse(given)


def _as_metadata(
    make: Callable[_Details, Option],
) -> Callable[_Details, Mapping[str, Option]]:
    return lambda *details, **named: {_KEY: make(*details, **named)}


option = _as_metadata(Option)
"""`field(default=..., metadata=option(...))`: a field that is an option; the arguments are `Option`'s."""


@cache
def options_of(config: type) -> Mapping[str, Option]:
    """{field: its option}, in the order of the fields; those of a caller alone have none."""
    return {one.name: one.metadata[_KEY] for one in fields(config) if _KEY in one.metadata}


def keywords(config: type, given: Mapping[str, Any]) -> dict[str, Any]:
    """Keywords for a config: `given`, where former names and words are taken too.

    Raises:
        BadInput: a word that is not understood, or one option by two names.
    """
    options = options_of(config)
    present = {former: name for name, one in options.items() for former in one.former_names}
    found: dict[str, Any] = {}
    for key, value in given.items():
        name = present.get(key, key)
        if name in found:
            raise BadInput(f"{key} is another name of {name}: give one")
        found[name] = options[name].value(value) if name in options else value
    return found


def check_limits(config: Any) -> None:
    """Hold every option of a config against its limit.

    Raises:
        BadInput: naming the field and what it may be.
    """
    for name, one in options_of(type(config)).items():
        value = getattr(config, name)
        if one.limit is None or value is None or (complaint := one.limit(value)) is None:
            continue
        shown = f"{name} {value!r}" if isinstance(value, str) else f"{name} = {value}"
        raise BadInput(f"{shown}: {complaint}")


def at_least(least: int) -> Limit:
    return lambda value: None if value >= least else f"need {least} or more"


def one_of(*choices: object) -> Limit:
    words = (" or " if len(choices) == 2 else ", ").join(map(str, choices))
    return lambda value: None if value in choices else f"choose {words}"


def share(value: float) -> str | None:
    """A limit: more than 0 and at most 1."""
    return None if 0 < value <= 1 else "a share in (0, 1] is needed"
