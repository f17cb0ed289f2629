"""Options, each defined once, in the metadata of its dataclass field.

The command line, benchmarks, recipes, config files and keyword arguments are all generated from these
definitions: name, type, default, limits and help of an option cannot differ between them. The names that
options take (devices, KV-cache dtypes) are checked here without torch.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_origin

from .errors import BadInput

Limit = Callable[[Any], str | None]
"""The error message for a value; None: it is valid."""

_KEY = "option"


@dataclass(frozen=True, slots=True)
class Option:
    """Help, spelling, parser and limit of a field.

    Attributes:
        flag: command-line spellings, with spaces between; empty: `--` and the field's name.
        hidden_flags: accepted aliases that help screens omit: earlier ones, or vLLM's where it differs.
            A switch has them in pairs, as in `--overlapped-loop/--serial-loop`.
        former_names: deprecated names of the field in keywords and recipes.
        panel: heading on help screens; None: the config's `PANEL`.
        word: type of the value on a command line, if it is not the field's.
        text: default as it is written on a command line, where `word` cannot hold the field's.
        unset: True if a command line without the option leaves the default to its reader.
        parse: conversion of a value of type `word` to the field's; other values are passed through.
        show_default: description of a derived default on help screens.
        span: least and largest value, on help screens.
        writes: kind of the path, which is checked before any work; caches are read if they exist.
        is_switch: True if the option is only switched on: its default is False, and `flag` has no `/--no-`.
        secret: True if representations leave the value out.
        common: True if people use it first: `--help` of a command with many options shows no others.
        config: class of a nested config, whose options are on the command line too. Its constructor `asked`
            makes it from the options given there, or None; a config without makes itself.
    """

    help: str
    flag: str = ""
    hidden_flags: tuple[str, ...] = ()
    former_names: tuple[str, ...] = ()
    panel: str | None = None
    word: Any = None
    text: str | None = None
    unset: bool = False
    parse: Callable[[Any], Any] | None = None
    limit: Limit | None = None
    show_default: str | None = None
    metavar: str | None = None
    span: tuple[int, int | None] | None = None
    envvar: str | None = None
    writes: Literal["file", "folder", "cache"] | None = None
    is_switch: bool = False
    secret: bool = False
    common: bool = False
    config: type[Any] | None = None

    def value(self, value: Any) -> Any:
        if self.parse is None or not isinstance(value, get_origin(self.word) or self.word):
            return value
        return self.parse(value)


def option(
    default: Any, help: str, *, factory: Callable[[], Any] | None = None, **details: Any
) -> Any:
    """Define a dataclass field that is an option; `details` are the other attributes of `Option`. The default
    is `MISSING` where there is none, or `factory` makes it."""
    is_switch = default is False and "/" not in details.get("flag", "")
    metadata = {_KEY: Option(help, is_switch=is_switch, **details)}
    if factory is not None:
        return field(default_factory=factory, metadata=metadata)
    return field(default=default, metadata=metadata)


def option_like(config: type, name: str, **changes: Any) -> Any:
    """Define a field with the default and the option of another config's field, but for some `changes`."""
    default = next(field.default for field in fields(config) if field.name == name)
    option = options_of(config)[name]
    panel = option.panel or getattr(config, "PANEL", None)
    return field(default=default, metadata={_KEY: replace(option, **{"panel": panel, **changes})})


def option_in(field: Any) -> Option | None:
    """The option of a dataclass field, or of a parameter's default that is one."""
    return field.metadata.get(_KEY) if isinstance(field, Field) else None


@cache
def options_of(config: type) -> Mapping[str, Option]:
    """{field: its option}, in the order of the fields; fields without an option are left out."""
    return {field.name: field.metadata[_KEY] for field in fields(config) if _KEY in field.metadata}


def flag_of(name: str, option: Option) -> str:
    """The first spelling of a field's option, without what switches it off."""
    spelled = option.flag.split()[0] if option.flag else "--" + name.replace("_", "-")
    return spelled.partition("/")[0]


def word_name(name: str, option: Option) -> str:
    return flag_of(name, option).removeprefix("--").replace("-", "_")


def spellings(name: str, option: Option) -> tuple[str, ...]:
    """The keys of a mapping that mean a field: the names of its flags, the field's own, and former ones."""
    flags = [word_name(name, option), *option.flag.split(), *option.hidden_flags]
    names = [flag.partition("/")[0].strip().removeprefix("--") for flag in flags]
    known = [*(word.replace("-", "_") for word in names if word), name, *option.former_names]
    return tuple(dict.fromkeys(known))


