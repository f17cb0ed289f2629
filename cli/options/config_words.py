"""Option groups generated from a config dataclass: one Typer option per field, with its help text."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import MISSING, Field, fields, make_dataclass
from typing import Annotated, Any, get_type_hints

import typer

from ...engine.config.option import Option, options_of
from .groups import Hidden


def words_of(config: type, panel: str, only: Collection[str] = ()) -> Any:
    """A dataclass with a Typer option for every option of a config, or for the fields in `only`."""
    return make_dataclass(f"{config.__name__}Words", _words(config, panel, only), frozen=True)


def keywords_of(config: type, words: Any) -> dict[str, Any]:
    """The config's keyword arguments from parsed options; options that were not given are omitted.

    Raises:
        BadInput: an invalid value.
    """
    keywords: dict[str, Any] = {}
    for name, option in options_of(config).items():
        if option.config is not None:
            keywords[name] = option.config.asked(**keywords_of(option.config, words))
        elif (word := getattr(words, word_name(name, option))) is not None:
            keywords[name] = option.value(word)
    return keywords


def word_name(field: str, one: Option) -> str:
    """The parameter name of a field's option: that of its flag."""
    return (one.flag or field).lstrip("-").replace("-", "_")


def _words(config: type, panel: str, only: Collection[str] = ()) -> Iterator[tuple[str, Any, Any]]:
    hints, options = get_type_hints(config), options_of(config)
    for field in fields(config):
        if field.name not in options or (only and field.name not in only):
            continue
        one = options[field.name]
        if one.config is not None:
            yield from _words(one.config, panel=one.help)
        else:
            kind, default = _kind_and_default(field, hints[field.name], one)
            name = word_name(field.name, one)
            flag = "--" + name.replace("_", "-")
            if kind in (bool, bool | None):
                flag = f"{flag}/--no-{flag.removeprefix('--')}"
            shown = True if one.show_default is None else one.show_default
            info = typer.Option(flag, help=one.help, rich_help_panel=panel, show_default=shown)
            yield name, Annotated[kind, info, Hidden(*one.hidden_flags)], default


def _kind_and_default(field: Field[Any], hint: Any, one: Option) -> tuple[Any, Any]:
    """Type and default of the option: the field's, or optional where the option's type differs."""
    if one.word is not None:
        return one.word | None, None
    return (hint | None, None) if field.default is MISSING else (hint, field.default)
