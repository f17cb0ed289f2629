"""Options that several commands share, so that they read the same everywhere."""

from __future__ import annotations

from typing import Annotated

import typer

ModelArgument = Annotated[
    str | None,
    typer.Argument(help="A folder, a bundled model's name or a hub id. Default: stories3M."),
]
ModelOption = Annotated[str | None, typer.Option("--model", help="The same as the argument.")]
SchedulingPolicy = Annotated[
    str,
    typer.Option(
        help="Who is served first: fcfs, priority (a request's own, smaller first) or shortest-prefill.",
        rich_help_panel="Engine",
    ),
]
OverlappedLoop = Annotated[
    bool,
    typer.Option(
        "--overlapped-loop/--serial-loop",
        help="Schedule a step, and make text of the one before, while another is computed.",
        rich_help_panel="Engine",
    ),
]
EnforceEager = Annotated[
    bool,
    typer.Option(
        "--enforce-eager",
        help="Compute every step as it comes, instead of repeating captured ones.",
        rich_help_panel="Engine",
    ),
]
Lora = Annotated[
    list[str] | None,
    typer.Option(
        "--lora",
        help="NAME=FOLDER of an adapter in PEFT's form; repeatable. A server offers it as the model NAME, "
        "a benchmark gives its requests the adapters in turn.",
        rich_help_panel="Engine",
    ),
]
TensorParallelSize = Annotated[
    int,
    typer.Option(
        help="Processes that share the work of each layer, each with its share of the cores or a GPU.",
        rich_help_panel="Engine",
    ),
]
Window = Annotated[
    int | None,
    typer.Option(
        "--window",
        help="For streams beyond the model's context: a token sees this many tokens, itself included.",
        rich_help_panel="Engine",
    ),
]
AttentionSinks = Annotated[
    int,
    typer.Option(
        "--attention-sinks",
        help="With --window: the first tokens, which stay in sight. 4 keep a stream's quality.",
        rich_help_panel="Engine",
    ),
]
KvCacheDtype = Annotated[
    str,
    typer.Option(
        help="How keys and values are stored: auto (as --dtype), bfloat16, float32, fp8 or int8.",
        rich_help_panel="Engine",
    ),
]
GpuMemoryUtilization = Annotated[
    float | None,
    typer.Option(
        help="Share of a CUDA device's memory for weights, steps and KV cache together. Default: 0.9.",
        rich_help_panel="Engine",
    ),
]
SwapSpace = Annotated[
    str | None,
    typer.Option(
        help="Host memory, such as 4GiB, in which preempted sequences keep what they had computed. "
        "Without it they compute it again.",
        rich_help_panel="Engine",
    ),
]
CpuActivations = Annotated[
    int,
    typer.Option(
        help="Bits of what quantized weights are multiplied with on a CPU, 8 or 16.",
        rich_help_panel="Engine",
    ),
]
