"""Options shared by many commands."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

Json = Annotated[bool, typer.Option("--json", help="Print the result alone, as JSON, on stdout.")]
TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run code that the checkpoint brings.")
]


def writable(
    context: typer.Context, parameter: typer.CallbackParam, path: Path | None
) -> Path | None:
    """Callback of an option that names a file to write: checked as the line is read, before any work."""
    return _checked(context, parameter, path, folder=False)


def writable_folder(
    context: typer.Context, parameter: typer.CallbackParam, path: Path | None
) -> Path | None:
    """Callback of an option that names a folder to write into."""
    return _checked(context, parameter, path, folder=True)


def writable_if_new(
    context: typer.Context, parameter: typer.CallbackParam, path: Path | None
) -> Path | None:
    """Callback of an option that names a cache: it is read where it exists, and else written."""
    return path if path is None or path.exists() else writable(context, parameter, path)


def _checked(
    context: typer.Context, parameter: typer.CallbackParam, path: Path | None, *, folder: bool
) -> Path | None:
    from ...quant.base.atomic_io import check_output

    if path is not None and not context.resilient_parsing:
        check_output(path, parameter.opts[0], folder=folder)
    return path


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """The model argument."""

    model: Annotated[
        str | None,
        typer.Argument(
            help="A folder, a .gguf file, a bundled model's name or a hub id. Default: stories3M."
        ),
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
