"""Options of several commands: the model, output folders, printed output, sweeps, verdicts and starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import typer

from ...base.atomic_io import check_output
from ...base.errors import BadInput
from ...base.option import option, option_like
from ...engine.config.plan_options import PlanRequest

if TYPE_CHECKING:
    from ...bench.options.values import Kind


def output_option(
    writes: Literal["file", "folder"], help: str, default: Path | None = None, **details: Any
) -> Any:
    """Define `--output` of a command that people use with it; `details` as of `option`."""
    how = {"flag": "--output -o", "writes": writes, "common": True}
    return option(default, help, **{**how, **details})


def json_option() -> Any:
    return option(False, "Print the result alone, as JSON, on stdout.", flag="--json", common=True)


def trust_option() -> Any:
    return option(False, "Run code that the checkpoint brings.", flag="--trust-remote-code")


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
        """The given model. Raises `BadInput`: two different models were given."""
        model, option = self.model, self.model_option
        if model is not None and option is not None and model != option:
            raise BadInput(f"two models were given, {model!r} and {option!r}: give one")
        return model or option


@dataclass(frozen=True, slots=True)
class FolderOptions:
    """The run folder."""

    output: Path | None = output_option(
        "folder", "The run folder to create. Default: one in --result-dir, named by time and run."
    )
    result_dir: Path = option(Path("runs"), "Parent of run folders.")

    def check(self) -> None:
        """Raises `BadInput` before measuring if the output exists or cannot be written."""
        if self.output is None:
            check_output(self.result_dir / "run", "--result-dir", folder=True)
        elif self.output.exists():
            raise BadInput(f"--output {self.output} exists: name another folder, or remove it")

    def folder(self, name: str) -> Path:
        """Make the folder of the run of that name, which no other run has."""
        from ...bench.record.result import claimed, stamped

        return stamped(self.result_dir, name) if self.output is None else claimed(self.output)


@dataclass(frozen=True, slots=True)
class ResultOptions(FolderOptions):
    """The run folder of `llmopt bench`, optional files, and printed output."""

    PANEL: ClassVar = "Output"

    csv: bool = option(False, "Write the requests as CSV too, beside Parquet.")
    as_json: bool = json_option()


def check_models(keywords: Mapping[str, Any]) -> None:
    """Raises BadInput for adapters and a draft model that are not there, before torch is imported."""
    from ...quant.convert.adapter import LoraSettings
    from ...quant.source.models import resolve_model

    for folder in keywords.get("loras", {}).values():
        LoraSettings.read(folder)
    speculation = keywords.get("speculation")
    if speculation is not None and speculation.draft_model is not None:
        resolve_model(str(speculation.draft_model))


@dataclass(frozen=True, slots=True)
class SweepOptions:
    """A load sweep, or a search for the highest load within an SLO."""

    PANEL: ClassVar = "Sweep"

    sweep_concurrency: str | None = option(
        None, "Measure at each of these concurrencies, such as 1,2,4,8, or auto."
    )
    sweep_rate: str | None = option(
        None,
        "Measure at each of these request rates, or auto: from half the rate of a single user.",
    )
    slo: str | None = option(
        None,
        'Find the highest load within these limits, in ms without a unit: "ttft:1s tpot:20ms".',
    )
    slo_by: str = option("rate", "rate or concurrency.")
    slo_share: float = option_like(PlanRequest, "slo_share", panel=None)

    @property
    def is_asked_for(self) -> bool:
        axes = (self.sweep_concurrency, self.sweep_rate, self.slo)
        return any(value is not None for value in axes)

    def kind(self) -> Kind:
        """The swept variable. Raises `BadInput`: two sweeps at once, or invalid limits."""
        from ...engine.base.units import required_slo

        axes = (self.sweep_concurrency, self.sweep_rate, self.slo)
        if sum(value is not None for value in axes) != 1:
            raise BadInput("give one of --sweep-concurrency, --sweep-rate and --slo")
        if self.slo is None:
            return "concurrency" if self.sweep_concurrency is not None else "rate"
        if self.slo_by not in ("rate", "concurrency"):
            raise BadInput(f"--slo-by {self.slo_by!r}: rate or concurrency")
        required_slo(self.slo)
        return "concurrency" if self.slo_by == "concurrency" else "rate"


@dataclass(frozen=True, slots=True)
class VerdictOptions:
    """Baseline, limits and outputs of the comparison."""

    PANEL: ClassVar = "Verdict"

    baseline: Path | None = option(
        None,
        "A run folder or result.json to compare this run with; the exit code is the verdict's.",
        common=True,
    )
    against: str | None = option(
        None,
        "A model, or with --base-url and --serve the URL of a server, to compare with in paired "
        "(interleaved) runs; the exit code is the verdict's. A server is sent the same key and "
        "headers.",
        common=True,
    )
    gate: str | None = option(
        None,
        'Limits for the verdict, such as "p99_ttft_ms<=+10% kl<=0.02". Default: no speed 5% worse.',
        common=True,
    )
    junit: Path | None = option(None, "Write the verdict as JUnit XML to this file.", writes="file")
    benchmark_json: Path | None = option(
        None, "Write the run for github-action-benchmark, as `llmopt compare` does.", writes="file"
    )


@dataclass(frozen=True, slots=True)
class StartOptions:
    """Two builds, measured in fresh processes that alternate."""

    PANEL: ClassVar = "Paired starts"

    run: list[str] | None = option(
        None,
        "A build to measure: a virtual environment, a command line, or a server's URL. Given "
        "twice, the base first; options of `llmopt bench` go behind `--`. A command with {output} "
        "is another tool's benchmark, which writes its result there.",
        metavar="NAME=SPEC",
    )
    max_starts: int | None = option(None, "Most starts of both builds together. Default: 80.")
    max_minutes: float | None = option(None, "Most minutes of measuring. Default: 10.")
    pin_cpus: str | None = option(
        None, "CPUs of a pair of starts: auto (the idlest), none, or such as 0,2-3."
    )
    interleave: bool | None = option(
        None,
        "Keep both processes of a pair alive, and let their passes alternate. Default: yes, "
        "but not where they would share a GPU or start servers.",
    )
    resume: Path | None = option(None, "Go on with the interrupted comparison in this folder.")

    @property
    def is_asked_for(self) -> bool:
        return self.run is not None or self.resume is not None

    def check_absent(self) -> None:
        """Raises `BadInput` for an option that two recorded runs have no use for."""
        for name in ("max_starts", "max_minutes", "pin_cpus", "interleave"):
            if getattr(self, name) is not None:
                raise BadInput(
                    f"--{name.replace('_', '-')} needs --run: recorded runs start nothing"
                )


@dataclass(frozen=True, slots=True)
class VerdictFileOptions:
    """The files of a verdict."""

    output: Path | None = output_option(
        "file",
        "Write the comparison as one HTML file; with --run, the folder of the starts.",
        hidden_flags=("--html",),
    )
    markdown: Path | None = option(
        None, "Write the comparison as Markdown to this file.", writes="file"
    )
    summary: Path | None = option(
        None,
        "Append the verdict as Markdown with a plot in text to this file, such as $GITHUB_STEP_SUMMARY.",
        writes="file",
    )
    junit: Path | None = option(None, "Write the verdict as JUnit XML to this file.", writes="file")
    benchmark_json: Path | None = option(
        None,
        "Write the new run for github-action-benchmark: this file is customSmallerIsBetter, "
        "the one beside it with .bigger before its ending is customBiggerIsBetter.",
        writes="file",
    )
    as_json: bool = json_option()
