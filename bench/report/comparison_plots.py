"""Comparison plots: changes with confidence intervals, bar charts, distributions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..gate.compare import Comparison, RunData
from ..gate.limits import Outcome
from ..gate.sequential import STEPS, OperatingCurve
from ..gate.verdict import MeasuredVerdict
from ..page.plot_style import BAD, GOOD, GRID, INK, MUTED, SERIES, UNSURE, canvas, title, to_svg
from ..record.comparable import served_weight_bytes
from .plots import distributions_svg, roofline_svg


def comparison_figures(base: RunData, new: RunData, comparison: Comparison) -> dict[str, str]:
    """{file stem: svg} of a comparison."""
    results = {base.name: base.result, label_of(base, new): new.result}
    figures = {"side-by-side": bars_svg(results)}
    if comparison.deltas:
        figures["changes"] = changes_svg(comparison.deltas)
    if comparison.curves:
        figures["operating-curve"] = operating_curve_svg(comparison.curves)
    if base.requests and new.requests:
        figures["distributions"] = distributions_svg(
            {base.name: latency_samples(base), label_of(base, new): latency_samples(new)}
        )
    roofs = {name: r["llmopt"]["roofline"] for name, r in results.items()}
    if all(roof and roof["points"] for roof in roofs.values()):
        figures["roofline"] = roofline_svg(roofs)
    return figures


def label_of(base: RunData, new: RunData) -> str:
    """The new run's name, told apart from the base's when they are the same."""
    return new.name if new.name != base.name else f"{new.name} (new)"


def changes_svg(deltas: Sequence[MeasuredVerdict]) -> str:
    """Slowdown of every gated metric with its 90 % interval and its limit; right is worse."""
    figure, (axis,) = canvas(width=11, height=0.9 + 0.5 * len(deltas))
    colours = {Outcome.PASS: GOOD, Outcome.REGRESSION: BAD, Outcome.NO_VERDICT: UNSURE}
    for row, delta in enumerate(deltas):
        low, high = slowdown_bounds(delta)
        colour = colours[delta.outcome]
        if math.isfinite(low + high):
            axis.plot([low * 100, high * 100], [row, row], color=colour, linewidth=3, alpha=0.45)
        axis.plot(delta.worse * 100, row, "o", color=colour, markersize=8)
        if delta.allowed is not None:
            at = delta.allowed * 100
            axis.plot([at, at], [row - 0.3, row + 0.3], color=BAD, linewidth=1.5, linestyle="--")
    axis.axvline(0, color=INK, linewidth=1)
    axis.set_yticks(range(len(deltas)), [delta.label for delta in deltas])
    axis.set_ylim(len(deltas) - 0.5, -0.5)
    axis.grid(visible=False, axis="y")
    axis.set_xlabel("% slower than the base (left of 0: faster)")
    return to_svg(figure, "Change of every gated metric with its interval")


def operating_curve_svg(curves: Sequence[OperatingCurve]) -> str:
    """Chance of pass, regression and no verdict by the true change, a panel a limit."""
    columns = min(len(curves), 3)
    shown = curves[:columns]
    figure, axes = canvas(columns, width=11, height=2.9, sharey=True)
    for axis, curve in zip(axes, shown, strict=True):
        worse = [point.worse * 100 for point in curve.points]
        for label, colour, chance in (
            ("pass", GOOD, [point.passes for point in curve.points]),
            ("regression", BAD, [point.regressions for point in curve.points]),
            ("no verdict", UNSURE, [point.undecided for point in curve.points]),
        ):
            axis.plot(worse, [100 * share for share in chance], color=colour, label=label)
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


def bars_svg(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Speed, quality and memory of several runs, side by side."""
    panels: list[tuple[str, str, list[float | None]]] = [
        ("Output throughput", "tokens/s", [r["output_throughput"] for r in results.values()]),
        (
            "Median TPOT",
            "ms",
            [r["llmopt"]["metrics"]["tpot"]["median"] for r in results.values()],
        ),
        (
            "Perplexity",
            "lower is better",
            [(r["llmopt"]["quality"] or {}).get("perplexity") for r in results.values()],
        ),
        (
            "Weights as served",
            "MiB",
            [held / 2**20 if (held := served_weight_bytes(r)) else None for r in results.values()],
        ),
    ]
    figure, axes = canvas(len(panels), width=11, height=2.9)
    for axis, (heading, unit, values) in zip(axes, panels, strict=True):
        heights = [value or 0.0 for value in values]
        bars = axis.bar(range(len(values)), heights, color=SERIES[: len(values)], width=0.62)
        labels = ["n/a" if value is None else f"{value:,.4g}" for value in values]
        axis.bar_label(bars, labels=labels, padding=2, fontsize=9, color=INK)
        axis.set_xticks(range(len(values)), list(results))
        title(axis, f"{heading} ({unit})")
        axis.grid(visible=False, axis="x")
        axis.margins(y=0.16)
        axis.spines["left"].set_visible(False)
        axis.set_yticks([])
        axis.spines["bottom"].set_color(GRID)
        axis.tick_params(axis="x", colors=MUTED)
    return to_svg(figure, "Speed, quality and memory side by side")


def latency_samples(data: RunData) -> dict[str, np.ndarray]:
    """The columns of a run's requests as samples for the distribution figure."""
    table = data.requests or {}
    found = {
        metric: np.array([v for v in table.get(f"{metric}_ms", []) if v is not None])
        for metric in ("ttft", "tpot", "e2el")
    }
    gaps = [np.diff(times) * 1000 for times in table.get("chunk_times_s", [])]
    found["itl"] = np.concatenate(gaps) if gaps else np.array([])
    return found
