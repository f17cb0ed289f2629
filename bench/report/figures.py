"""Figures of runs and comparisons: latencies, timelines, roofline, depth, changes, operating curves."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import cycle
from typing import TYPE_CHECKING, Any

import numpy as np

from ...engine.base.units import parse_tokens
from ..gate.limits import GateOutcome
from ..gate.verdict import STEPS, MeasuredVerdict, OperatingCurve
from ..metrics.metrics import samples
from ..metrics.trace import LoadPass
from ..page.page import Figure, drawn
from ..page.plot_style import (
    BAD,
    DECODE,
    GOOD,
    GRID,
    INK,
    MUTED,
    PREFILL,
    SERIES,
    UNSURE,
    WAIT,
    canvas,
    log_scale,
    title,
    to_svg,
    whole_numbers,
)
from ..record.comparable import served_weight_bytes
from ..record.result import RunData
from .parts import depth_curves

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SHORT = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2el": "End to end"}
MAX_BARS = 120
NUM_BINS = 240
MAX_NAME_LETTERS = 30
"""Letters of all names that fit in one row below the bars of a panel."""
CAPTIONS = {
    "distributions": "How many of the values lie at or below a latency. ITL pools the gaps of all "
    "requests; the other three have one value per request.",
    "timeline": "First pass. Requests that wait under the concurrency limit are grey.",
    "steps": "First pass. Tokens computed by the model, prefill and decode, and below them the KV blocks "
    "held by the running sequences.",
    "turns": "Left: time to first token by turn, median and p99. Right: mean prompt tokens of a turn, of "
    "which the prefix cache gave the darker part.",
    "roofline": "Points are model bytes and model FLOP over measured time. The ceilings were measured on "
    "this machine just after the run, with the same threads.",
    "depth": "Each point is of the positions with half of that depth to all of it before them; bands are "
    "95 % intervals.",
}
SHARED_ROOFLINE = (
    "Points are model bytes and model FLOP over measured time, as shares of the run's own ceilings, "
    "measured just after it with the same threads: from 1 across on arithmetic limits."
)


@drawn
def distributions_svg(values: Mapping[str, Mapping[str, np.ndarray]]) -> str:
    """Empirical distribution functions of TTFT, TPOT, ITL and end-to-end latency. `values` is {series name:
    {metric: milliseconds}}; several series share the axes."""
    figure, axes = canvas(4, width=11, height=2.9, sharey=True)
    for axis, (metric, name_of) in zip(axes, SHORT.items(), strict=True):
        for (name, sample), colour in zip(values.items(), cycle(SERIES), strict=False):
            ordered = np.sort(sample[metric])
            if len(ordered) == 0:
                continue
            share = np.arange(1, len(ordered) + 1) / len(ordered)
            axis.step(ordered, share, where="post", color=colour, label=name, linewidth=1.8)
            if len(values) == 1:
                marks = []
                for percentile, line in ((50, "-"), (99, ":")):
                    at = float(np.percentile(ordered, percentile))
                    axis.axvline(at, color=MUTED, linewidth=0.9, linestyle=line)
                    marks.append(
                        f"p{percentile} {at:,.0f}" if at >= 100 else f"p{percentile} {at:.3g}"
                    )
                axis.set_title(" · ".join(marks), loc="right", fontsize=8.5, color=MUTED)
        title(axis, name_of)
        axis.set(xlabel="ms", xlim=(0, None), ylim=(0, 1.02))
        # The last label of a panel would run into the first of the next one.
        axis.locator_params(axis="x", nbins=5, prune="upper")
    axes[0].set_ylabel("share of the sample at or below")
    if len(values) > 1:
        handles = axes[0].get_legend_handles_labels()
        figure.legend(*handles, loc="outside lower center", ncols=6, frameon=False)
    return to_svg(figure, "Empirical distribution functions of " + ", ".join(SHORT.values()))


@drawn
def timeline_svg(load_pass: LoadPass) -> str:
    """Timeline: every request of a pass as a bar, and below it the output tokens per second."""
    ratios = {"height_ratios": [3, 1]}
    figure, (bars, rate) = canvas(1, 2, width=11, height=4.6, sharex=True, gridspec_kw=ratios)
    done = [trace for trace in load_pass.traces if trace.success][:MAX_BARS]
    done.sort(key=lambda trace: trace.sent)
    rows = np.arange(len(done))
    spans = {
        "queued in the client": (WAIT, [(t.scheduled, t.queued) for t in done]),
        "to the first token": (PREFILL, [(t.sent, t.ttft) for t in done]),
        "decode": (DECODE, [(t.sent + t.ttft, t.e2el - t.ttft) for t in done]),
    }
    for name, (colour, pieces) in spans.items():
        lefts, widths = np.array(pieces).reshape(-1, 2).T
        bars.barh(rows, widths, left=lefts, color=colour, height=0.8, label=name)
    bars.invert_yaxis()
    bars.grid(visible=False, axis="y")
    bars.set_ylabel("request")
    whole_numbers(bars, "y")
    bars.legend(loc="upper right", ncols=3, fontsize=9, bbox_to_anchor=(1, 1.14), frameon=False)
    title(bars, "One bar per request")
    width = max(load_pass.duration / 60, 1e-3)
    times = np.array([time for t in done for time in t.chunk_times])
    counts = np.array([count for t in done for count in t.chunk_tokens])
    edges = np.arange(0, load_pass.duration + width, width)
    tokens, _ = np.histogram(times, bins=edges, weights=counts)
    rate.stairs(tokens / width, edges, fill=True, color=DECODE, alpha=0.85)
    span = 0, load_pass.duration
    rate.set(ylabel="tokens/s", xlabel="seconds from the start of the pass", xlim=span)
    return to_svg(figure, "Timeline of the requests of one pass and the tokens per second")


@drawn
def turns_svg(turns: Sequence[Mapping[str, Any]]) -> str:
    """TTFT by turn, and the growth of the prompt with its cached part."""
    figure, (latency, length) = canvas(2, width=11, height=3.2)
    seen = [turn for turn in turns if turn["completed"]]
    numbers = np.array([turn["turn"] for turn in seen])
    for key, style in (("median", "-"), ("p99", ":")):
        values = [turn["ttft_ms"][key] for turn in seen]
        latency.plot(
            numbers, values, style, marker="o", markersize=4, color=PREFILL, label=f"{key} TTFT"
        )
    title(latency, "Time to first token")
    latency.set(ylabel="ms", ylim=(0, None))
    prompts = [turn["mean_prompt_len"] for turn in seen]
    cached = [turn["mean_cached_tokens"] for turn in seen]
    length.bar(numbers, prompts, color=MUTED, alpha=0.4, label="prompt")
    if None not in cached:
        length.bar(numbers, cached, color=DECODE, label="from the prefix cache")
    title(length, "Prompt tokens")
    whole_numbers(length, "y")
    for axis in (latency, length):
        axis.set_xlabel("turn")
        whole_numbers(axis, "x")
        axis.legend(fontsize=9, frameon=False)
    return to_svg(figure, "Time to first token and prompt tokens by turn")


@drawn
def steps_svg(load_pass: LoadPass) -> str:
    """Tokens of prefill and decode over the time of a pass, and the KV blocks in use."""
    steps = load_pass.engine_steps
    starts = np.array([step.start for step in steps])
    spans = [s.schedule_seconds + s.execute_seconds + s.update_seconds for s in steps]
    ends = np.maximum.accumulate(starts + np.array(spans))
    edges = np.linspace(0.0, max(load_pass.duration, ends[-1]), NUM_BINS + 1)
    decode = _rate([s.decode_tokens for s in steps], starts, ends, edges)
    prefill = _rate([s.prefill_tokens for s in steps], starts, ends, edges)
    ratios = {"height_ratios": [2, 1]}
    figure, (tokens, blocks) = canvas(1, 2, width=11, height=4.2, sharex=True, gridspec_kw=ratios)
    both = decode + prefill
    tokens.stairs(decode, edges, fill=True, color=DECODE, alpha=0.85, label="decode")
    tokens.stairs(both, edges, baseline=decode, fill=True, color=PREFILL, label="prefill")
    if preempted := [step.start for step in steps if step.num_preemptions]:
        tops = [float(both.max())] * len(preempted)
        tokens.plot(preempted, tops, "v", color=BAD, markersize=5, label="preemption")
    tokens.set_ylabel("tokens/s")
    tokens.legend(loc="upper right", ncols=3, fontsize=9, bbox_to_anchor=(1, 1.16), frameon=False)
    title(tokens, "Tokens computed by the steps")
    # A step holds its blocks until the next step is scheduled.
    latest = np.maximum(np.searchsorted(starts, edges[:-1], side="right") - 1, 0)
    used = np.array([step.kv_blocks_used for step in steps])[latest]
    blocks.stairs(used, edges, fill=True, color=MUTED, alpha=0.35)
    blocks.stairs(used, edges, color=INK, linewidth=1.2)
    whole_numbers(blocks, "y")
    blocks.set(ylabel="KV blocks", xlabel="seconds from the start of the pass")
    blocks.set(ylim=(0, None), xlim=(0, edges[-1]))
    return to_svg(figure, "Prefill and decode tokens of the steps over time, and KV blocks in use")


def _rate(
    tokens: Sequence[int], starts: np.ndarray, ends: np.ndarray, edges: np.ndarray
) -> np.ndarray:
    """Tokens per second in each bin, with a step's tokens spread evenly over its duration."""
    sums = np.concatenate([[0], np.cumsum(tokens)])
    times = np.column_stack([starts, ends]).ravel()
    counts = np.column_stack([sums[:-1], sums[1:]]).ravel()
    return np.diff(np.interp(edges, np.maximum.accumulate(times), counts)) / np.diff(edges)


