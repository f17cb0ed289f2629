"""The figures of one run: latency distributions, the timeline of requests, the roofline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..metrics.metrics import samples
from ..metrics.step_trace import CAPTION as STEPS_CAPTION
from ..metrics.step_trace import steps_svg
from ..metrics.trace import LoadPass
from ..page.plot_style import DECODE, INK, MUTED, PREFILL, SERIES, WAIT, canvas, title, to_svg

SHORT = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2el": "End to end"}
MAX_BARS = 120
CAPTIONS = {
    "distributions": "How many of the values lie at or below a latency. ITL pools the gaps of all "
    "requests; the other three have one value per request.",
    "timeline": "First pass. Requests that wait under the concurrency limit are grey.",
    "steps": STEPS_CAPTION,
    "roofline": "Points are model bytes and model FLOP over measured time. The ceilings were measured on "
    "this machine just after the run, with the same threads.",
}


def distributions_svg(values: Mapping[str, Mapping[str, np.ndarray]]) -> str:
    """Empirical distribution functions of TTFT, TPOT, ITL and end-to-end latency.

    `values` is {series name: {metric: milliseconds}}; several series share the axes.
    """
    figure, axes = canvas(4, width=11, height=2.9, sharey=True)
    for axis, (metric, name_of) in zip(axes, SHORT.items(), strict=True):
        for (name, sample), colour in zip(values.items(), SERIES, strict=False):
            ordered = np.sort(sample[metric])
            if len(ordered) == 0:
                continue
            share = np.arange(1, len(ordered) + 1) / len(ordered)
            axis.step(ordered, share, where="post", color=colour, label=name, linewidth=1.8)
            if len(values) == 1:
                for percentile, style in ((50, "-"), (99, ":")):
                    at = float(np.percentile(ordered, percentile))
                    axis.axvline(at, color=MUTED, linewidth=0.9, linestyle=style)
                    axis.annotate(
                        f"p{percentile} {at:.3g}",
                        (at, 0.24 if percentile == 50 else 0.12),
                        xytext=(4 if percentile == 50 else -4, 0),
                        textcoords="offset points",
                        ha="left" if percentile == 50 else "right",
                        fontsize=8.5,
                        color=MUTED,
                    )
        title(axis, name_of)
        axis.set_xlabel("ms")
        axis.set_xlim(left=0)
        axis.set_ylim(0, 1.02)
    axes[0].set_ylabel("share of the sample at or below")
    if len(values) > 1:
        handles = axes[0].get_legend_handles_labels()
        figure.legend(*handles, loc="outside lower center", ncols=6, frameon=False)
    return to_svg(figure, "Empirical distribution functions of " + ", ".join(SHORT.values()))


def timeline_svg(one: LoadPass) -> str:
    """Timeline: every request of a pass as a bar, and below it the output tokens per second."""
    figure, axes = canvas(
        1, 2, width=11, height=4.6, sharex=True, gridspec_kw={"height_ratios": [3, 1]}
    )
    bars, rate = axes
    done = [trace for trace in one.traces if trace.success][:MAX_BARS]
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
    bars.legend(loc="upper right", ncols=3, fontsize=9, bbox_to_anchor=(1, 1.14), frameon=False)
    title(bars, "One bar per request")
    width = max(one.duration / 60, 1e-3)
    times = np.array([time for t in done for time in t.chunk_times])
    counts = np.array([count for t in done for count in t.chunk_tokens])
    edges = np.arange(0, one.duration + width, width)
    tokens, _ = np.histogram(times, bins=edges, weights=counts)
    rate.stairs(tokens / width, edges, fill=True, color=DECODE, alpha=0.85)
    rate.set_ylabel("tokens/s")
    rate.set_xlabel("seconds from the start of the pass")
    rate.set_xlim(0, one.duration)
    return to_svg(figure, "Timeline of the requests of one pass and the tokens per second")


def roofline_svg(series: Mapping[str, Mapping[str, Any]]) -> str:
    """Log-log roofline from {name: `llmopt.roofline`}; the ceilings are those of the first one."""
    ceilings = next(iter(series.values()))["ceilings"]
    points = [
        (name, point, colour)
        for (name, one), colour in zip(series.items(), SERIES, strict=False)
        for point in one["points"]
    ]
    intensities = [point["intensity"] for _, point, _ in points]
    ridge = ceilings["flops"] / ceilings["bandwidth"]
    low = min([*intensities, ridge]) / 4
    high = max([*intensities, ridge]) * 4
    figure, (axis,) = canvas(width=11, height=4.2)
    grid = np.geomspace(low, high, 200)
    for key, name, style in (
        ("near_bandwidth", "reads of the model's size", "-"),
        ("far_bandwidth", "reads from memory", "--"),
    ):
        roof = np.minimum(ceilings["flops"], grid * ceilings[key])
        said = f"{name}: {ceilings[key] / 1e9:.3g} GB/s"
        axis.plot(grid, roof, color=INK if style == "-" else MUTED, linestyle=style, label=said)
    for name, point, colour in points:
        x, y = point["intensity"], point["achieved_flops"]
        roof = min(ceilings["flops"], x * ceilings["bandwidth"])
        marker = "o" if point["phase"] == "decode" else "s"
        axis.plot([x, x], [y, roof], color=colour, linewidth=0.9, linestyle=":")
        label = f"{point['phase']}, {name}" if len(series) > 1 else point["phase"]
        axis.plot(
            x,
            y,
            marker,
            color=colour,
            markersize=9,
            linestyle="none",
            label=f"{label}: {point['of_roof']:.1%} of the roof",
        )
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xlim(low, high)
    axis.set_xlabel("FLOP per model byte moved")
    axis.set_ylabel("FLOP/s")
    title(axis, f"Measured ceilings, matmul {ceilings['flops'] / 1e9:.3g} GFLOP/s")
    axis.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), fontsize=9, frameon=False)
    return to_svg(figure, "Roofline with the measured ceilings and one point per phase")


def run_figures(result: Mapping[str, Any], passes: Sequence[LoadPass]) -> dict[str, str]:
    """{file stem: svg} of one run."""
    traces = [trace for one in passes for trace in one.traces]
    figures: dict[str, str] = {}
    if any(trace.success for trace in traces):
        figures["distributions"] = distributions_svg({"this run": samples(traces)})
        figures["timeline"] = timeline_svg(passes[0])
    if passes and passes[0].engine_steps:
        figures["steps"] = steps_svg(passes[0])
    roofline = result["llmopt"]["roofline"]
    if roofline and roofline["points"]:
        figures["roofline"] = roofline_svg({"this run": roofline})
    return figures
