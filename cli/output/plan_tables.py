"""A plan as rich tables: facts, devices with their memory, engines side by side, formulas."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ...engine.base.units import format_gib, format_tokens
from ...engine.planner.cache_size import kv_dtype
from ...engine.planner.explain import explain, kv_line
from ...engine.planner.probed_shape import ProbedShape
from ...engine.planner.weights import weight_bytes
from .console import emit_json, facts_table, table_of
from .plan_answer import NARROW, answer_lines, counted, loads_table, rate

if TYPE_CHECKING:
    from ...engine.planner.answer import Answer
    from ...engine.planner.load import ImageLoad
    from ...engine.planner.plan import DeploymentPlan, DevicePlan
    from ...quant.families.shapes import ModelShape

WIDE = 110
BAR_CELLS = 24
# Segments of the memory bar: character, colour, meaning.
BAR = (
    ("█", "blue", "weights"),
    ("▓", "magenta", "working memory"),
    ("▒", "green", "KV in use"),
    ("░", "cyan", "free KV"),
    ("·", "dim", "reserved"),
)


def show_plan(plan: DeploymentPlan, answer: Answer, console: Console) -> None:
    console.print(answer_lines(plan, answer))
    console.print(_facts(plan))
    console.print(_devices(plan, wide=console.width >= WIDE))
    console.print(_memory(plan))
    if plan.workload.load is not None:
        console.print(loads_table(plan, wide=console.width >= WIDE))
    for line in (*_speculation(plan), *_costs(plan)):
        console.print(Text(line))
    console.print(Text("\n".join(_notes(plan)), style="dim"))


def _image_lines(load: ImageLoad, seconds: float | None, gpu: str) -> list[str]:
    """Tokens of a prompt's images, and memory and time of their encoder."""
    lines = [
        f"{load.num_tokens:,} tokens  ({load.count} of {load.width}x{load.height}: "
        f"{load.tokens.num_tokens:,} each, {load.tokens.formula})",
        f"encoder: {format_gib(load.weight_bytes)} weights, {format_gib(load.activation_bytes)} "
        f"activations, {format_gib(load.embedding_bytes)} embeddings",
    ]
    if seconds is not None:
        lines.append(f"{1e3 * seconds:,.4g} ms to encode them on {gpu}, before the prefill")
    return lines


def show_names(console: Console, *, as_json: bool) -> None:
    """Print the names of the table's models, and its devices."""
    from ...engine.planner.catalog import aliases, model_names
    from ...engine.planner.devices import devices

    models, short = sorted(model_names()), aliases()
    if as_json:
        emit_json({"models": models, "aliases": short, "gpus": [d.name for d in devices()]})
        return
    aliased = ", ".join(f"{name} ({means})" for name, means in short.items())
    gpus = ", ".join(device.name for device in devices())
    facts = (("models", ", ".join(models)), ("short names", aliased), ("GPUs", gpus))
    console.print(facts_table(facts))


def show_engines(answer: dict[str, Any], console: Console) -> None:
    """Print the KV cache of each engine for the same workload."""
    header = ("engine", "KV cache", f"seqs on\n{answer['gpu']}", "its rule")
    table = table_of(header, left=(0, 3), no_wrap=range(3), **NARROW)
    for name, engine in answer["engines"].items():
        stored = "" if engine["stores_kv_dtype"] else f" (does not store {answer['kv_dtype']})"
        sequences = str(engine["max_concurrent_sequences"])
        table.add_row(
            name, format_gib(engine["kv_bytes"]), sequences, Text(engine["rule"] + stored)
        )
    console.print(table)


def show_explanation(plan: DeploymentPlan, console: Console) -> None:
    for formula in explain(plan):
        console.print(Text(formula.name, style="bold"))
        console.print(Text(f"  = {formula.formula}\n  = {formula.numbers}"))
        console.print(Text(f"  = {formula.result}", style="green"))