@drawn
def roofline_svg(series: Mapping[str, Mapping[str, Any]]) -> str:
    """Log-log roofline from {name: `llmopt.roofline`}: for one run in FLOP/s, for several as shares of each
    run's own ceilings, which differ from run to run."""
    alone = next(iter(series.values()))["ceilings"] if len(series) == 1 else None
    points = []
    for (name, roofline), colour in zip(series.items(), cycle(SERIES), strict=False):
        own = roofline["ceilings"]
        unit, peak = (1.0, 1.0) if alone else (own["flops"] / own["bandwidth"], own["flops"])
        for point in roofline["points"]:
            name_of_point = point["phase"] if alone else f"{point['phase']}, {name}"
            at = point["intensity"] / unit, point["achieved_flops"] / peak
            marker = "o" if point["phase"] == "decode" else "s"
            style = {"marker": marker, "color": colour, "markersize": 9, "linestyle": "none"}
            name_of_point = f"{name_of_point}: {point['of_roof']:.1%} of the roof"
            points.append((at, point["of_roof"], name_of_point, style))
    ridge = alone["flops"] / alone["bandwidth"] if alone else 1.0
    across = [ridge, *(x for (x, _), *_ in points)]
    figure, (axis,) = canvas(width=11, height=4.2)
    _draw_roofs(axis, np.geomspace(min(across) / 4, max(across) * 4, 200), alone)
    for (x, y), of_roof, name_of_point, style in points:
        axis.plot([x, x], [y, y / of_roof], ":", color=style["color"], linewidth=0.9)
        axis.plot(x, y, label=name_of_point, **style)
    axis.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), fontsize=9, frameon=False)
    return to_svg(figure, "Roofline with the measured ceilings and one point per phase")