def keywords(config: type, given: Mapping[str, Any]) -> dict[str, Any]:
    """Keywords for a config, of `given`, with former names replaced and strings parsed. Raises `BadInput`: a
    string that does not parse, or an option by two names."""
    options = options_of(config)
    present = {former: name for name, option in options.items() for former in option.former_names}
    values: dict[str, Any] = {}
    for key, value in given.items():
        name = present.get(key, key)
        if name in values:
            raise BadInput(f"{key} is another name of {name}: give one")
        values[name] = options[name].value(value) if name in options else value
    return values


def keywords_of_words(config: type, given: Mapping[str, Any]) -> dict[str, Any]:
    """Keywords for a config, of the words of a command line; options that were not given are left out. Raises
    `BadInput`: a word that does not parse."""
    values: dict[str, Any] = {}
    for name, option in options_of(config).items():
        if option.config is not None:
            make = getattr(option.config, "asked", option.config)
            values[name] = make(**keywords_of_words(option.config, given))
        elif (word := given.get(word_name(name, option))) is not None:
            values[name] = option.value(word)
    return values


def words_of(config: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """The words of a command line that give a config these values, by the names of their flags."""
    written: dict[str, Any] = {}
    for name, option in options_of(config).items():
        value = values.get(name)
        if value is None or (value is False and option.is_switch):
            continue
        if option.config is not None:
            inner = {field: getattr(value, field) for field in options_of(option.config)}
            written |= words_of(option.config, inner)
        elif isinstance(value, Mapping):
            written[word_name(name, option)] = [f"{key}={item}" for key, item in value.items()]
        elif isinstance(value, Collection) and not isinstance(value, str):
            written[word_name(name, option)] = [str(item) for item in value]
        else:
            is_text = option.word is str or isinstance(value, Path)
            written[word_name(name, option)] = str(value) if is_text else value
    return written


def word_and_default(hint: Any, default: Any, option: Option) -> tuple[Any, Any]:
    """Type and default of a field's word on a command line: the field's, or None where the reader decides."""
    kind = hint if option.word is None else option.word
    if option.text is not None:
        return kind, option.text
    fits = option.word is None or isinstance(default, get_origin(kind) or kind)
    if default is MISSING or option.unset or not fits:
        return kind | None, None
    return kind, default


def check_limits(config: Any, *, by_flag: bool = False) -> None:
    """Check every option of a config against its limit. Raises `BadInput`: naming the field, or its flag, and
    its limit."""
    for name, option in options_of(type(config)).items():
        value = getattr(config, name)
        if option.limit is None or value is None or (problem := option.limit(value)) is None:
            continue
        shown = f"{name} {value!r}" if isinstance(value, str) else f"{name} = {value}"
        if by_flag:
            shown = f"{flag_of(name, option)} {value if isinstance(value, str) else f'{value:g}'}"
        raise BadInput(f"{shown}: {problem}")


def at_least(least: int) -> Limit:
    return lambda value: None if value >= least else f"need {least} or more"


def no_less_than(least: int) -> Limit:
    """`at_least` in the words of the server's options; refuses NaN too."""
    return lambda value: None if value >= least else f"at least {least}"


def within(
    *,
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
    lt: float | None = None,
    finite: bool = False,
) -> Limit:
    """A limit by bounds, in pydantic's words."""
    bounds = (
        ("greater than or equal to", ge, operator.ge),
        ("greater than", gt, operator.gt),
        ("less than or equal to", le, operator.le),
        ("less than", lt, operator.lt),
    )

    def limit(value: float) -> str | None:
        if finite and not math.isfinite(value):
            return "Input should be a finite number"
        for comparison, bound, holds in bounds:
            if bound is not None and not holds(value, bound):
                return f"Input should be {comparison} {bound:g}"
        return None

    return limit


def one_of(*choices: object) -> Limit:
    listing = (" or " if len(choices) == 2 else ", ").join(map(str, choices))
    return lambda value: None if value in choices else f"choose {listing}"


def share(value: float) -> str | None:
    """A limit: more than 0 and at most 1."""
    return None if 0 < value <= 1 else "a share in (0, 1] is needed"


KINDS = ("cpu", "cuda")


def offer(name: str, known: Collection[str]) -> str:
    """The second half of a refusal: the known names most like `name`, if any is, and all of them."""
    lower = {other.lower(): other for other in known}
    near = [lower[other] for other in get_close_matches(name.lower(), lower, n=2, cutoff=0.6)]
    start = f"the nearest is {' or '.join(near)}; " if near else ""
    return f"{start}choose one of {', '.join(known)}"


def check_device(name: str) -> None:
    """Raises `BadInput` for a `--device` that is the name of no device."""
    if "," in name:
        raise BadInput(f"--device {name}: name one device; --nproc shares the work among several")
    if not re.fullmatch(rf"({'|'.join(KINDS)})(:(0|[1-9][0-9]?))?", name):
        raise BadInput(f"--device {name}: choose cpu, cuda or cuda:N")