def _facts(plan: DeploymentPlan) -> Table:
    model, shape, work = plan.model, plan.model.shape, plan.workload
    element = kv_dtype(work.kv_dtype).bytes_per_element(shape)
    first = plan.devices[0]
    kv_of_one = _kv_of_one(plan, first)
    parameters = f"{shape.num_parameters:,}"
    if shape.experts:
        parameters += f", of them {shape.num_active_parameters:,} active"
    table = facts_table(())

    def row(name: str, *lines: str) -> None:
        table.add_row(name, Text("\n".join(lines)))

    row("model", model.name, *([model.note] if model.note else []))
    row("read from", model.source)
    if isinstance(shape, ProbedShape):
        row("sizes", f"{model.how}: parameters and cache as its module has them")
    row("shape", _shape_line(shape))
    parts = ", ".join(f"{part} {size:,}" for part, size in model.parts.items())
    row("parameters", parameters, *([parts] if [*model.parts] != ["text"] else []))
    total_bytes, weights = _weights(plan)
    row("weights", *weights)
    row(
        "KV per token",
        f"{format_gib(shape.kv_bytes_per_token(element))}  ({kv_line(shape, element)})",
    )
    if shape.state_bytes:
        row("state per sequence", f"{format_gib(shape.state_bytes)}  (whatever its length)")
    second = first.beside
    sizes = f"{format_gib(kv_of_one)} in {plan.setup.engine}"
    if second is not None:
        other = _kv_of_one(plan, second)
        sizes += (
            f" and {second.engine}"
            if other == kv_of_one
            else f", {format_gib(other)} in {second.engine}"
        )
    row(
        "KV and state of one" if shape.state_bytes else "KV per sequence",
        f"{sizes}  ({format_tokens(work.context)} tokens, {work.kv_dtype})",
    )
    least = shape.kv_bytes(work.context, element)
    if least < 0.95 * kv_of_one:
        row("", f"{format_gib(least)} if only the attention window were kept")
    if (evicted := first.evicted) is not None:
        row(
            f"after {evicted.rule.method}",
            f"{format_gib(evicted.kv_bytes)}  ({evicted.num_slots:,} of {evicted.num_tokens:,} tokens, from "
            f"the end of the prompt on; {format_gib(evicted.prompt_kv_bytes)} until then)",
        )
        kv_of_one = evicted.kv_bytes
    if (load := work.images) is not None:
        row("images", *_image_lines(load, first.encode_seconds, first.gpu))
    if work.sequences > 1:
        row(f"KV of {work.sequences} sequences", format_gib(work.sequences * kv_of_one))
    row("weights + KV", format_gib(total_bytes + work.sequences * kv_of_one))
    return table


def _weights(plan: DeploymentPlan) -> tuple[int, list[str]]:
    """(bytes that an engine holds, lines about them)."""
    first, total_bytes = plan.devices[0], plan.weight_bytes
    run, lines = first.deployment.recipe, [f"{format_gib(total_bytes)}  ({plan.recipe.label})"]
    if run.padding is not None:
        padded = format_gib(first.weight_bytes)
        lines.append(f"{padded} on a GPU  ({first.engine} pads the experts)")
    elif run is not plan.recipe:
        total_bytes = weight_bytes(plan.model.shape, run)
        lines.append(f"{format_gib(total_bytes)} in memory  ({run.label})")
    return total_bytes, lines


def _kv_of_one(plan: DeploymentPlan, device: DevicePlan) -> int:
    """KV-cache bytes of one sequence, undivided, by the rule of the device's engine."""
    work, deployment = plan.workload, device.deployment
    element = kv_dtype(work.kv_dtype).bytes_per_element(plan.model.shape)
    knobs = deployment.knobs(device.reserve)
    return deployment.engine.kv_bytes(plan.model.shape, work.context, element, knobs)