def _draw_roofs(axis: Axes, grid: np.ndarray, ceilings: Mapping[str, float] | None) -> None:
    """The ceilings of one run over the intensities of `grid`, or their shares for several runs."""
    if ceilings is None:
        log_scale(axis, "x", "y")
        axis.plot(grid, np.minimum(1.0, grid), color=INK, label="each run's own ceilings")
        across = "FLOP per model byte moved / those at the ridge"
        axis.set(xlabel=across, ylabel="FLOP/s / those of matmul", xlim=(grid[0], grid[-1]))
        title(axis, "Each run under its own measured ceilings")
        return
    axis.set(xscale="log", yscale="log", xlim=(grid[0], grid[-1]))
    for key, name, style in (
        ("near_bandwidth", "reads of the model's size", "-"),
        ("far_bandwidth", "reads from memory", "--"),
    ):
        roof = np.minimum(ceilings["flops"], grid * ceilings[key])
        label = f"{name}: {ceilings[key] / 1e9:.3g} GB/s"
        axis.plot(grid, roof, color=INK if style == "-" else MUTED, linestyle=style, label=label)
    axis.set(xlabel="FLOP per model byte moved", ylabel="FLOP/s")
    title(axis, f"Measured ceilings, matmul {ceilings['flops'] / 1e9:.3g} GFLOP/s")


DEPTH_PANELS = {"KL (nats)": "kl_nats", "Top-1 agreement": "top1_agreement"}


