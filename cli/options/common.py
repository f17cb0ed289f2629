"""Options shared by many commands."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

Json = Annotated[bool, typer.Option("--json", help="Print the result alone, as JSON, on stdout.")]
TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run code that the checkpoint brings.")
]


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """The model argument."""

    model: Annotated[
        str | None,
        typer.Argument(help="A folder, a bundled model's name or a hub id. Default: stories3M."),
    ] = None
    model_option: Annotated[
        str | None, typer.Option("--model", help="The same as the argument.")
    ] = None

    @property
    def name(self) -> str | None:
        """The given model.

        Raises:
            BadInput: two different models were given.
        """
        from ...quant.base.errors import BadInput

        model, option = self.model, self.model_option
        if model is not None and option is not None and model != option:
            raise BadInput(f"two models were given, {model!r} and {option!r}: give one")
        return model or option
