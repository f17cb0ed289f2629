"""Options that several commands share, so that they read the same everywhere."""

from __future__ import annotations

from typing import Annotated

import typer

ModelArgument = Annotated[
    str | None,
    typer.Argument(help="A folder, a bundled model's name or a hub id. Default: stories3M."),
]
ModelOption = Annotated[str | None, typer.Option("--model", help="The same as the argument.")]