@drawn
def depth_svg(curves: Mapping[str, Mapping[str, Any]]) -> str:
    """KL by depth with its band, and top-1 agreement; a line for each of `depth_curves`."""
    figure, axes = canvas(2, width=11, height=3.2)
    for axis, (heading, key) in zip(axes, DEPTH_PANELS.items(), strict=True):
        for (name, depths), colour in zip(curves.items(), cycle(SERIES), strict=False):
            scored = {depth: part for depth, part in depths.items() if part is not None}
            across = [parse_tokens(depth) for depth in scored]
            values = [part[key] for part in scored.values()]
            axis.plot(across, values, "-o", color=colour, markersize=4, label=name)
            bands = [part["intervals"][key] for part in scored.values()]
            if not any(None in band for band in bands):
                low, high = zip(*bands, strict=True)
                axis.fill_between(across, low, high, color=colour, alpha=0.18, linewidth=0)
            axis.set_xscale("log", base=2)
            axis.set_xticks(across, list(scored))
        axis.set_xlabel("tokens before, at most")
        title(axis, heading)
    axes[0].set_ylim(bottom=0)
    axes[0].legend(fontsize=9, frameon=False)
    return to_svg(figure, "KL and top-1 agreement by depth, with 95 % intervals")


def captioned(svgs: Mapping[str, str], **captions: str) -> dict[str, Figure]:
    known = {**CAPTIONS, **captions}
    return {name: Figure(name, svg, known[name]) for name, svg in svgs.items()}


def run_figures(result: Mapping[str, Any], passes: Sequence[LoadPass]) -> dict[str, str]:
    traces = [trace for load_pass in passes for trace in load_pass.traces]
    figures: dict[str, str] = {}
    if any(trace.success for trace in traces):
        figures["distributions"] = distributions_svg({"this run": samples(traces)})
        figures["timeline"] = timeline_svg(passes[0])
    if passes and passes[0].engine_steps:
        figures["steps"] = steps_svg(passes[0])
    roofline = result["llmopt"]["roofline"]
    if roofline and roofline["points"]:
        figures["roofline"] = roofline_svg({"this run": roofline})
    if curves := depth_curves({"this run": result}):
        figures["depth"] = depth_svg(curves)
    return figures


def figures_of(
    runs: Mapping[str, RunData], least: int, svgs: Mapping[str, str], captions: Mapping[str, str]
) -> dict[str, Figure]:
    """`svgs`, and the runs side by side: bars, quality at depth, and latencies and rooflines where at least
    `least` runs have them."""
    results = {name: run.result for name, run in runs.items()}
    drawn = {**svgs, "side-by-side": bars_svg(results)}
    latencies = {name: latency_samples(run) for name, run in runs.items() if run.requests}
    if len(latencies) >= least:
        drawn["distributions"] = distributions_svg(latencies)
    roofs = {name: result["llmopt"]["roofline"] for name, result in results.items()}
    roofs = {name: roof for name, roof in roofs.items() if roof and roof["points"]}
    if len(roofs) >= least:
        drawn["roofline"] = roofline_svg(roofs)
    if curves := depth_curves(results):
        drawn["depth"] = depth_svg(curves)
    shared = {"roofline": SHARED_ROOFLINE} if len(roofs) > 1 else {}
    return captioned(drawn, **shared, **captions)


@drawn
def changes_svg(deltas: Sequence[MeasuredVerdict]) -> str:
    """Slowdown of every gated metric with its 90 % interval and its limit; right is worse."""
    figure, (axis,) = canvas(width=11, height=0.9 + 0.5 * len(deltas))
    colours = {GateOutcome.PASS: GOOD, GateOutcome.REGRESSION: BAD, GateOutcome.NO_VERDICT: UNSURE}
    for row, delta in enumerate(deltas):
        draw_change(axis, row, delta, colours[delta.outcome])
        if delta.allowed is not None:
            at = delta.allowed * 100
            axis.plot([at, at], [row - 0.3, row + 0.3], color=BAD, linewidth=1.5, linestyle="--")
    axis.axvline(0, color=INK, linewidth=1)
    axis.set_yticks(range(len(deltas)), [delta.label for delta in deltas])
    axis.set_ylim(len(deltas) - 0.5, -0.5)
    axis.grid(visible=False, axis="y")
    axis.set_xlabel("% slower than the base (left of 0: faster)")
    return to_svg(figure, "Change of every gated metric with its interval")


def draw_change(axis: Axes, row: int, delta: MeasuredVerdict, colour: str) -> None:
    """Draw a slowdown in percent as a dot with its 90 % interval; an unbounded one is left out."""
    low, high = slowdown_bounds(delta)
    if math.isfinite(low + high):
        axis.plot([low * 100, high * 100], [row, row], color=colour, linewidth=3, alpha=0.45)
    axis.plot(delta.worse * 100, row, "o", color=colour, markersize=8)