def _shape_line(shape: ModelShape) -> str:
    heads = f"{shape.num_heads} heads x {shape.head_dim}"
    if shape.latent:
        heads += f", latent {shape.latent.kv_rank} + {shape.latent.rope_dim}"
    else:
        heads += f", {shape.num_kv_heads} KV heads"
    parts = [
        f"{shape.family}: {shape.num_layers} layers, hidden {shape.hidden_size}",
        heads,
        f"vocabulary {shape.vocab_size:,}{' (tied)' if shape.tied else ''}",
        f"context {shape.max_context:,}",
    ]
    if shape.experts:
        parts.insert(2, f"{shape.experts.per_token} of {shape.experts.count} experts")
    windowed = [window for window in shape.windows if window]
    if windowed:
        kind = "chunks of" if shape.chunked else "window"
        parts.append(f"{kind} {windowed[0]:,} on {len(windowed)} layers")
    return ", ".join(parts)


def _devices(plan: DeploymentPlan, wide: bool) -> Table:
    """A row for each device and engine; a wide terminal also shows bounds and the binding constraint."""
    header = [f"GPU\n{plan.setup.engine}", "GPUs", "weights\nGiB", "KV\nGiB", "seqs"]
    header += ["longest\ntokens", "TTFT\ns", "TPOT\nms", "measured\nTPOT"]
    if wide:
        header += ["output\ntok/s", "decode\n<= tok/s", "$\n/M tokens", "memory\nGiB"]
        header.append("one more\nneeds")
    table = table_of(header, left=(0, 13), no_wrap=range(13), **NARROW)
    for device in plan.devices:
        table.add_row(*_cells(plan, device, wide), style=None if device.fits else "dim")
        if (second := device.beside) is not None:
            cells = [f"  {second.engine}", *_cells(plan, second, wide)[1:]]
            table.add_row(*cells, style=None if second.fits else "dim")
    return table


def _cells(plan: DeploymentPlan, device: DevicePlan, wide: bool) -> list[str]:
    predicted = device.predicted
    count = str(device.deployment.tp * device.deployment.attention_dp)
    if device.deployment.pp > 1:
        count += f"x{device.deployment.pp}"
    # How far the measured TPOT of deployments like it lay from the predicted one.
    band = "-"
    if predicted is not None and predicted.band is not None:
        low, high = predicted.band.tpot
        is_near = predicted.band.is_near
        band = f"{100 * (low - 1):+.0f}..{100 * (high - 1):+.0f}%" if is_near else "unknown"
    cells = [
        device.gpu,
        count if device.fits else f"> {count}",
        f"{device.weight_bytes / 2**30:.1f}",
        f"{device.kv_budget_bytes / 2**30:.1f}",
        str(device.max_concurrent_sequences),
        format_tokens(device.max_context),
        number(predicted and predicted.ttft_seconds),
        number(predicted and 1e3 * predicted.tpot_seconds),
        band,
    ]
    if wide:
        estimated = "~" if device.device.memory_is_estimated else ""
        cells += [
            rate(device.tokens_per_second),
            rate(device.tokens_per_second_bound),
            number(device.dollars_per_million),
            f"{estimated}{device.device.memory_bytes / 2**30:.1f}",
            device.binding_constraint.replace("_", " "),
        ]
    return cells


def _memory(plan: DeploymentPlan) -> Table:
    """A memory bar per device, and the next change that would allow more sequences."""
    header = ("memory of a GPU", "limited by", "more sequences with")
    table = table_of(header, left=range(3), no_wrap=range(3), **NARROW)
    for device in plan.devices:
        first = device.relaxations[0] if device.relaxations else None
        more = f"{first.change}: +{first.gained_sequences}" if first else "-"
        table.add_row(_bar(device), device.binding_constraint.replace("_", " "), Text(more))
    legend = Text()
    for sign, colour, meaning in BAR:
        legend.append(sign, style=colour)
        legend.append(f" {meaning}  ", style="dim")
    table.caption, table.caption_justify = legend, "left"
    return table


def _bar(device: DevicePlan) -> Text:
    total = device.device.memory_bytes
    used = min(device.kv_bytes, device.kv_budget_bytes)
    work = device.activation_bytes + device.overhead_bytes
    parts = [device.weight_bytes, work, used, device.kv_budget_bytes - used]
    bar, filled, drawn = Text(), 0, 0
    for size, (sign, colour, _) in zip(parts, BAR, strict=False):
        filled += size
        cells = min(BAR_CELLS, round(BAR_CELLS * filled / total)) - drawn
        bar.append(sign * cells, style=colour)
        drawn += cells
    sign, colour, _ = BAR[-1]
    bar.append(sign * (BAR_CELLS - drawn), style=colour)
    return bar.append(f" {device.gpu}")


