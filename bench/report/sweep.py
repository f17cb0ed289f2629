"""Reports of a load sweep and of an SLO search: every point, the knee, throughput against latency."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..metrics.run_statistics import STEADY_FORMULAS
from ..page.page import MISSING, Page, ReportTable, ReportVerdict, number, percent
from ..page.plot_style import BASE, MUTED, NEW, canvas, label, title, to_svg
from ..page.templates import page_of
from ..record.result import atomic_folder, to_json
from .figures import captioned
from .parts import write_page

SWEEP_NAME = "sweep.json"
UNITS = {"concurrency": "users", "rate": "requests/s"}


def write_sweep(record: Mapping[str, Any], target: Path) -> Path:
    """Write the folder `target` (`sweep.json`, reports, figures), atomically; returns it."""
    with atomic_folder(target) as folder:
        (folder / SWEEP_NAME).write_text(to_json(record), encoding="utf-8")
        write_page(sweep_page(record), folder)
    return target


def sweep_page(
    record: Mapping[str, Any], template: str = "report/sweep.jinja", **more: Any
) -> Page:
    """The page of a record of `Sweep.as_dict` or `SloSearch.as_dict`."""
    figures = {}
    if any(point["latency_ms"] for point in record["points"]):
        caption = "Every point is one load. Up is higher throughput, right is higher latency."
        svgs = {"throughput-latency": throughput_latency_svg(record)}
        figures = captioned(svgs, **{"throughput-latency": caption})
    page = {"verdict": sweep_verdict(record), "units": UNITS[record["kind"]], **more}
    return page_of(
        template,
        sweep=record,
        figures=figures,
        points=points_table(record),
        knee=knee_point(record),
        STEADY_FORMULAS=STEADY_FORMULAS,
        **page,
    )


def knee_point(record: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The point at the knee."""
    kind = record["kind"]
    return next((p for p in record["points"] if p[kind] == record["knee"]), None)


def load_text(value: float, kind: str) -> str:
    """`4 users`, `1 user`, `2.5 requests/s`."""
    if kind == "concurrency":
        return f"{value:.0f} {'user' if value == 1 else 'users'}"
    return f"{value:.3g} requests/s"


def sweep_verdict(record: Mapping[str, Any]) -> ReportVerdict:
    """The result of a search, or the knee of a sweep, in one sentence."""
    kind = record["kind"]
    if slo := record.get("slo"):
        asked = f"{slo['limits']} for {percent(slo['share'], 0)} of the requests"
        if slo["best"] is None:
            lowest = load_text(slo["lowest_failed"], kind)
            return ReportVerdict(
                "bad", f"Not even {lowest} keeps {asked}.", "No lighter load was tried."
            )
        best = load_text(slo["best"], kind)
        if slo["lowest_failed"] is None:
            said = "No heavier load was tried: this is the most that the workload can press."
        else:
            failed = next(p for p in record["points"] if p[kind] == slo["lowest_failed"])
            why = (
                f": {percent(failed['good_share'])} are within"
                if failed["kept_up"]
                else f", it is not kept up with: {number(failed['request_throughput'])} requests/s "
                f"of it completed (with more --num-prompts the drain counts for less)"
            )
            said = f"{load_text(slo['lowest_failed'], kind)} does not{why}."
        return ReportVerdict("good", f"{best} keeps {asked}.", said)
    point = knee_point(record)
    if point is None:
        return ReportVerdict(
            "bad",
            "There is no knee: no load succeeded and was kept up with.",
            "Lower the loads, or give more prompts.",
        )
    most = max(p["output_throughput"] or 0.0 for p in record["points"])
    return ReportVerdict(
        "plain",
        f"The knee is at {load_text(record['knee'], kind)}: "
        f"{number(point['output_throughput'], 0)} output tokens/s.",
        f"The mean request takes {number(point['latency_ms'], 1)} ms there; the most of any load "
        f"was {number(most, 0)} output tokens/s.",
    )


def points_table(record: Mapping[str, Any]) -> ReportTable:
    """One row per load, lightest first; the knee is marked."""
    kind = record["kind"]
    limited = any(point["good_share"] is not None for point in record["points"])

    def load(point: Mapping[str, Any]) -> str:
        mark = "\u00a0*" if point[kind] == record["knee"] else ""
        return number(point[kind], 0 if kind == "concurrency" else 2) + mark

    columns: dict[str, Callable[[Mapping[str, Any]], str]] = {
        "users" if kind == "concurrency" else "rate": load,
        "req/s": lambda p: number(p["request_throughput"]),
        "tok/s": lambda p: number(p["output_throughput"], 0),
        "steady tok/s": lambda p: number((p["steady_state"] or {}).get("output_throughput"), 0),
        "TTFT ms": lambda p: number(p["median_ttft_ms"], 1),
        "p99 TTFT": lambda p: number(p["p99_ttft_ms"], 1),
        "TPOT ms": lambda p: number(p["median_tpot_ms"]),
        "E2E ms": lambda p: number(p["latency_ms"], 1),
        "hits": lambda p: percent(p["prefix_cache_hit_rate"]),
        "failed": lambda p: str(p["failed"]),
    }
    if kind == "rate":
        columns["kept up"] = lambda p: "yes" if p["kept_up"] else "no"
    if limited:
        columns["within"] = lambda p: percent(p["good_share"], 0)
    cells = {name: [read(point) for point in record["points"]] for name, read in columns.items()}
    # Open loops have no steady state, and not every server reports cache hits.
    shown = {
        name: column for name, column in cells.items() if any(cell != MISSING for cell in column)
    }
    return ReportTable(
        list(shown),
        list(zip(*shown.values(), strict=True)),
        caption="* is the knee. TTFT and TPOT are medians, E2E a mean; hits: of the prefix cache.",
    )


def throughput_latency_svg(record: Mapping[str, Any]) -> str:
    """Output throughput over mean latency, the loads in order joined by a line, the knee marked."""
    kind = record["kind"]
    figure, (axis,) = canvas(width=9, height=4.0)
    points = [p for p in record["points"] if p["latency_ms"] and p["output_throughput"]]
    across = [p["latency_ms"] for p in points]
    up = [p["output_throughput"] for p in points]
    axis.plot(across, up, "-o", color=BASE, linewidth=1.6, markersize=5)
    for point, x, y in zip(points, across, up, strict=True):
        at_knee = point[kind] == record["knee"]
        text = f"{point[kind]:.3g}" + (" knee" if at_knee else "")
        label(axis, text, (x, y), (6, -12), fontsize=9, color=NEW if at_knee else MUTED)
        if at_knee:
            axis.plot(x, y, "o", color=NEW, markersize=10)
    axis.set_xlim(left=0)
    axis.set_ylim(bottom=0)
    axis.set_xlabel("mean end-to-end latency, ms")
    axis.set_ylabel("output tokens/s")
    title(axis, f"Labels: {UNITS[kind]}")
    return to_svg(figure, "Output throughput against mean latency, one point per load")
