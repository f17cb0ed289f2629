"""Output folders of a measurement."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import typer

from .common import Json, writable_folder


@dataclass(frozen=True, slots=True)
class FolderOptions:
    """The run folder."""

    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            callback=writable_folder,
            help="The run folder to create. Default: one in --result-dir, named by time and run.",
        ),
    ] = None
    result_dir: Annotated[Path, typer.Option(help="Parent of run folders.")] = Path("runs")

    def check_writable(self) -> None:
        """Raises `BadInput` before measuring if the default folder cannot be made."""
        from ...quant.base.atomic_io import check_output

        if self.output is None:
            check_output(self.result_dir / "run", "--result-dir", folder=True)

    def check(self) -> None:
        """Raises `BadInput` before measuring if the output exists or cannot be written."""
        from ...quant.base.errors import BadInput

        self.check_writable()
        if self.output is not None and self.output.exists():
            raise BadInput(f"--output {self.output} exists: name another folder, or remove it")

    def folder(self, name: str) -> Path:
        """The folder of the run of that name."""
        from ...bench.record.run_folder import stamped

        return self.output or stamped(self.result_dir, name)


@dataclass(frozen=True, slots=True)
class ResultOptions(FolderOptions):
    """The run folder of `llmopt bench`, optional files, and printed output."""

    PANEL: ClassVar = "Output"

    csv: Annotated[
        bool, typer.Option("--csv", help="Write the requests as CSV too, beside Parquet.")
    ] = False
    as_json: Json = False
