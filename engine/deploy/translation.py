"""Translation of `serve-local` options to another engine's command line, by a table for each engine."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...quant.base.errors import BadInput

Words = Sequence[str]
Translate = Callable[[Any], Words]


@dataclass(frozen=True, slots=True)
class ServerCommand:
    """Another engine's server, and what its options are for those of `serve-local`.

    Attributes:
        name: as `--engine` takes it.
        title: for people.
        version: whose options are named; tests hold each of them against a list of that version.
        program: the executable.
        words: its arguments before the model.
        install: how to install it.
        defaults: llmopt's defaults that differ from the engine's, and are passed.
        table: the words for each option, by its name in Python.
        together: options that are translated at once.
        combined: the words for those of `together` that are given.
        key_variable: the environment variable that holds the API key; None: it takes none from there.
        ready_path: answers 200 once the server takes requests.
    """

    name: str
    title: str
    version: str
    program: str
    words: Words
    install: str
    defaults: Mapping[str, Any]
    table: Mapping[str, Translate]
    together: Words = ()
    combined: Callable[[Mapping[str, Any]], Words] = lambda _: ()
    key_variable: str | None = None
    ready_path: str = "/health"

    def command(self, model: str, asked: Mapping[str, Any]) -> list[str]:
        """The command line for `model` and the options of `serve-local` in `asked`, by their names in Python.

        Raises:
            BadInput: the engine has no equivalent of an option or its value.
        """
        unknown = [name for name in asked if name not in self.table and name not in self.together]
        if unknown:
            listed = ", ".join(shown(name) for name in unknown)
            raise BadInput(
                f"{listed}: {self.title}'s server has nothing that means the same; leave it out"
            )
        everything = {**self.defaults, **asked}
        words = [
            word
            for name, value in everything.items()
            if name in self.table
            for word in self.table[name](value)
        ]
        return [self.program, *self.words, model, *words, *self.combined(asked)]

    def find(self) -> str:
        """The executable beside this Python, or on the PATH.

        Raises:
            BadInput: there is none.
        """
        beside = str(Path(sys.executable).parent)
        if path := shutil.which(self.program, path=beside) or shutil.which(self.program):
            return path
        raise BadInput(
            f"--engine {self.name}: there is no program `{self.program}` here: {self.install}"
        )


def shown(name: str) -> str:
    """An option as it is typed."""
    return "--" + name.replace("_", "-").removesuffix("-option")


def as_is(option: str) -> Translate:
    return lambda value: [option, str(value)]


def flag(option: str) -> Translate:
    """A flag that is passed where the value is true."""
    return lambda value: [option] if value else []


def unless(option: str) -> Translate:
    """A flag that is passed where the value is false."""
    return lambda value: [] if value else [option]


def only(title: str, name: str, values: Mapping[str, str], option: str) -> Translate:
    """An option whose values the engine calls otherwise, or lacks."""

    def translate(value: str) -> Words:
        if value not in values:
            raise BadInput(f"{shown(name)} {value}: {title} has {', '.join(values)}")
        return [option, values[value]]

    return translate


def nothing_for(title: str, name: str, meant: object) -> Translate:
    """An option of which the engine always does one thing."""

    def translate(value: object) -> Words:
        if value != meant:
            raise BadInput(f"{shown(name)} {value}: {title}'s server always has {meant}")
        return []

    return translate
