"""The simulated load of a plan as a rich table."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich import box
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from ...engine.planner.load import PlannedLoad, Quantiles
    from ...engine.planner.memory import Deployment
    from ...engine.planner.plan import DeploymentPlan, DevicePlan


def loads_table(plan: DeploymentPlan, wide: bool) -> Table:
    """The load on each device: the one asked for, or the highest within the SLO."""
    asked = plan.workload.load
    assert asked is not None
    by_rate = asked.load.rate is not None if asked.slo is None else asked.slo.by == "rate"
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("GPU", no_wrap=True)
    names = ["GPUs", "requests\n/s" if by_rate else "clients", "TTFT ms\np50 / p99"]
    names += ["TPOT ms\np50 / p99", "output\ntok/s"]
    priced = any(device.dollars_per_million is not None for device in plan.devices)
    names += ["$\n/M tokens"] if priced else ["GPU hours\n/M tokens"]
    names += ["E2E s\np50 / p99", "preemptions"] if wide else []
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    for device in plan.devices:
        cells = _cells(device, priced, by_rate)
        kept = device.load is not None and device.load.keeps_slo
        table.add_row(*cells[: 1 + len(names)], style=None if kept else "dim")
    table.caption, table.caption_justify = Text(_caption(asked), style="dim"), "left"
    return table


def _cells(device: DevicePlan, priced: bool, by_rate: bool) -> list[str]:
    if (load := device.load) is None:
        return [device.gpu, "-"]
    result, value = load.result, load.load.rate if by_rate else load.load.concurrency
    amount = f"{value:,}" if isinstance(value, int) else f"{value:.4g}"
    cost = device.dollars_per_million if priced else load.gpu_hours_per_million
    return [
        device.gpu,
        sizes(load.deployment),
        amount if load.keeps_slo else f"< {amount}",
        _pair(result.ttft, 1e3),
        _pair(result.tpot, 1e3),
        rate(result.output_tokens_per_second),
        "-" if cost is None else f"{cost:.3g}",
        _pair(result.e2e, 1),
        str(result.preemptions),
    ]


def _caption(asked: PlannedLoad) -> str:
    prompt, output = asked.load.mean_lengths()
    caption = f"Simulated: requests of {prompt:,.0f} + {output:,.0f} tokens"
    if asked.dataset is not None:
        caption += f" in the mean, the lengths of {asked.dataset}"
    if asked.slo is not None:
        limits = " ".join(f"{name}:{limit:.12g}ms" for name, limit in asked.slo.limits_ms.items())
        caption += (
            f"; the highest load of which {asked.slo.share:.0%} of the requests keep {limits}"
        )
    return caption + ". Output tokens pay for their prompts."


def _pair(values: Quantiles, scale: float) -> str:
    shown = (scale * values.p50, scale * values.p99)
    return " / ".join(f"{value:,.0f}" if value >= 100 else f"{value:.3g}" for value in shown)


def rate(speed: float | None) -> str:
    """Tokens per second."""
    return "-" if speed is None else f"{speed:,.0f}"


def sizes(deployment: Deployment) -> str:
    """Devices, and how they are divided."""
    names = {"tp": deployment.tp, "pp": deployment.pp, "ep": deployment.ep}
    names["dp"] = deployment.attention_dp
    parts = [f"{name}{size}" for name, size in names.items() if size > 1]
    return f"{deployment.gpus} {' '.join(parts)}" if deployment.gpus > 1 else "1"
