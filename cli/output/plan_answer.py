"""Lines of the answers that a plan begins with (fit, users, speed, cost, what would be cheaper, the limit),
and the table of its simulated load.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import isfinite
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from ...engine.base.units import format_gib, format_tokens
from .console import facts_table, table_of

if TYPE_CHECKING:
    from ...engine.planner.answer import Answer, FormatSpeed
    from ...engine.planner.load import Load, PlannedLoad, Quantiles
    from ...engine.planner.load_plan import LoadPlan
    from ...engine.planner.memory import Deployment
    from ...engine.planner.plan import DeploymentPlan, DevicePlan

NARROW: dict[str, Any] = {"padding": (0, 1, 0, 0), "pad_edge": False}
SMALL_GPU_BYTES = 50 * 2**30
"""Memory below which a GPU is one that people own, and for which weights in RAM are worth a word."""

FLEETS = 4
"""Kinds of GPU that are named for a rate."""


def answer_lines(plan: DeploymentPlan, answer: Answer) -> Table:
    device, planned_load = answer.device, plan.workload.load
    load = f"with {plan.workload.sequences:,} clients"
    if planned_load is not None and planned_load.slo is not None:
        load = "within the limits"
    elif plan.workload.sequences <= 1:
        load = "with all places taken"
    cheaper = (
        f"{saving.options}: {saving.saved:.0%} less {load}, on {saving.gpus} x {saving.gpu}"
        + ("" if saving.is_near_measured else " (no measurement near it)")
        for saving in answer.savings
    )
    limit = device.binding_constraint.replace("_", " ")
    if device.decode is not None:
        limit += f"; decode is bound by {device.decode.bound}"
    if device.relaxations:
        more = device.relaxations[0]
        limit += f"; {more.change} brings {counted(more.gained_sequences, 'sequence')} more"
    answers = {
        "fleet": _fleet(plan),
        "fits": _fit(plan, answer),
        "start": _start(plan, answer),
        "users": _users(plan, answer),
        "speed": _speed(plan, answer),
        "cost": _cost(plan, answer),
        "formats": format_lines(answer.formats),
        "cheaper": cheaper,
        "limit": [limit],
    }
    lines = {question: "\n".join(text) for question, text in answers.items()}
    shown = ((question, Text(text)) for question, text in lines.items() if text)
    return facts_table(shown, "bold green" if device.fits else "bold red")


def counted(count: int, what: str) -> str:
    """`1 client`, `2 clients`."""
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def _fit(plan: DeploymentPlan, answer: Answer) -> Iterator[str]:
    device, work = answer.device, plan.workload
    where = f"{device.deployment.gpus} x {device.gpu}"
    what = f"{counted(work.sequences, 'sequence')} of {format_tokens(work.context)} tokens"
    if work.output_tokens is None and (work.load is None or work.load.dataset is None):
        prompt, answer_length = map(format_tokens, (work.prompt_tokens, work.answer_tokens))
        what += f" (prompt {prompt}, answer {answer_length})"
    line = f"{'yes' if device.fits else 'no'}: {what} in {device.engine} on {where}"
    if not device.fits and device.predicted is not None:
        places = device.max_concurrent_sequences
        line = f"not at once: {places:,} of {what} in {device.engine} on {where}; others wait"
    if (offload := device.deployment.offload) is not None:
        sizes = map(format_gib, (offload.weight_bytes, offload.host.ram_bytes))
        line += "; {} of the weights in {} of RAM".format(*sizes)
        line += "" if device.fits else ", and more is needed"
    if (second := device.beside) is not None and second.fits != device.fits:
        line += f"; in {second.engine} {'yes' if second.fits else 'no'}"
    yield line
    for change in answer.would_fit:
        fits, options = "also fits" if device.fits else "would fit", " ".join(change.options)
        yield f"{fits} {change.gpus} x {change.gpu}: {options}  ({change.sequences:,} at once)"
    hardware = device.device
    is_small = hardware.memory_bytes < SMALL_GPU_BYTES and not hardware.is_single
    if is_small and (device.deployment.gpus > 1 or not device.fits) and plan.setup.host is None:
        yield f"--ram 64GB plans one {device.gpu} with weights in RAM"


def _fleet(plan: DeploymentPlan) -> Iterator[str]:
    """The fewest GPUs for the rate that is asked for, and other kinds of GPU."""
    if not plan.fleets or plan.workload.load is None:
        return
    best = plan.fleets[0]
    share = plan.workload.load.load.rate or 0.0
    for fleet in plan.fleets[:FLEETS]:
        replica = f"{counted(fleet.replicas, 'replica')} of {sizes(fleet.deployment)}"
        price = fleet.dollars_per_hour
        line = f"{fleet.gpus:,} x {fleet.device.name}: {replica}"
        line += "" if price is None else f", ${price:,.4g} an hour"
        if fleet is best:
            line += f"; each takes {share:.3g} requests/s"
        yield line + ("" if fleet.simulated else " (estimated)")


def _start(plan: DeploymentPlan, answer: Answer) -> Iterator[str]:
    """The command that starts an engine with weights in RAM."""
    device, work = answer.device, plan.workload
    if device.fits and (offload := device.deployment.offload) is not None:
        yield offload.command(work.context, work.sequences, work.kv_dtype)


def _users(plan: DeploymentPlan, answer: Answer) -> Iterator[str]:
    device, planned_load = answer.device, plan.workload.load
    if planned_load is not None and planned_load.slo is not None and device.load is not None:
        by_rate, load = planned_load.slo.by == "rate", answer.users
        where = f"{sizes(device.load.deployment)} x {device.gpu}"
        result = "no load keeps"
        if load is not None:
            result = (
                f"{load:.4g} requests/s keep" if by_rate else f"{counted(int(load), 'client')} keep"
            )
        yield f"{result} {planned_load.slo.text} on {where}"
        if answer.requested is not None:
            yield _requested(*answer.requested)
        return
    if (full := answer.full) is not None:
        yield (
            f"{full.clients:,} at once, then TTFT {full.state.ttft_seconds:.3g} s, TPOT "
            f'{1e3 * full.state.tpot_seconds:.3g} ms; --slo "ttft:2s tpot:50ms" finds how many keep that'
        )
    elif device.fits and not plan.fleets:
        yield f"{device.max_concurrent_sequences:,} at once"


def _requested(plan: LoadPlan, share: float) -> str:
    """The load that was asked for, next to the highest one."""
    means, load = plan.predicted, plan.load
    if plan.queue_growth:
        return f"{_senders(load)} are more than it serves"
    ttft, tpot = plan.result.ttft, plan.result.tpot
    return (
        f"{_senders(load)}: TTFT {means.ttft_seconds:.3g} s (p99 {ttft.p99:.3g}), TPOT "
        f"{1e3 * means.tpot_seconds:.3g} ms (p99 {1e3 * tpot.p99:.3g}); {share:.0%} of their requests keep "
        "the limits"
    )


def _senders(load: Load) -> str:
    return f"{load.rate:.4g} requests/s" if load.rate else counted(load.concurrency or 0, "client")


def format_lines(speeds: Sequence[FormatSpeed]) -> Iterator[str]:
    """The weight formats by their speed at this load, and with all places taken."""
    if len(speeds) < 2:
        return
    with_few = ", ".join(f"{speed.weights} {rate(speed.tokens_per_second)}" for speed in speeds)
    yield f"with {counted(speeds[0].clients, 'client')}: {with_few} tokens/s"
    if all(speed.places == speed.clients for speed in speeds):
        return
    with_all = ", ".join(
        f"{speed.weights} {rate(speed.tokens_per_second_full)} ({counted(speed.places, 'place')})"
        for speed in sorted(speeds, key=lambda speed: -speed.tokens_per_second_full)
    )
    yield f"with all places taken: {with_all}"


def _speed(plan: DeploymentPlan, answer: Answer) -> Iterator[str]:
    device = answer.device
    if (predicted := device.predicted) is None:
        return
    load = counted(plan.workload.sequences, "client")
    if (planned := device.load) is not None:
        load = _senders(planned.load)
        if planned.queue_growth:
            yield (
                f"{load} are not kept: {planned.result.requests_per_second:.3g} are served, and the queue "
                f"grows by {planned.queue_growth:.3g} each second"
            )
    ttft = f"{predicted.ttft_seconds:.3g} s" if isfinite(predicted.ttft_seconds) else "without end"
    yield (
        f"TTFT {ttft}, TPOT {1e3 * predicted.tpot_seconds:.3g} ms, {rate(predicted.throughput)} tokens/s "
        f"with {load}"
    )
    if predicted.band is not None:
        yield predicted.band.words
    elif device.deployment.offload is not None:
        yield f"not compared with measurements: none of {device.engine} with weights in RAM is known"


def _cost(plan: DeploymentPlan, answer: Answer) -> Iterator[str]:
    device, full = answer.device, answer.full
    if device.price is None or (dollars := device.dollars_per_million) is None:
        return
    line = f"${dollars:,.3g} per million output tokens with their prompts"
    if full is not None and full.dollars_per_million is not None:
        line += f", ${full.dollars_per_million:,.3g} with all {full.clients:,} at once"
    busy = plan.setup.duty_cycle
    yield f"{line}, at {device.price.words}" + (f", {busy:.0%} busy" if busy < 1 else "")


def loads_table(plan: DeploymentPlan, wide: bool) -> Table:
    """The load on each device: the one asked for, or the highest within the SLO."""
    load = plan.workload.load
    assert load is not None
    by_rate = load.load.rate is not None if load.slo is None else load.slo.by == "rate"
    names = ["GPU", "GPUs", "requests\n/s" if by_rate else "clients", "TTFT ms\np50 / p99"]
    names += ["TPOT ms\np50 / p99", "output\ntok/s"]
    priced = any(device.dollars_per_million is not None for device in plan.devices)
    names += ["$\n/M tokens"] if priced else ["GPU hours\n/M tokens"]
    names += ["E2E s\np50 / p99", "preemptions"] if wide else []
    table = table_of(names, no_wrap=range(9), **NARROW)
    for device in plan.devices:
        kept = device.load is not None and device.load.keeps_slo
        cells = _cells(device, priced, by_rate)[: len(names)]
        table.add_row(*cells, style=None if kept else "dim")
    table.caption, table.caption_justify = Text(_caption(load), style="dim"), "left"
    return table


def _cells(device: DevicePlan, priced: bool, by_rate: bool) -> list[str]:
    if (load := device.load) is None:
        return [device.gpu, "-"]
    result, value = load.result, load.load.rate if by_rate else load.load.concurrency
    waiting = "without end" if load.queue_growth else None
    amount = f"{value:,}" if isinstance(value, int) else f"{value:.4g}"
    cost = device.dollars_per_million if priced else load.gpu_hours_per_million
    return [
        device.gpu,
        sizes(load.deployment),
        amount if load.keeps_slo else f"< {amount}",
        waiting or _pair(result.ttft, 1e3),
        _pair(result.tpot, 1e3),
        rate(result.output_tokens_per_second),
        "-" if cost is None else f"{cost:.3g}",
        waiting or _pair(result.e2e, 1),
        str(result.preemptions),
    ]


def _caption(load: PlannedLoad) -> str:
    prompt, output = load.load.mean_lengths()
    caption = f"Simulated: requests of {prompt:,.0f} + {output:,.0f} tokens"
    if load.dataset is not None:
        caption += f" in the mean, the lengths of {load.dataset}"
    if load.slo is not None:
        caption += (
            f"; the highest load of which {load.slo.share:.0%} of the requests keep {load.slo.text}"
        )
    return caption + ". Output tokens pay for their prompts."


def _pair(values: Quantiles, scale: float) -> str:
    shown = (scale * values.p50, scale * values.p99)
    return " / ".join(f"{value:,.0f}" if value >= 100 else f"{value:.3g}" for value in shown)


def rate(speed: float | None) -> str:
    return "-" if speed is None else f"{speed:,.0f}"


def sizes(deployment: Deployment) -> str:
    """Devices, and how they are divided."""
    names = {"tp": deployment.tp, "pp": deployment.pp, "ep": deployment.ep}
    names["dp"] = deployment.attention_dp
    parts = [f"{name}{size}" for name, size in names.items() if size > 1]
    return f"{deployment.gpus} {' '.join(parts)}" if deployment.gpus > 1 else "1"
