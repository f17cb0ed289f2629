"""Options of several commands: the model, output folders, printed output."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import typer

from ...quant.base.option import option

Json = Annotated[bool, typer.Option("--json", help="Print the result alone, as JSON, on stdout.")]
TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run code that the checkpoint brings.")
]


def json_option() -> Any:
    """The field of `Json` in a group."""
    return option(False, "Print the result alone, as JSON, on stdout.", flag="--json", common=True)


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """The model argument."""

    model: Annotated[
        str | None,
        typer.Argument(
            help="A folder, a .gguf file, a bundled model's name or a hub id. Default: stories3M."
        ),
    ] = None
    model_option: str | None = option(
        None, "The same as the argument.", flag="--model", panel="Arguments"
    )

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


@dataclass(frozen=True, slots=True)
class FolderOptions:
    """The run folder."""

    output: Path | None = option(
        None,
        "The run folder to create. Default: one in --result-dir, named by time and run.",
        flag="--output -o",
        writes="folder",
        common=True,
    )
    result_dir: Path = option(Path("runs"), "Parent of run folders.")

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
        from ...bench.record.result import stamped

        return self.output or stamped(self.result_dir, name)


@dataclass(frozen=True, slots=True)
class ResultOptions(FolderOptions):
    """The run folder of `llmopt bench`, optional files, and printed output."""

    PANEL: ClassVar = "Output"

    csv: bool = option(False, "Write the requests as CSV too, beside Parquet.", flag="--csv")
    as_json: bool = json_option()


def check_models(keywords: Mapping[str, Any]) -> None:
    """Raises BadInput for adapters and a draft model that are not there, before torch is imported."""
    from ...quant.convert.adapter import LoraSettings
    from ...quant.models import resolve_model

    for folder in keywords.get("loras", {}).values():
        LoraSettings.read(folder)
    speculation = keywords.get("speculation")
    if speculation is not None and speculation.draft_model is not None:
        resolve_model(str(speculation.draft_model))