@drawn
def operating_curve_svg(curves: Sequence[OperatingCurve]) -> str:
    """Chance of pass, regression and no verdict by the true change, a panel a limit."""
    columns = min(len(curves), 3)
    shown = curves[:columns]
    figure, axes = canvas(columns, width=11, height=2.9, sharey=True)
    for axis, curve in zip(axes, shown, strict=True):
        worse = [point.worse * 100 for point in curve.points]
        names = ("pass", "regression", "no verdict")
        keys = ("passes", "regressions", "undecided")
        for name, colour, key in zip(names, (GOOD, BAD, UNSURE), keys, strict=True):
            chances = [100 * getattr(point, key) for point in curve.points]
            axis.plot(worse, chances, color=colour, label=name)
        axis.axvline(worse[STEPS.index(1.0)], color=BAD, linewidth=1, linestyle="--")
        axis.set_xlabel("% truly worse")
        title(axis, f"{curve.label} {curve.limit}")
    axes[0].set_ylabel("% of comparisons")
    axes[0].legend(frameon=False)
    return to_svg(figure, "Operating curve: chance of each verdict by the true change")


def slowdown_bounds(delta: MeasuredVerdict) -> tuple[float, float]:
    """The interval of `change`, with the sign flipped where needed so that positive is worse."""
    if (delta.change > 0) == (delta.worse > 0):
        return delta.low, delta.high
    # Few pairs bound nothing: from -100 % to infinity.
    highest = 1 / (1 + delta.low) - 1 if delta.low > -1 else math.inf
    return 1 / (1 + delta.high) - 1, highest


@drawn
def bars_svg(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Speed, quality and memory of several runs, side by side."""
    panels: dict[str, Callable[[Any], float | None]] = {
        "Output throughput (tokens/s)": lambda r: r["output_throughput"],
        "Median TPOT (ms)": lambda r: r.get(
            "median_tpot_ms", r["llmopt"]["metrics"]["tpot"]["median"]
        ),
        "Perplexity (lower is better)": lambda r: (r["llmopt"]["quality"] or {}).get("perplexity"),
        "Weights as served (MiB)": lambda r: (served_weight_bytes(r) or 0) / 2**20 or None,
    }
    lying = len(results) * max(map(len, results)) > MAX_NAME_LETTERS
    height = 1.0 + 0.34 * len(results) if lying else 2.9
    figure, axes = canvas(len(panels), width=11, height=height, sharey=lying)
    for axis, (heading, read) in zip(axes, panels.items(), strict=True):
        values = [read(result) for result in results.values()]
        _draw_bars(axis, values, list(results), lying=lying)
        title(axis, heading)
    return to_svg(figure, "Speed, quality and memory side by side")


def _draw_bars(
    axis: Axes, values: Sequence[float | None], names: Sequence[str], *, lying: bool
) -> None:
    """Bars with their values at the ends; names that do not fit in a row are stacked."""
    places, lengths = range(len(values)), [value or 0.0 for value in values]
    colours = [SERIES[row % len(SERIES)] for row in places]
    draw, side = (axis.barh, "y") if lying else (axis.bar, "x")
    bars = draw(places, lengths, 0.62, color=colours)
    labels = ["n/a" if value is None else f"{value:,.4g}" for value in values]
    axis.bar_label(bars, labels=labels, padding=2, fontsize=9, color=INK)
    getattr(axis, f"set_{side}ticks")(places, names)
    if lying:
        axis.set_ylim(len(values) - 0.5, -0.5)
    axis.grid(visible=False)
    axis.margins(x=0.3 if lying else 0.05, y=0.05 if lying else 0.16)
    getattr(axis, "set_xticks" if lying else "set_yticks")([])
    axis.spines["bottom" if lying else "left"].set_visible(False)
    axis.spines["left" if lying else "bottom"].set_color(GRID)
    axis.tick_params(axis=side, colors=MUTED)


def latency_samples(data: RunData) -> dict[str, np.ndarray]:
    """The columns of a run's requests as samples for the distribution figure."""
    columns = {
        metric: np.array([value for *_, value in data.column(f"{metric}_ms")])
        for metric in ("ttft", "tpot", "e2el")
    }
    gaps = [np.diff(times) * 1000 for *_, times in data.column("chunk_times_s")]
    columns["itl"] = np.concatenate(gaps) if gaps else np.array([])
    return columns
