"""`llmopt kv-plan`: will it fit, on what, how many at once, how fast, at what price."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

MODEL, SERVED, HARDWARE, ENGINE, MONEY, OUTPUT = (
    "Model",
    "What is served",
    "Hardware",
    "Engine",
    "Speed and money",
    "Output",
)


def kv_plan(
    model: Annotated[
        str,
        typer.Option(
            help="A name of the bundled table, a folder, a config.json, or a hub id.",
            rich_help_panel=MODEL,
        ),
    ],
    weights: Annotated[
        str | None,
        typer.Option(
            help="bf16, fp8, int8, int4, gptq, nf4, mxfp4, nvfp4, q8_0 ... Without it: as stored.",
            rich_help_panel=MODEL,
        ),
    ] = None,
    group_size: Annotated[
        int | None,
        typer.Option(
            help="Input channels per scale, -1 for one scale per output channel.",
            rich_help_panel=MODEL,
        ),
    ] = None,
    symmetric: Annotated[
        bool | None,
        typer.Option(
            "--symmetric/--asymmetric", help="int4, int8: no zero points.", rich_help_panel=MODEL
        ),
    ] = None,
    file_format: Annotated[
        str | None,
        typer.Option(
            "--format", help="int4, int8: awq or compressed-tensors.", rich_help_panel=MODEL
        ),
    ] = None,
    ctx: Annotated[
        str | None,
        typer.Option(
            help="Tokens of each sequence: 4096, 128k, 1M. Without it: the model's most.",
            rich_help_panel=SERVED,
        ),
    ] = None,
    concurrency: Annotated[
        int,
        typer.Option("--concurrency", "--batch", help="Sequences at once.", rich_help_panel=SERVED),
    ] = 1,
    output_tokens: Annotated[
        int | None,
        typer.Option(
            help="Of the context, tokens of the answer. Default: a quarter.", rich_help_panel=SERVED
        ),
    ] = None,
    kv_dtype: Annotated[
        str | None,
        typer.Option(
            help="bf16, float32, fp8, fp8_per_token_head, int8, nvfp4, q8_0, q5_1 or q4_0. Default: "
            "bf16.",
            rich_help_panel=SERVED,
        ),
    ] = None,
    gpu: Annotated[
        list[str] | None,
        typer.Option(
            help="A GPU of the table; repeatable; `all` ranks every one; `cpu` is this machine.",
            rich_help_panel=HARDWARE,
        ),
    ] = None,
    gpu_memory: Annotated[
        str | None,
        typer.Option(help="A GPU by its memory alone: 80GiB.", rich_help_panel=HARDWARE),
    ] = None,
    tp: Annotated[
        int | None,
        typer.Option(
            help="GPUs that share each layer. Without it: as few as hold it.",
            rich_help_panel=HARDWARE,
        ),
    ] = None,
    pp: Annotated[
        int | None, typer.Option(help="Pipeline stages.", rich_help_panel=HARDWARE)
    ] = None,
    engine: Annotated[
        str,
        typer.Option(
            help="llmopt, vllm, llama.cpp, transformers, or all side by side.",
            rich_help_panel=ENGINE,
        ),
    ] = "llmopt",
    block_size: Annotated[
        int | None,
        typer.Option(
            help="Tokens of a KV block. Default: 16; 32 on a CPU.", rich_help_panel=ENGINE
        ),
    ] = None,
    gpu_memory_utilization: Annotated[
        float | None,
        typer.Option(help="Share of the memory to use. Default: 0.9.", rich_help_panel=ENGINE),
    ] = None,
    max_num_batched_tokens: Annotated[
        int | None, typer.Option(help="Tokens in a step.", rich_help_panel=ENGINE)
    ] = None,
    max_num_seqs: Annotated[
        int | None, typer.Option(help="Sequences in a step.", rich_help_panel=ENGINE)
    ] = None,
    kv_cache_memory: Annotated[
        str | None, typer.Option(help="Size of the KV cache: 64MiB.", rich_help_panel=ENGINE)
    ] = None,
    measured: Annotated[
        Path | None,
        typer.Option(
            help="A run of `llmopt bench`: its measured roofs and efficiencies, not a data sheet's.",
            rich_help_panel=MONEY,
        ),
    ] = None,
    draft_tokens: Annotated[
        int | None, typer.Option(help="Speculation: tokens drafted.", rich_help_panel=MONEY)
    ] = None,
    acceptance: Annotated[
        float, typer.Option(help="Speculation: share accepted.", rich_help_panel=MONEY)
    ] = 0.7,
    draft_cost: Annotated[
        float,
        typer.Option(help="Speculation: a draft's step, in steps.", rich_help_panel=MONEY),
    ] = 0.1,
    gpu_hour_price: Annotated[
        float | None, typer.Option(help="Dollars for a GPU and an hour.", rich_help_panel=MONEY)
    ] = None,
    api_price_in: Annotated[
        float | None,
        typer.Option(help="An API's dollars per million input tokens.", rich_help_panel=MONEY),
    ] = None,
    api_price_out: Annotated[
        float | None,
        typer.Option(help="An API's dollars per million output tokens.", rich_help_panel=MONEY),
    ] = None,
    duty_cycle: Annotated[
        float, typer.Option(help="Share of the day with work.", rich_help_panel=MONEY)
    ] = 1.0,
    explain: Annotated[
        bool,
        typer.Option("--explain", help="Each formula with its numbers.", rich_help_panel=OUTPUT),
    ] = False,
    out: Annotated[
        Path | None, typer.Option(help="Write the plan as JSON.", rich_help_panel=OUTPUT)
    ] = None,
    html: Annotated[
        Path | None, typer.Option(help="Write the plan as a page.", rich_help_panel=OUTPUT)
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the plan as JSON.", rich_help_panel=OUTPUT)
    ] = False,
) -> None:
    """Plan memory, speed and price of serving a model, from its config alone. No GPU and no network."""
    from ..engine.planner.plan.ask import Ask, plan_for
    from ..engine.planner.plan.plan_json import plan_as_dict
    from ..quant.base.durable import write_durably
    from ..quant.base.errors import BadInput
    from .output.console import emit_json, people, result_console
    from .output.plan_tables import show_engines, show_explanation, show_plan

    for target in (out, html):
        if target is not None and not target.parent.is_dir():
            raise BadInput(f"there is no folder {target.parent} to write {target.name} into")
    plan = plan_for(
        Ask(
            model=model,
            weights=weights,
            group_size=group_size,
            symmetric=symmetric,
            file_format=file_format,
            context=ctx,
            sequences=concurrency,
            output_tokens=output_tokens,
            kv_dtype=kv_dtype,
            gpus=tuple(gpu or ()),
            gpu_memory=gpu_memory,
            tp=tp,
            pp=pp,
            engine=engine,
            block_size=block_size,
            utilization=gpu_memory_utilization,
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_seqs=max_num_seqs,
            kv_cache_memory=kv_cache_memory,
            measured=measured,
            draft_tokens=draft_tokens,
            acceptance=acceptance,
            draft_cost=draft_cost,
            gpu_hour_price=gpu_hour_price,
            api_price_in=api_price_in,
            api_price_out=api_price_out,
            duty_cycle=duty_cycle,
        )
    )
    for warning in plan.warnings:
        people.print(f"warning: {warning}", markup=False, soft_wrap=True)
    answer = plan_as_dict(plan)
    if as_json:
        emit_json(answer)
    else:
        console = result_console(as_json)
        show_plan(plan, console)
        if engine == "all":
            show_engines(answer, console)
        if explain:
            show_explanation(plan, console)
    if out is not None:
        import json

        write_durably(out, (json.dumps(answer, indent=2) + "\n").encode())
        people.print(f"plan: {out}", markup=False, soft_wrap=True)
    if html is not None:
        from ..bench.report.plan_page import plan_page

        write_durably(html, plan_page(plan).encode())
        people.print(f"page: {html}", markup=False, soft_wrap=True)
