"""`llmopt kv-plan`: will it fit, on what, how many at once, how fast."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from ..engine.planner.plan import Plan
    from ..engine.planner.shapes import ModelShape
    from ..engine.planner.speed import StepTime


def kv_plan(
    model: Annotated[
        str, typer.Option(help="A name of the bundled table, a folder, or a config.json.")
    ],
    ctx: Annotated[
        str | None,
        typer.Option(help="Tokens of each sequence: 4096, 128k, 1M. Without it: the model's most."),
    ] = None,
    gpu: Annotated[
        list[str] | None, typer.Option(help="A GPU of the table; repeatable; `all` for every one.")
    ] = None,
    gpu_memory: Annotated[
        str | None, typer.Option(help="A GPU by its memory alone: 80GiB.")
    ] = None,
    concurrency: Annotated[int, typer.Option(help="Sequences at once.")] = 1,
    weights: Annotated[
        str | None,
        typer.Option(help="bf16, fp8, int8 or int4. Without it: as the checkpoint is stored."),
    ] = None,
    group_size: Annotated[
        int | None, typer.Option(help="int4: input channels per scale. Without it: up to 128.")
    ] = None,
    kv_dtype: Annotated[str, typer.Option(help="bf16 or fp8.")] = "bf16",
    tp: Annotated[
        int | None, typer.Option(help="GPUs that share the model. Without it: as few as hold it.")
    ] = None,
    block_size: Annotated[int, typer.Option(help="Tokens of a KV block.")] = 16,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
) -> None:
    """Plan memory and speed of serving a model, from its config alone. No GPU and no network needed."""
    from ..engine.planner.catalog import find_model
    from ..engine.planner.devices import choose_devices
    from ..engine.planner.plan import Workload, make_plan
    from ..engine.planner.units import parse_bytes, parse_tokens
    from ..engine.planner.weights import recipe_for, stored_recipe
    from .output import emit_json, result_console

    planned = find_model(model)
    if weights is None and group_size is None:
        recipe = stored_recipe(planned.config)
    else:
        recipe = recipe_for(weights or "int4", planned.shape, group_size)
    context = planned.shape.max_context if ctx is None else parse_tokens(ctx)
    memory = None if gpu_memory is None else parse_bytes(gpu_memory)
    plan = make_plan(
        planned,
        recipe,
        Workload(context, concurrency, kv_dtype, block_size),
        choose_devices(gpu or [], memory),
        tp,
    )
    if as_json:
        emit_json(plan.as_dict())
    else:
        _show(plan, result_console(as_json))


def _show(plan: Plan, console: Console) -> None:
    from rich.text import Text

    console.print(_facts(plan))
    console.print(_devices(plan, wide=console.width >= 110))
    share = plan.efficiency
    reserve = plan.devices[0].reserve
    notes = [
        f"KV room: {reserve.utilization:.0%} of what a process sees, less weights, activation peak "
        f"(on {plan.devices[0].gpu}: steps of {reserve.chunk_tokens:,} tokens, "
        f"{reserve.max_num_seqs:,} sequences) and the runtime's own; per GPU.",
        f"Speed: what to expect at {share.bandwidth:.0%} of the bandwidth, {share.compute:.0%} (assumed) "
        f"of the dense peak and {share.seconds_per_layer * 1e6:.0f} µs a layer; bounds (>=) are the data "
        "sheet's. TTFT is of one whole prompt on an idle engine.",
    ]
    if any(device.memory_is_estimated for device in plan.devices):
        notes.append("~ what a process sees is estimated as 94 % of the label.")
    console.print(Text("\n".join(notes), style="dim"))


def _facts(plan: Plan) -> Table:
    from rich.table import Table
    from rich.text import Text

    from ..engine.planner.plan import KV_BYTES
    from ..engine.planner.units import format_gib, format_tokens

    model, shape, work = plan.model, plan.model.shape, plan.workload
    element = KV_BYTES[work.kv_dtype]
    full = shape.without_windows()
    paged = full.kv_bytes(work.context, element, work.block_size)
    parameters = f"{shape.num_parameters:,}"
    if shape.experts:
        parameters += f", of them {shape.num_active_parameters:,} active"
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column()

    def row(what: str, *says: str) -> None:
        table.add_row(what, Text("\n".join(says)))

    row("model", model.name, *([model.note] if model.note else []))
    row("read from", model.source)
    row("shape", _shape_line(shape))
    row("parameters", parameters)
    row("weights", f"{format_gib(plan.weight_bytes)}  ({plan.recipe.label})")
    row(
        "KV per token",
        f"{format_gib(shape.kv_bytes_per_token(element))}  ({_kv_line(shape, element)})",
    )
    row(
        "KV per sequence",
        f"{format_gib(paged)}  ({format_tokens(work.context)} tokens, blocks of {work.block_size})",
    )
    if full.windows != shape.windows:
        least = shape.kv_bytes(work.context, element)
        row("", f"{format_gib(least)} in an engine that frees what lies behind a window")
    if work.sequences > 1:
        row(f"KV of {work.sequences} sequences", format_gib(work.sequences * paged))
    row("weights + KV", format_gib(plan.weight_bytes + work.sequences * paged))
    return table


def _shape_line(shape: ModelShape) -> str:
    heads = f"{shape.num_heads} heads x {shape.head_dim}"
    if shape.latent:
        heads += f", latent {shape.latent.kv_rank} + {shape.latent.rope_dim}"
    else:
        heads += f", {shape.num_kv_heads} KV heads"
    parts = [
        f"{shape.model_type}: {shape.num_layers} layers, hidden {shape.hidden_size}",
        heads,
        f"vocabulary {shape.vocab_size:,}{' (tied)' if shape.tied else ''}",
        f"context {shape.max_context:,}",
    ]
    if shape.experts:
        parts.insert(2, f"{shape.experts.per_token} of {shape.experts.count} experts")
    windowed = [window for window in shape.windows if window is not None]
    if windowed:
        parts.append(f"window {windowed[0]:,} on {len(windowed)} layers")
    return ", ".join(parts)


def _kv_line(shape: ModelShape, element: float) -> str:
    if shape.latent:
        return f"{shape.num_layers} layers x {shape.cached_elements} latent elements x {element} B"
    return f"2 x {shape.num_layers} layers x {shape.num_kv_heads} KV heads x {shape.head_dim} x {element} B"


def _devices(plan: Plan, wide: bool) -> Table:
    """One line a device; a wide terminal also gets throughput, bounds and the binding constraint."""
    from rich import box
    from rich.table import Table

    from ..engine.planner.units import format_tokens

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("GPU", no_wrap=True)
    for name in ("memory\nGiB", "GPUs", "weights\nGiB", "KV room\nGiB", "seqs", "longest\ntokens"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("TTFT\ns", "TPOT\nms"):
        table.add_column(name, justify="right", no_wrap=True)
    if wide:
        table.add_column("output\ntok/s", justify="right")
        table.add_column("TTFT\n>= s", justify="right")
        table.add_column("TPOT\n>= ms", justify="right")
        table.add_column("one more\nneeds")
    for device in plan.devices:
        estimated = "~" if device.memory_is_estimated else ""
        cells = [
            device.gpu,
            f"{estimated}{device.memory_bytes / 2**30:.1f}",
            str(device.ranks) if device.fits else f"> {device.ranks}",
            f"{device.weight_bytes / 2**30:.1f}",
            f"{device.kv_budget_bytes / 2**30:.1f}",
            str(device.max_concurrent_sequences),
            format_tokens(device.max_context),
            _seconds(device.prefill, 1),
            _seconds(device.decode, 1e3),
        ]
        if wide:
            speed = device.tokens_per_second
            cells += [
                "-" if speed is None else f"{speed:,.0f}",
                _seconds(device.prefill_bound, 1),
                _seconds(device.decode_bound, 1e3),
                device.binding_constraint.replace("_", " "),
            ]
        table.add_row(*cells, style=None if device.fits else "dim")
    return table


def _seconds(time: StepTime | None, scale: float) -> str:
    if time is None:
        return "-"
    value = scale * time.seconds
    return "<0.01" if value < 0.01 else f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
