"""Where a measurement is written."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import typer

from .common import Json


@dataclass(frozen=True, slots=True)
class FolderOptions:
    """The run folder."""

    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="The run folder to make. Default: one in --result-dir, named by time and run.",
        ),
    ] = None
    result_dir: Annotated[Path, typer.Option(help="Where run folders are made.")] = Path("runs")

    def check(self) -> None:
        """Before hours of measuring: raises `BadInput` for an output that is there already."""
        from ...quant.base.errors import BadInput

        if self.output is not None and self.output.exists():
            raise BadInput(f"--output {self.output} exists: name another folder, or remove it")

    def folder(self, name: str) -> Path:
        """Where the run of that name goes."""
        from ...bench.files.run_folder import stamped

        return self.output or stamped(self.result_dir, name)


@dataclass(frozen=True, slots=True)
class ResultOptions(FolderOptions):
    """The run folder of `llmopt bench`, what else is in it, and what is printed."""

    PANEL: ClassVar = "Output"

    csv: Annotated[
        bool, typer.Option("--csv", help="Write the requests as CSV too, beside Parquet.")
    ] = False
    as_json: Json = False
