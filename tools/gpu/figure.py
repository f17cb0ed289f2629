"""Measured figures: records of a run's file, and their Markdown table."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

OURS = "llmopt"
PLAIN = "bf16"


@dataclass(frozen=True, slots=True)
class Figure:
    """One quantity, measured `count` times.

    Attributes:
        model: a shape of the planner's table, with random weights.
        weights: how its linears are stored, `bf16` or the label of a scheme.
        engine: `llmopt`, or the peer measured beside it.
        phase: `decode` (a step that gives each of `batch` sequences of `context` tokens its next token),
            `prefill` (a prompt of `context` tokens), `host` (time of a decode step in which the device
            waits), `stream` and `requests` (answers a second to one request, and to `batch` at once).
        unit: `ms` or `tokens/s`.
        share: of the roof named in `roof`, for the median; None where no roof is meant.
    """

    model: str
    weights: str
    engine: str
    phase: str
    batch: int
    context: int
    unit: str
    median: float
    lowest: float
    highest: float
    count: int
    share: float | None = None
    roof: str | None = None

    @classmethod
    def read(cls, record: dict[str, Any]) -> Figure:
        return cls(**{field.name: record[field.name] for field in fields(cls)})

    @property
    def case(self) -> tuple[str, str, int, int]:
        """The key that comparable figures share."""
        return self.model, self.phase, self.batch, self.context

    @property
    def speed(self) -> float:
        """More is faster."""
        return self.median if self.unit == "tokens/s" else 1 / self.median


def figure(
    what: dict[str, Any], unit: str, values: Sequence[float], least: float | None, roof: str | None
) -> Figure:
    """A figure of measured `values`; `least` is the value at the roof, for times."""
    middle = statistics.median(values)
    share = None if least is None else least / middle
    return Figure(
        **what,
        unit=unit,
        median=middle,
        lowest=min(values),
        highest=max(values),
        count=len(values),
        share=share,
        roof=None if share is None else roof,
    )


def compared(figures: Sequence[Figure]) -> Iterator[tuple[Figure, list[str]]]:
    """Each figure with its speedup over the baselines of its case.

    Quantized weights are compared with bf16, our engine with its peers.
    """
    for one in figures:
        others = [
            other for other in figures if other.case == one.case and _is_yardstick(other, one)
        ]
        yield one, [f"{one.speed / other.speed:.2f} × {_short(other)}" for other in others]


def _is_yardstick(other: Figure, one: Figure) -> bool:
    if one.engine != OURS or one.phase == "host":
        return False
    if other.engine == OURS:
        return other.weights == PLAIN != one.weights
    return other.weights == one.weights


def _short(one: Figure) -> str:
    return one.weights if one.engine == OURS else one.engine


def markdown(record: dict[str, Any]) -> str:
    """The table of a run's file, and its environment."""
    environment, sections = record["environment"], record["sections"]
    gpu = environment.get("gpu", {}).get("name", environment.get("machine", "this machine"))
    libraries = environment.get("libraries", {})
    used = ", ".join(f"{name} {libraries[name]}" for name in ("torch", "triton", "transformers"))
    lines = [f"{gpu}, {used}; commit {record['commit']}, {record['date']}."]
    lines += ["", *(_roofs(section) for section in sections if section["roofs"])]
    lines += [
        "",
        "| model | weights | who | what | median | lowest to highest | of the roof | speed |",
    ]
    lines += ["|---|---|---|---|--:|--:|--:|---|"]
    figures = [Figure.read(one) for section in sections for one in section["figures"]]
    lines += [_row(one, beside) for one, beside in compared(figures)]
    missing = [f"{s['name']}: {reason}" for s in sections for reason in s["left_out"]]
    if missing:
        lines += ["", "Not measured: " + "; ".join(missing) + "."]
    return "\n".join(lines)


def _roofs(section: dict[str, Any]) -> str:
    copy, matrix = section["roofs"]["copy_bytes_per_second"], section["roofs"]["matrix_flops"]
    return f"* {section['name']}: copy {copy / 1e12:.2f} TB/s, matrix {matrix / 1e12:.0f} TFLOP/s"


def _row(one: Figure, beside: Sequence[str]) -> str:
    what = {
        "decode": f"decode step, batch {one.batch}, context {one.context}",
        "prefill": f"prefill of {one.context}",
        "host": f"device idle in a decode step, batch {one.batch}",
        "stream": f"one request, {one.context} tokens out",
        "requests": f"{one.batch} requests",
    }[one.phase]
    share = "" if one.share is None else f"{100 * one.share:.0f} % ({one.roof})"
    spread = f"{one.lowest:.4g} to {one.highest:.4g} ({one.count})"
    cells = [one.model, one.weights, one.engine, what, f"{one.median:.4g} {one.unit}", spread]
    return "| " + " | ".join([*cells, share, ", ".join(beside)]) + " |"
