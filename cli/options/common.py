"""Options that many commands have, so that they read the same everywhere."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

Json = Annotated[bool, typer.Option("--json", help="Print the result alone, as JSON, on stdout.")]


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """The model that a command is about."""

    model: Annotated[
        str | None,
        typer.Argument(help="A folder, a bundled model's name or a hub id. Default: stories3M."),
    ] = None
    model_option: Annotated[
        str | None, typer.Option("--model", help="The same as the argument.")
    ] = None

    @property
    def name(self) -> str | None:
        """The one that was given.

        Raises:
            BadInput: two different ones were.
        """
        from ...quant.base.errors import BadInput

        one, other = self.model, self.model_option
        if one is not None and other is not None and one != other:
            raise BadInput(f"two models were given, {one!r} and {other!r}: give one")
        return one or other
