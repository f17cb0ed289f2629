"""Report of a capacity plan (memory, context against concurrency, roofline); residuals of a run from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from math import isfinite
from statistics import fmean
from typing import TYPE_CHECKING, Any

from ...engine.base.units import format_gib, format_tokens
from ...engine.planner.cache_size import OF_ENGINE
from ...engine.planner.explain import explain
from ...engine.planner.own_runs import OwnRow
from ...engine.planner.plan import DeploymentPlan, DevicePlan
from ...engine.planner.plan_json import WrittenPlan
from ...engine.planner.speed import attainable_flops
from ..metrics.trace import LoadPass, RequestTrace
from ..page.page import Figure, ReportVerdict, drawn, page_of, to_html
from ..page.plot_style import BASE, GRID, INK, MUTED, NEW, SERIES, canvas, label, title, to_svg

if TYPE_CHECKING:
    from ...engine.core.engine import Engine


GIB = 2**30
MAX_CURVES = 6
COMPONENTS = ("weights", "working memory", "KV in use", "KV room")


def plan_page(plan: DeploymentPlan) -> str:
    """The page as one self-contained HTML text."""
    timed = [device for device in plan.devices if device.decode and device.prefill]
    svgs = {"memory": _memory_svg(plan.devices), "sequences": _sequences_svg(plan)}
    captions = {
        "memory": "Memory of one GPU, of what a process sees.",
        "sequences": "How many sequences fit at once, by their length; the cross is the requested workload.",
    }
    if timed:
        svgs["roofline"] = _roofline_svg(timed[0])
        svgs["times"] = _times_svg(timed)
        captions["times"] = (
            "Means under that load. Whiskers: 90 % of the measured deployments most like it, which nothing "
            "was fitted to; dashed: no measurement near it. On a measured machine: as its own rows left it."
        )
        captions["roofline"] = (
            f"{timed[0].gpu}: data-sheet ceilings, and the prediction for each phase."
        )
    page = page_of(
        "report/plan.jinja",
        plan=plan,
        first=plan.first_that_fits,
        verdict=_verdict(plan, plan.first_that_fits),
        figures={name: Figure(name, svg, captions[name]) for name, svg in svgs.items()},
        formulas=explain(plan),
        gib=format_gib,
        tokens=format_tokens,
    )
    return to_html(page)


def _verdict(plan: DeploymentPlan, first: DevicePlan) -> ReportVerdict:
    where = _name(first)
    limit = f"the {first.binding_constraint.replace('_', ' ').replace('kv', 'KV')}"
    more = first.relaxations[0] if first.relaxations else None
    hint = f" {more.change} would bring {more.gained_sequences} more." if more else ""
    if first.fits:
        count = f"{first.max_concurrent_sequences} sequences of {plan.workload.context:,} tokens"
        return ReportVerdict(
            "good", f"Fits on {where}.", f"{count} at once; the limit is {limit}.{hint}"
        )
    return ReportVerdict("bad", f"Does not fit on {where}.", f"The limit is {limit}.{hint}")


def _name(device: DevicePlan) -> str:
    return f"{device.deployment.gpus} x {device.gpu}"


@drawn
def _memory_svg(devices: Sequence[DevicePlan]) -> str:
    figure, (axis,) = canvas(width=9, height=0.9 + 0.42 * len(devices))
    names = list(map(_name, devices))
    places = range(len(devices))
    left = [0.0] * len(devices)
    parts = []
    for device in devices:
        used = min(device.kv_bytes, device.kv_budget_bytes)
        work = device.activation_bytes + device.overhead_bytes
        components = (device.weight_bytes, work, used, device.kv_budget_bytes - used)
        parts.append([num_bytes / GIB for num_bytes in components])
    parts = zip(*parts, strict=True)
    for name, sizes, colour in zip(COMPONENTS, parts, (*SERIES[:3], GRID), strict=True):
        axis.barh(places, sizes, left=left, color=colour, label=name, height=0.6)
        left = [start + size for start, size in zip(left, sizes, strict=True)]
    for row, device in zip(places, devices, strict=True):
        total = device.device.memory_bytes / GIB
        axis.plot([total, total], [row - 0.38, row + 0.38], color=INK, linewidth=1.6)
    axis.set_yticks(list(places), names)
    axis.invert_yaxis()
    axis.grid(axis="y", visible=False)
    axis.set_xlabel("GiB")
    figure.legend(
        *axis.get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False
    )
    return to_svg(figure, "Memory by component: " + ", ".join(names))


@drawn
def _sequences_svg(plan: DeploymentPlan) -> str:
    figure, (axis,) = canvas(width=9, height=3.4)
    limit = max(plan.model.shape.max_context, plan.workload.context)
    contexts = [limit // 2**power for power in range(10, -1, -1) if limit // 2**power >= 1]
    for device, colour in zip(plan.devices[:MAX_CURVES], SERIES, strict=False):
        fitting = [
            device.deployment.max_sequences(device.device.memory_bytes, device.reserve, context)
            for context in contexts
        ]
        points = [(c, n) for c, n in zip(contexts, fitting, strict=True) if n > 0]
        if points:
            style = {"color": colour, "marker": "o", "markersize": 3, "label": _name(device)}
            axis.plot(*zip(*points, strict=True), **style)
    axis.plot([plan.workload.context], [plan.workload.sequences], "x", color=INK, markersize=9)
    axis.set_xscale("log", base=2)
    axis.set_yscale("log", base=2)
    axis.set_xticks(contexts, [format_tokens(context) for context in contexts], fontsize=8)
    axis.yaxis.set_major_formatter(lambda count, _: f"{count:,.0f}" if count >= 1 else "")
    axis.set(xlabel="tokens of each sequence", ylabel="sequences at once")
    if axis.get_legend_handles_labels()[1]:
        axis.legend(frameon=False, fontsize=8.5)
    return to_svg(figure, "Context against concurrency")


@drawn
def _times_svg(devices: Sequence[DevicePlan]) -> str:
    """Bars of the expected times; whiskers are the bands of measured times."""
    loaded = [(device, device.predicted) for device in devices if device.predicted is not None]
    figure, axes = canvas(2, width=9, height=0.9 + 0.42 * len(loaded), sharey=True)
    for axis, quantity, colour in zip(axes, ("tpot", "ttft"), SERIES, strict=False):
        for row, (_, means) in enumerate(loaded):
            value = 1e3 * getattr(means, f"{quantity}_seconds")
            if not isfinite(value):
                continue
            axis.barh([row], [value], color=colour, height=0.6)
            if means.band is not None:
                low, high = getattr(means.band, quantity)
                dashed = "-" if means.band.is_near else "--"
                axis.plot([low * value, high * value], [row] * 2, dashed, color=INK, marker="|")
        axis.set_xlabel(f"{quantity.upper()}, ms")
        axis.grid(axis="y", visible=False)
    axes[0].set_yticks(range(len(loaded)), [_name(device) for device, _ in loaded])
    axes[0].invert_yaxis()
    return to_svg(figure, "Expected TPOT and TTFT under load, with the error of such plans")


@drawn
def _roofline_svg(device: DevicePlan) -> str:
    figure, (axis,) = canvas(width=9, height=3.6)
    hardware, recipe = device.device, device.deployment.recipe
    peak = hardware.peak_flops(recipe.bits, recipe.name)
    assert hardware.bandwidth and peak and device.decode and device.prefill
    made = device.deployment
    points = {"decode": (device.decode, BASE), "prefill": (device.prefill, NEW)}
    places = {
        name: (time.flops / made.tp / time.num_bytes, time.flops / made.gpus / time.seconds, colour)
        for name, (time, colour) in points.items()
    }
    ridge = peak / hardware.bandwidth
    low = min(ridge, *(x for x, _, _ in places.values())) / 4
    high = max(ridge, *(x for x, _, _ in places.values())) * 4
    roof = [low, ridge, high]
    axis.plot(roof, [attainable_flops(x, peak, hardware.bandwidth) for x in roof], color=INK)
    for name, (x, y, colour) in places.items():
        axis.plot([x], [y], "o", color=colour, markersize=8, label=name)
        bound = attainable_flops(x, peak, hardware.bandwidth)
        axis.plot([x, x], [y, bound], ":", color=colour)
    label(axis, f"ridge {ridge:.0f} FLOP/B", (ridge, peak), (6, -14), fontsize=8.5, color=MUTED)
    axis.set(xscale="log", yscale="log")
    axis.set(xlabel="FLOP per byte (model bytes)", ylabel="FLOP/s of one GPU")
    axis.legend(frameon=False, loc="lower right")
    title(axis, f"{device.gpu}, {recipe.label}")
    return to_svg(figure, f"Roofline of {device.gpu}: prefill and decode")


def residuals(
    plan: WrittenPlan,
    engine: Engine,
    passes: Sequence[LoadPass],
    metrics: Mapping[str, Any],
    clients: int | None,
) -> dict[str, Any]:
    """`llmopt.plan` of a result: a row per quantity, the settings that differ from the plan, and the run as a
    row of this machine for `kv-plan --measured` (None unless `clients` sent a closed loop).

    `metrics` are the distributions of the run, in milliseconds. Times are predicted again for its mean prompt
    and for the mean batch and context of its decode steps, so that a residual reflects the machine model and
    not a different load. A first token that waited for other prompts shows as a residual: the prediction is
    for an idle engine.
    """
    traces = [trace for load_pass in passes for trace in load_pass.traces if trace.success]
    steps = [step for load_pass in passes for step in load_pass.steps if step.decode_only]
    times = None
    prompt = batch = context = 0
    if traces and steps:
        prompt = max(1, round(fmean(trace.prompt_len for trace in traces)))
        batch = max(1, round(fmean(step.num_sequences for step in steps)))
        context = round(fmean(step.context_tokens / step.num_sequences for step in steps))
        times = plan.times(prompt, context, batch)
    ttft, tpot = times or (None, None)
    config, loaded = engine.scheduler.config, engine.memory.weight_bytes
    planned, is_plain = plan.held_weight_bytes, plan.model.as_stored().bits >= 16
    layouts = "" if loaded == planned or is_plain else "kernels keep layouts of their own"
    tokens = engine.stats.kv_blocks_total * config.block_size
    load = f"a prompt of {prompt} tokens"
    step = f"{batch} sequences of {context} tokens"
    return {
        "file": str(plan.path),
        "rows": [
            _row("weights in the checkpoint", "bytes", plan.weight_bytes, plan.model.stored_bytes),
            _row("weights in memory", "bytes", planned, loaded, layouts),
            _row("KV cache", "tokens", plan.kv_tokens, tokens),
            _row("TTFT", "ms", ttft and 1e3 * ttft, metrics["ttft"].get("median"), load),
            _row("TPOT", "ms", tpot and 1e3 * tpot, metrics["tpot"].get("median"), step),
        ],
        "differs": _differences(plan, engine),
        "row": None if clients is None else _own_row(plan, engine, traces, metrics, clients),
    }


def _own_row(
    plan: WrittenPlan,
    engine: Engine,
    traces: Sequence[RequestTrace],
    metrics: Mapping[str, Any],
    clients: int,
) -> dict[str, Any] | None:
    """The run as `OwnRow`; None without times, or on another kind of device than the planned one."""
    on_cpu, model = engine.device.type == "cpu", plan.model
    ttft, tpot = (metrics[name].get("mean") for name in ("ttft", "tpot"))
    if not ttft or not tpot or on_cpu != (plan.values.get("gpu_kind") == "cpu"):
        return None
    prompt, output = (
        max(1, round(fmean(getattr(trace, name) for trace in traces)))
        for name in ("prompt_len", "output_len")
    )
    config = engine.scheduler.config
    capacity = engine.stats.kv_blocks_total * config.block_size // (prompt + output)
    return asdict(
        OwnRow(
            model=plan.values["model"],
            path=model.source,
            weights=model.as_stored().label,
            gpu=plan.values["gpu"],
            engine="llmopt",
            kv_bytes_per_element=plan.values["kv_bytes_per_element"],
            block_size=config.block_size,
            prompt_tokens=prompt,
            output_tokens=output,
            clients=clients,
            resident=max(1, min(config.max_num_seqs, capacity)),
            ttft_ms=ttft,
            tpot_ms=tpot,
        )
    )


def _row(
    quantity: str, unit: str, predicted: float | None, measured: float | None, load: str = ""
) -> dict[str, Any]:
    residual = measured / predicted - 1 if predicted and measured is not None else None
    row = {"quantity": quantity, "unit": unit, "predicted": predicted, "measured": measured}
    return {**row, "residual": residual, "load": load}


def _differences(plan: WrittenPlan, engine: Engine) -> list[str]:
    """Settings of the run that differ from the plan, each with the option that changes it."""
    values, config = plan.values, engine.scheduler.config
    dtype = OF_ENGINE[engine.stats.kv_dtype]
    pairs = (
        ("tokens of a block", values["block_size"], config.block_size, "--block-size"),
        ("tokens of a sequence", values["context"], config.max_model_len, "--max-model-len"),
        ("type of the KV cache", values["kv_dtype"], dtype, "--kv-cache-dtype"),
    )
    return [
        f"{what}: {planned} in the plan, {actual} here ({option})"
        for what, planned, actual, option in pairs
        if planned != actual
    ]
