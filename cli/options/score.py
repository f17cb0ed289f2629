"""Metrics of `llmopt bench`: latency, quality, and metadata of the result."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import typer


@dataclass(frozen=True, slots=True)
class MetricOptions:
    """Latency metrics and their limits."""

    PANEL: ClassVar = "Metrics"

    percentile_metrics: Annotated[
        str, typer.Option(help="Metrics at the top level of the result.")
    ] = "ttft,tpot,itl,e2el"
    metric_percentiles: Annotated[str, typer.Option(help="Percentiles, such as 50,99.")] = "99"
    goodput: Annotated[
        list[str] | None,
        typer.Option(help='Limits in ms, such as "ttft:200 tpot:50"; repeatable.'),
    ] = None


@dataclass(frozen=True, slots=True)
class QualityOptions:
    """Perplexity, distance from a reference, and tasks."""

    PANEL: ClassVar = "Quality"

    quality: Annotated[
        bool, typer.Option("--quality/--no-quality", help="Measure perplexity too.")
    ] = True
    quality_tokens: Annotated[int, typer.Option(help="Maximum tokens of the text to score.")] = 4096
    quality_text: Annotated[
        Path | None, typer.Option(help="Text to score. Default: bundled stories.")
    ] = None
    quality_protocol: Annotated[
        str,
        typer.Option(
            help="documents, gptq (WikiText-2 of the papers), strided, or llama.cpp (llama-perplexity)."
        ),
    ] = "documents"
    quality_window: Annotated[
        int | None,
        typer.Option(
            help="Tokens per window. Default: the context; gptq and strided at most 2,048, llama.cpp 512."
        ),
    ] = None
    quality_stride: Annotated[
        int | None,
        typer.Option(help="Tokens between windows of strided. Default: half a window."),
    ] = None
    reference: Annotated[
        str | None,
        typer.Option(
            help="Model to measure the distance from (KL divergence, top-1 agreement); with --base-url the "
            "URL of its server."
        ),
    ] = None
    tasks: Annotated[
        str | None,
        typer.Option(
            help="lm-eval tasks to score, NAME[,NAME]; a NAME may be the path of a task's YAML file. "
            "Needs llmopt\\[eval]."
        ),
    ] = None
    tasks_limit: Annotated[int | None, typer.Option(help="Maximum samples per task.")] = None
    num_fewshot: Annotated[
        int | None, typer.Option(help="Examples before each question of the tasks.")
    ] = None
    apply_chat_template: Annotated[
        bool,
        typer.Option(
            "--apply-chat-template", help="Ask the tasks as conversations (instruct models)."
        ),
    ] = False
    fewshot_as_multiturn: Annotated[
        bool,
        typer.Option(
            "--fewshot-as-multiturn/--no-fewshot-as-multiturn",
            help="With a chat template: each example is a turn of the conversation.",
        ),
    ] = True
    system_instruction: Annotated[
        str | None, typer.Option(help="System message before the tasks' questions.")
    ] = None


@dataclass(frozen=True, slots=True)
class RecordOptions:
    """Metadata of the result."""

    PANEL: ClassVar = "Output"

    plan: Annotated[
        Path | None,
        typer.Option(
            help="A plan of `kv-plan --output`: compare its predictions with the measurement."
        ),
    ] = None
    gpu_hour_price: Annotated[
        float | None,
        typer.Option(help="Dollars per hour of this machine: adds the cost per million tokens."),
    ] = None
    label: Annotated[str | None, typer.Option(help="A label in the result.")] = None
    name: Annotated[
        str | None, typer.Option(help="Name of the run and its folder. Default: label or model.")
    ] = None
    metadata: Annotated[
        list[str] | None, typer.Option(help="KEY=VALUE for the result; repeatable.")
    ] = None
    save_detailed: Annotated[
        bool, typer.Option("--save-detailed", help="Per-request arrays in result.json.")
    ] = False
    report: Annotated[
        bool,
        typer.Option(
            "--report/--no-report",
            help="Write a report, with a roofline and the parts of a step, which are measured for it.",
        ),
    ] = True
