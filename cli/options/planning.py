"""Options of `llmopt deploy`, and the output of `llmopt kv-plan`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from ...quant.base.option import option


@dataclass(frozen=True, slots=True)
class PlanOutputOptions:
    """Output options."""

    PANEL: ClassVar = "Output"

    explain: bool = option(False, "Each formula with its numbers.", flag="--explain")
    output: Path | None = option(
        None,
        "Write the plan as JSON to this file.",
        flag="--output -o",
        hidden_flags=("--out",),
        writes="file",
    )
    html: Path | None = option(None, "Write the plan as a page.", writes="file")
    as_json: bool = option(False, "Print the plan as JSON.", flag="--json")


@dataclass(frozen=True, slots=True)
class DeployedPlanOptions:
    """Workload and hardware of a replica."""

    PANEL: ClassVar = "What is served"

    like: str | None = option(
        None, "The model to plan for, a name as in `kv-plan`. Default: the same."
    )
    weights: str | None = option(None, "bf16, fp8, int4 ... Default: as stored.")
    context: str | None = option(
        None, "Tokens per sequence. Default: the model's context.", flag="--ctx"
    )
    sequences: int = option(16, "Concurrent sequences per replica.", flag="--concurrency")
    kv_dtype: str | None = option(None, "bf16, fp8 ... Default: bf16.")
    gpu: str = option("H100 SXM", "A GPU of kv-plan's table, or cpu.")
    tp: int | None = option(
        None,
        "Tensor-parallel size. Default: the fewest GPUs that hold the model.",
        hidden_flags=("--tensor-parallel-size",),
    )


@dataclass(frozen=True, slots=True)
class DeployOutputOptions:
    """Where the files go."""

    output: Path | None = option(
        None,
        "Folder to write into. Default: deploy-NAME.",
        flag="--output -o",
        hidden_flags=("--out",),
        writes="folder",
    )
    as_json: bool = option(False, "Print the files as JSON.", flag="--json")
