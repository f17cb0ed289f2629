"""Report of several runs, and the Pareto front of quality against size and speed: who is not dominated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, Literal

from ...base.errors import BadInput
from ..gate.compare import unusable
from ..page.page import Figure, Page, ReportTable, ReportVerdict, Tone, drawn
from ..page.plot_style import INK, MUTED, SERIES, canvas, label, title, to_svg
from ..record.comparable import incomparable, served_weight_bytes, widened_notes
from ..record.result import RunData
from .figures import figures_of
from .parts import SUMMARY, named_caveats, report_page, summary_cells

QUALITY_LABELS = {"kl": "KL (nats)", "perplexity": "Perplexity"}


@dataclass(frozen=True, slots=True)
class ParetoPoint:
    """A checkpoint as a point. `kl` is None for the reference itself; `tokens` names the scored text;
    `throughput` is None where speeds were measured under other conditions."""

    weight_bytes: float | None
    throughput: float | None
    perplexity: float | None
    kl: float | None
    tokens: str | None

    def quality(self, name: str) -> float:
        """The value of a quality metric; smaller is better."""
        value = self.kl if name == "kl" else self.perplexity
        return 0.0 if value is None else value


def beats(point: ParetoPoint, other: ParetoPoint, quality_name: str) -> bool:
    """Pareto dominance: `point` is nowhere worse and somewhere better (size, speed, quality)."""
    pairs = [(point.quality(quality_name), other.quality(quality_name))]
    if point.throughput is not None and other.throughput is not None:
        pairs.append((-point.throughput, -other.throughput))
    if point.weight_bytes is not None and other.weight_bytes is not None:
        pairs.append((point.weight_bytes, other.weight_bytes))
    return all(a <= b for a, b in pairs) and any(a < b for a, b in pairs)


def front(candidates: Mapping[str, ParetoPoint], quality_name: str | None) -> list[str]:
    """The names of non-dominated candidates; none without a quality metric."""
    if quality_name is None:
        return []
    return [
        name
        for name, point in candidates.items()
        if not any(beats(other, point, quality_name) for other in candidates.values())
    ]


@drawn
def pareto_svg(
    candidates: Mapping[str, ParetoPoint], quality_name: str, against: Literal["size", "speed"]
) -> str:
    """Quality against size or speed. Better is down and to the left for size, to the right for speed;
    the line joins the non-dominated ones in these two."""
    points: dict[str, tuple[float, float]] = {}
    for name, entry in candidates.items():
        x = entry.throughput if against == "speed" else (entry.weight_bytes or 0.0) / 2**20
        points[name] = (x or 0.0, entry.quality(quality_name))
    spans = (max(values) - min(values) or 1.0 for values in zip(*points.values(), strict=True))
    x_span, y_span = spans
    # Names next to points that are this close would cover each other.
    is_crowded = any(
        abs(a[0] - b[0]) < 0.3 * x_span and abs(a[1] - b[1]) < 0.2 * y_span
        for a, b in combinations(points.values(), 2)
    )
    figure, (axis,) = canvas(width=5.4, height=3.7 if is_crowded else 3.1)
    sign = -1 if against == "speed" else 1
    best = sorted(
        (x, y)
        for x, y in points.values()
        if not any((u, v) != (x, y) and sign * u <= sign * x and v <= y for u, v in points.values())
    )
    axis.plot(*zip(*best, strict=True), color=MUTED, linewidth=1, linestyle="--", zorder=1)
    for number, (name, (x, y)) in enumerate(points.items()):
        colour = SERIES[number % len(SERIES)]
        axis.plot(x, y, "o", color=colour, markersize=9, zorder=2, label=name)
        if is_crowded:
            continue
        # Alternate label sides, so that neighbouring labels do not overlap.
        above = number % 2 == 0
        style = {"ha": "center", "va": "bottom" if above else "top", "fontsize": 9, "color": INK}
        label(axis, name, (x, y), (0, 9 if above else -9), **style)
    axis.margins(0.18)
    highest = axis.get_ylim()[1]
    axis.set_yticks([tick for tick in axis.get_yticks() if 0 <= tick <= highest])
    if is_crowded:
        figure.legend(loc="outside lower center", ncols=3, fontsize=9, frameon=False)
    unit = "output tokens/s" if against == "speed" else "weights (MiB)"
    axis.set_xlabel(f"{unit}, {'right' if against == 'speed' else 'left'} is better")
    axis.set_ylabel(f"{QUALITY_LABELS[quality_name]}, down is better")
    what = "speed" if against == "speed" else "size"
    title(axis, f"Quality against {what}")
    return to_svg(figure, f"Quality against {what} of {len(points)} runs")


def joined_page(runs: Sequence[RunData]) -> Page:
    """The page of two or more runs; conditions in which they differ are warnings on top, and then no speed is
    compared. Raises BadInput: fewer than two runs."""
    if len(runs) < 2:
        raise BadInput("a joined report needs two runs or more: a single run has its report.html")
    named = unique_names(runs)
    results = {name: run.result for name, run in named.items()}
    obstacles = speed_obstacles(named)
    candidates = {name: candidate(result, not obstacles) for name, result in results.items()}
    quality_name = shared_quality(candidates)
    best = front(candidates, quality_name)
    caveats = named_caveats(results)
    return report_page(
        "report/joined.jinja",
        results=results,
        first=runs[0].result["llmopt"],
        verdict=joined_verdict(results, candidates, best, quality_name),
        warnings=[*obstacles, *caveats["warnings"]],
        notes=[*caveats["notes"], *widened_notes(results)],
        runs=runs_table(results, best),
        figures={
            **figures_of(named, 1, {}, {"side-by-side": ""}),
            **pareto_figures(candidates, quality_name),
        },
    )


def runs_table(results: Mapping[str, Mapping[str, Any]], best: Sequence[str]) -> ReportTable:
    """A row for each run, in green those on the Pareto front."""
    rows = [
        [name, *summary_cells(result), "yes" if name in best else "no"]
        for name, result in results.items()
    ]
    tones: dict[int, Tone] = {n: "good" for n, name in enumerate(results) if name in best}
    return ReportTable(["run", *SUMMARY, "front"], rows, tones=tones)


def pareto_figures(
    candidates: Mapping[str, ParetoPoint], quality_name: str | None
) -> dict[str, Figure]:
    """Pareto fronts where quality is comparable; that of speed where speeds are too."""
    if quality_name is None:
        return {}
    against = ("size", "speed") if are_comparable(candidates) else ("size",)
    return {
        name: Figure(f"pareto-{name}", pareto_svg(candidates, quality_name, name), half=True)
        for name in against
    }


def unique_names(runs: Sequence[RunData]) -> dict[str, RunData]:
    """{name: run}; duplicate names are numbered."""
    named: dict[str, RunData] = {}
    for run in runs:
        name, count = run.name, 1
        while name in named:
            count += 1
            name = f"{run.name} ({count})"
        named[name] = run
    return named


def candidate(result: Mapping[str, Any], is_comparable: bool = True) -> ParetoPoint:
    """The run as a point for the Pareto front; without its speed where that is not comparable."""
    record = result["llmopt"]
    scored = record["quality"] or {}
    return ParetoPoint(
        served_weight_bytes(result),
        result["output_throughput"] if is_comparable else None,
        scored.get("perplexity"),
        scored.get("kl_nats"),
        scored.get("token_sha256"),
    )


def shared_quality(candidates: Mapping[str, ParetoPoint]) -> str | None:
    """The common quality metric: `kl` where all but one run (the reference) have it, `perplexity` where all
    have it on the same tokens, else None."""
    every = list(candidates.values())
    if len({point.tokens for point in every}) > 1 or None in [point.perplexity for point in every]:
        return None
    has_kl = len(every) > 1 and sum(point.kl is None for point in every) <= 1
    return "kl" if has_kl else "perplexity"


def are_comparable(candidates: Mapping[str, ParetoPoint]) -> bool:
    return all(point.throughput is not None for point in candidates.values())


def joined_verdict(
    results: Mapping[str, Mapping[str, Any]],
    candidates: Mapping[str, ParetoPoint],
    best: Sequence[str],
    quality_name: str | None,
) -> ReportVerdict:
    """The Pareto-optimal runs, as a sentence; the fastest only where speeds are comparable."""
    speeds = {name: point.throughput or 0.0 for name, point in candidates.items()}
    clauses = ["Their speeds are not comparable"]
    if are_comparable(candidates):
        clauses = [f"Fastest: {max(speeds, key=lambda name: speeds[name])}"]
    sizes = {name: point.weight_bytes for name, point in candidates.items()}
    if known := {name: value for name, value in sizes.items() if value is not None}:
        clauses.append(f"smallest: {min(known, key=lambda name: known[name])}")
    if quality_name is None:
        missing = "The runs have no quality of the same tokens: bench them without --no-quality."
        return ReportVerdict("unsure", "; ".join(clauses) + ".", missing)
    headline = f"Worth choosing among: {', '.join(best)}"
    if dominated := ", ".join(name for name in results if name not in best):
        fast = ", as fast" if are_comparable(candidates) else ""
        clauses.append(
            f"{dominated}: another is at least as small{fast} and as close to the original"
        )
    return ReportVerdict("plain", headline + ".", "; ".join(clauses) + ".")


def speed_obstacles(named: Mapping[str, RunData]) -> list[str]:
    """Sentences on the conditions in which runs differ from the first, for which no speed is compared."""
    (first_name, first), *others = named.items()
    sentences = []
    for name, run in others:
        differences = [*incomparable(first.result, run.result)]
        if not differences and (difference := unusable(first, run, (first_name, name))):
            differences = [difference]
        sentences += [
            f"Not comparable in speed: {name} and {first_name}: {obstacle}."
            for obstacle in differences
        ]
    return sentences
