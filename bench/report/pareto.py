"""Pareto front of checkpoints: those not dominated in quality, size and speed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from ..page.plot_style import INK, MUTED, SERIES, canvas, title, to_svg

QUALITY_LABELS = {"kl": "KL (nats)", "perplexity": "Perplexity"}


@dataclass(frozen=True, slots=True)
class Candidate:
    """A checkpoint as a point. `kl` is None for the reference itself; `tokens` names the scored text."""

    weight_bytes: float | None
    throughput: float
    perplexity: float | None
    kl: float | None
    tokens: str | None

    def quality(self, name: str) -> float:
        """The value of a quality metric; smaller is better."""
        value = self.kl if name == "kl" else self.perplexity
        return 0.0 if value is None else value


def beats(one: Candidate, other: Candidate, quality_name: str) -> bool:
    """Pareto dominance: whether `one` is nowhere worse and somewhere better (size, speed, quality)."""
    pairs = [
        (one.quality(quality_name), other.quality(quality_name)),
        (-one.throughput, -other.throughput),
    ]
    if one.weight_bytes is not None and other.weight_bytes is not None:
        pairs.append((one.weight_bytes, other.weight_bytes))
    return all(a <= b for a, b in pairs) and any(a < b for a, b in pairs)


def front(candidates: Mapping[str, Candidate], quality_name: str | None) -> list[str]:
    """The names of non-dominated candidates; none without a quality metric."""
    if quality_name is None:
        return []
    return [
        name
        for name, one in candidates.items()
        if not any(beats(other, one, quality_name) for other in candidates.values())
    ]


def pareto_svg(
    candidates: Mapping[str, Candidate], quality_name: str, against: Literal["size", "speed"]
) -> str:
    """Quality against size or speed. Better is down and to the left for size, to the right for speed;
    the line joins the non-dominated ones in these two."""
    figure, (axis,) = canvas(width=5.4, height=3.1)
    points: dict[str, tuple[float, float]] = {}
    for name, one in candidates.items():
        x = one.throughput if against == "speed" else (one.weight_bytes or 0.0) / 2**20
        points[name] = (x, one.quality(quality_name))
    sign = -1 if against == "speed" else 1
    best = sorted(
        point
        for point in points.values()
        if not any(
            other != point and sign * other[0] <= sign * point[0] and other[1] <= point[1]
            for other in points.values()
        )
    )
    axis.plot(*zip(*best, strict=True), color=MUTED, linewidth=1, linestyle="--", zorder=1)
    for number, (name, (x, y)) in enumerate(points.items()):
        colour = SERIES[number % len(SERIES)]
        axis.plot(x, y, "o", color=colour, markersize=9, zorder=2)
        # Alternate label sides, so that neighbouring labels do not overlap.
        above = number % 2 == 0
        axis.annotate(
            name,
            (x, y),
            xytext=(0, 9 if above else -9),
            textcoords="offset points",
            ha="center",
            va="bottom" if above else "top",
            fontsize=9,
            color=INK,
        )
    axis.margins(0.18)
    unit = "output tokens/s" if against == "speed" else "weights (MiB)"
    axis.set_xlabel(f"{unit}, {'right' if against == 'speed' else 'left'} is better")
    axis.set_ylabel(f"{QUALITY_LABELS[quality_name]}, down is better")
    what = "speed" if against == "speed" else "size"
    title(axis, f"Quality against {what}")
    return to_svg(figure, f"Quality against {what} of {len(points)} runs")
