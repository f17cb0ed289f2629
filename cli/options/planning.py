"""Options of `llmopt kv-plan`, mostly named as in the planner's `PlanRequest`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import typer

from ...engine.config.config import EngineConfig
from .common import TrustRemoteCode, writable
from .config_words import words_of
from .groups import Hidden


@dataclass(frozen=True, slots=True)
class PlannedModelOptions:
    """The model, and its weight dtype or quantization."""

    PANEL: ClassVar = "Model"

    model: Annotated[
        str,
        typer.Option(
            help="A name of the bundled table, a folder, a config.json, a .gguf file, or a hub id."
        ),
    ]
    weights: Annotated[
        str | None,
        typer.Option(
            help="bf16, fp8, int8, int4, gptq, nf4, mxfp4, nvfp4, q8_0 ... Without it: as stored."
        ),
    ] = None
    group_size: Annotated[
        int | None,
        typer.Option(help="Input channels per scale, -1 for one scale per output channel."),
    ] = None
    symmetric: Annotated[
        bool | None,
        typer.Option("--symmetric/--asymmetric", help="int4, int8: without zero points."),
    ] = None
    file_format: Annotated[
        str | None, typer.Option("--format", help="int4, int8: awq or compressed-tensors.")
    ] = None
    trust_remote_code: TrustRemoteCode = False


@dataclass(frozen=True, slots=True)
class ServedOptions:
    """The workload."""

    PANEL: ClassVar = "What is served"

    context: Annotated[
        str | None,
        typer.Option(
            "--ctx", help="Tokens per sequence: 4096, 128k, 1M. Default: the model's context."
        ),
    ] = None
    sequences: Annotated[
        int, typer.Option("--concurrency", "--batch", help="Concurrent sequences.")
    ] = 1
    output_tokens: Annotated[
        int | None,
        typer.Option(help="Output tokens, as part of the context. Default: a quarter."),
    ] = None
    images: Annotated[
        str | None,
        typer.Option(help="Images in each prompt, COUNTxWIDTHxHEIGHT: 2x1024x768. Default: none."),
    ] = None
    kv_dtype: Annotated[
        str | None,
        typer.Option(
            help="bf16, float32, fp8, fp8_per_token_head, int8, nvfp4, q8_0, q5_1 or q4_0. Default: "
            "bf16."
        ),
    ] = None


@dataclass(frozen=True, slots=True)
class HardwareOptions:
    """The devices, and the parallelism."""

    PANEL: ClassVar = "Hardware"

    gpu: Annotated[
        list[str] | None,
        typer.Option(
            help="A GPU of the table; repeatable; `all` ranks all of them; `cpu` is this machine."
        ),
    ] = None
    gpu_memory: Annotated[str | None, typer.Option(help="A GPU by its memory alone: 80GiB.")] = None
    tp: Annotated[
        int | None,
        typer.Option(help="Tensor-parallel size. Default: the fewest GPUs that hold the model."),
        Hidden("--tensor-parallel-size"),
    ] = None
    pp: Annotated[
        int | None,
        typer.Option(help="Pipeline-parallel size."),
        Hidden("--pipeline-parallel-size"),
    ] = None
    engine: Annotated[
        str,
        typer.Option(
            help="llmopt, vllm, llama.cpp, transformers, or all side by side.",
            rich_help_panel="Engine",
        ),
    ] = "llmopt"


_PLANNED = (
    "block_size",
    "kv_cache_memory_bytes",
    "gpu_memory_utilization",
    "max_num_seqs",
    "max_num_batched_tokens",
    "kv_budget",
    "kv_eviction",
)


class PlannedEngineOptions(words_of(EngineConfig, "Engine", only=_PLANNED)):
    """Options of the engine that change a plan."""

    def asked(self) -> dict[str, Any]:
        """Keyword arguments for `PlanRequest`."""
        return {
            "block_size": self.block_size,
            "kv_cache_memory": self.kv_cache_memory_bytes,
            "utilization": self.gpu_memory_utilization,
            "max_num_seqs": self.max_num_seqs,
            "max_num_batched_tokens": self.max_num_batched_tokens,
            "kv_budget": self.kv_budget,
            "kv_eviction": self.kv_eviction,
        }


@dataclass(frozen=True, slots=True)
class MoneyOptions:
    """Speed and price."""

    PANEL: ClassVar = "Speed and money"

    measured: Annotated[
        Path | None,
        typer.Option(
            help="A run of `llmopt bench`: use its measured ceilings, not a data sheet's."
        ),
    ] = None
    draft_tokens: Annotated[
        int | None, typer.Option(help="Speculative decoding: draft tokens per step.")
    ] = None
    acceptance: Annotated[
        float, typer.Option(help="Speculative decoding: acceptance rate of draft tokens.")
    ] = 0.7
    draft_cost: Annotated[
        float,
        typer.Option(help="Speculative decoding: cost of a draft-model step, in target steps."),
    ] = 0.1
    gpu_hour_price: Annotated[float | None, typer.Option(help="Dollars per GPU hour.")] = None
    api_price_in: Annotated[
        float | None, typer.Option(help="An API's dollars per million input tokens.")
    ] = None
    api_price_out: Annotated[
        float | None, typer.Option(help="An API's dollars per million output tokens.")
    ] = None
    duty_cycle: Annotated[float, typer.Option(help="Fraction of the day under load.")] = 1.0


@dataclass(frozen=True, slots=True)
class PlanOutputOptions:
    """Output options."""

    PANEL: ClassVar = "Output"

    explain: Annotated[bool, typer.Option("--explain", help="Each formula with its numbers.")] = (
        False
    )
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", callback=writable, help="Write the plan as JSON to this file."
        ),
        Hidden("--out"),
    ] = None
    html: Annotated[
        Path | None, typer.Option(callback=writable, help="Write the plan as a page.")
    ] = None
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False
