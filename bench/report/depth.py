"""Quality at depth in reports: the table, and the curves with their bands."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import cycle
from typing import Any

from ...engine.base.units import parse_tokens
from ..page.page import ReportTable, drawn, number, percent
from ..page.plot_style import SERIES, canvas, title, to_svg

PANELS = {"KL (nats)": "kl_nats", "Top-1 agreement": "top1_agreement"}


def depth_curves(results: Mapping[str, Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """{name for readers: distances by depth} of the weights of every run, and of its caches of
    `--quality-kv`; of several runs the names begin with theirs."""
    curves: dict[str, Mapping[str, Any]] = {}
    for name, result in results.items():
        quality, prefix = result["llmopt"]["quality"] or {}, f"{name}: " if len(results) > 1 else ""
        curves[f"{prefix}from the reference"] = quality.get("depth") or {}
        for dtype, depths in (quality.get("kv") or {}).items():
            curves[f"{prefix}{dtype} KV cache"] = depths
    return {name: depths for name, depths in curves.items() if any(depths.values())}


def depth_table(curves: Mapping[str, Mapping[str, Any]]) -> ReportTable:
    """KL with its interval and top-1 agreement, a row for each curve and a column for each depth."""
    depths = list(dict.fromkeys(depth for curve in curves.values() for depth in curve))
    rows = [
        [name, *(_distance_words(curve.get(depth)) for depth in depths)]
        for name, curve in curves.items()
    ]
    return ReportTable(["depth", *depths], rows)


def _distance_words(scored: Mapping[str, Any] | None) -> str:
    if scored is None:
        return ""
    low, high = scored["intervals"]["kl_nats"]
    between = "" if low is None else f" ({number(low, 5)} to {number(high, 5)})"
    return f"{number(scored['kl_nats'], 5)}{between}, {percent(scored['top1_agreement'], 1)}"


@drawn
def depth_svg(curves: Mapping[str, Mapping[str, Any]]) -> str:
    """KL by depth with its band, and top-1 agreement; a line for each of `depth_curves`."""
    figure, axes = canvas(2, width=11, height=3.2)
    for axis, (heading, key) in zip(axes, PANELS.items(), strict=True):
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