def _speculation(plan: DeploymentPlan) -> list[str]:
    draft = plan.setup.speculation
    if draft is None:
        return []
    return [
        f"speculation on {device.gpu}: {gain.expected_tokens:.2f} tokens per verification of "
        f"{gain.verification_steps:.2f} steps, {gain.speedup:.2f} times as fast, TPOT "
        f"{1e3 * gain.tpot_seconds:.3g} ms"
        for device in plan.devices
        if (gain := device.speculation)
    ]


def _costs(plan: DeploymentPlan) -> list[str]:
    prices, lines = plan.setup.prices, []
    for device in plan.devices:
        if prices is None or (cost := device.cost) is None:
            continue
        lines.append(
            f"cost on {device.deployment.gpus} x {device.gpu} at ${prices.gpu_hour:g} an hour, "
            f"{prices.duty_cycle:.0%} busy: ${cost.input_per_million:.3g} per million input tokens, "
            f"${cost.output_per_million:.3g} per million output tokens"
        )
        if cost.api_request is not None and cost.break_even_duty_cycle is not None:
            lines.append(
                f"  a request of {plan.workload.prompt_tokens:,} + {plan.workload.answer_tokens:,} "
                f"tokens: ${cost.request:.3g} here, ${cost.api_request:.3g} at the API; break-even at "
                f"{cost.break_even_requests_per_day:,.0f} requests a day "
                f"({cost.break_even_tokens_per_day:,.0f} tokens), a duty cycle of "
                f"{cost.break_even_duty_cycle:.0%}: {cost.cheaper} cheaper"
            )
    return lines


def _notes(plan: DeploymentPlan) -> list[str]:
    first, share = plan.devices[0], plan.efficiency
    reserve = first.reserve
    notes = ["KV budget: as given, or the share of free memory that the engine takes on a CPU."]
    if reserve.kv_cache_bytes is None:
        notes = [
            f"KV budget: {reserve.utilization:.0%} of what a process sees, less weights, activation peak "
            f"(on {first.gpu}: steps of {reserve.chunk_tokens:,} tokens, {reserve.max_num_seqs:,} "
            "sequences) and the runtime's own; per GPU."
        ]
    if any(device.decode for device in plan.devices):
        means = (
            f"means with prompts of {plan.workload.prompt_tokens:,} and answers of "
            f"{plan.workload.answer_tokens:,} tokens, under {counted(plan.workload.sequences, 'client')}"
        )
        if plan.workload.load is not None:
            means = "the means of the simulated load; under a second engine, of as many clients"
        notes.append(
            f"Speed: what to expect at {_share(share.bandwidth)} of the bandwidth and "
            f"{_share(share.compute)} of the dense peak, {share.seconds_per_layer * 1e6:.0f} µs a layer "
            f"({share.source}). TTFT and TPOT are {means}."
        )
        # The error of measured deployments like these; of a measured machine its own rows.
        gpus: dict[str, list[str]] = {}
        for device in plan.devices:
            if device.predicted is not None and (band := device.predicted.band) is not None:
                gpus.setdefault(band.words, []).append(device.gpu)
        for note, names in gpus.items():
            more = f" and {len(names) - 4} more" if names[4:] else ""
            notes.append(f"Error, {', '.join(names[:4])}{more}: {note}.")
    if any(device.device.memory_is_estimated for device in plan.devices):
        notes.append("~ what a process sees is estimated as 94 % of the label.")
    return notes


def _share(part: float) -> str:
    return f"{part:.0%}" if part >= 0.1 else f"{100 * part:.2g}%"


def number(value: float | None) -> str:
    if value is None:
        return "-"
    if value == inf:
        return "grows"
    return "<0.01" if value < 0.01 else f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
