"""How reports look: light and dark with their charts, axes of counts, names that fit, each run's own ceilings."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from llmopt.bench.gate.compare import compare
from llmopt.bench.page.page import to_html
from llmopt.bench.page.plot_style import (
    COLOURS,
    SERIES,
    canvas,
    log_scale,
    name_points,
)
from llmopt.bench.record.result import RunData
from llmopt.bench.report import figures, joined
from llmopt.bench.report.comparison import comparison_page
from llmopt.bench.report.joined import joined_page
from llmopt.bench.report.parts import named_caveats
from matplotlib.figure import Figure
from matplotlib.transforms import Bbox

from .test_report_pages import data, passes

LEAST_CONTRAST = 4.5
"""Contrast of texts, by WCAG 2.1; parts of a chart need 3."""
TEXTS = ("ink", "muted", "good", "bad", "unsure", "plain")


def luminance(colour: str) -> float:
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (p / 12.92 if p <= 0.03928 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """The figures that are drawn, before they are SVG."""
    seen: list[Figure] = []
    real = figures.to_svg

    def keep(figure: Figure, alt: str) -> str:
        seen.append(figure)
        return real(figure, alt)

    monkeypatch.setattr(figures, "to_svg", keep)
    return seen


def roofline(flops: float, bandwidth: float, *, of_roof: float) -> dict[str, Any]:
    """Two phases at the same distance below the ceilings of a run, left and right of its ridge."""
    ridge = flops / bandwidth
    points = [
        {
            "phase": phase,
            "intensity": share * ridge,
            "achieved_flops": of_roof * min(1.0, share) * flops,
            "of_roof": of_roof,
        }
        for phase, share in (("decode", 0.25), ("prefill", 8.0))
    ]
    ceilings = {"flops": flops, "bandwidth": bandwidth}
    ceilings |= {"near_bandwidth": bandwidth, "far_bandwidth": bandwidth / 2}
    return {"ceilings": ceilings, "points": points}


def place_of(line: Any) -> list[float]:
    return [float(line.get_xdata()[0]), float(line.get_ydata()[0])]


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_texts_and_series_stand_out_from_the_page(theme: int) -> None:
    for ground in ("paper", "soft", "notice"):
        for name in TEXTS if ground != "notice" else ("ink",):
            assert contrast(COLOURS[name][theme], COLOURS[ground][theme]) >= LEAST_CONTRAST, name
    for place in range(len(SERIES)):
        assert contrast(COLOURS[f"series{place}"][theme], COLOURS["paper"][theme]) >= 3
    for shade in range(1, 5):
        assert contrast(COLOURS["ink"][theme], COLOURS[f"shade{shade}"][theme]) >= LEAST_CONTRAST


def test_charts_take_every_colour_from_the_style_sheet() -> None:
    base, new = data("base"), data("new")
    html = to_html(comparison_page(base, new, compare(base, new)))
    charts = re.findall(r"<svg .*?</svg>", html, re.DOTALL)
    assert len(charts) == 3
    used = set(re.findall(r"var\(--([\w-]+)\)", html))
    assert {"ink", "muted", "line", "series0", "series1"} <= used <= {*COLOURS, "tone"}
    for chart in charts:
        assert not re.search(r"(?:fill|stroke|color): *(?:#|rgb|black|white)", chart)
    assert html.count("--paper: ") == 2 and "(prefers-color-scheme: dark)" in html


def test_a_figure_in_a_file_keeps_its_colours() -> None:
    svg = figures.distributions_svg({"run": figures.latency_samples(data())})
    assert "#1c2733" in svg and "var(" not in svg


def test_axes_of_counts_have_whole_numbers(drawn: list[Figure]) -> None:
    one = passes(1)[0]
    one.traces[:] = one.traces[:2]
    figures.timeline_svg(one)
    turn = {"completed": 1, "ttft_ms": {"median": 1.0, "p99": 1.0}}
    turn |= {"mean_prompt_len": 2, "mean_cached_tokens": 1}
    figures.turns_svg([{**turn, "turn": number} for number in (1, 2)])
    requests = drawn[0].axes[0].get_yticks()
    turns, tokens = drawn[1].axes[0].get_xticks(), drawn[1].axes[1].get_yticks()
    for ticks in (requests, turns, tokens):
        assert len(ticks) >= 2
        assert all(float(tick).is_integer() for tick in ticks)


def test_a_timeline_has_every_token_of_its_pass(drawn: list[Figure]) -> None:
    one = passes(1)[0]
    figures.timeline_svg(one)
    (bars,) = drawn[0].axes[1].patches
    rates, edges, _ = bars.get_data()  # pyright: ignore[reportAttributeAccessIssue]
    tokens = sum(count for trace in one.traces for count in trace.chunk_tokens)
    assert edges[0] == 0 and float((rates * np.diff(edges)).sum()) == pytest.approx(tokens)


@pytest.mark.parametrize("names", [("a", "b"), ("llama-3.1-8b-gptq-4bit", "llama-3.1-8b-awq-4bit")])
def test_names_that_do_not_fit_below_bars_stand_beside_them(
    names: tuple[str, str], drawn: list[Figure]
) -> None:
    figures.bars_svg({name: data(name).result for name in names})
    axes = drawn[0].axes
    drawn[0].canvas.draw()
    lying = len(names[0]) > 1
    labels = axes[0].get_yticklabels() if lying else axes[0].get_xticklabels()
    assert [one.get_text() for one in labels] == [*names]
    for axis in axes:
        boxes = [one.get_window_extent() for one in (*labels, *axis.texts)]
        for place, box in enumerate(boxes):
            assert not any(box.overlaps(other) for other in boxes[place + 1 :])


def test_a_name_is_written_where_it_covers_nothing() -> None:
    """Points of which some lie upon each other, a span that one name would cover, some at the edge."""
    places = [(f"checkpoint-{n}", (n % 4 + 0.02 * n, float(n % 3))) for n in range(30)]
    (axis,) = canvas(width=6, height=3)[1]
    axis.plot(*zip(*(at for _, at in places), strict=True), "o")
    span = ((2.2, 1.98), (2.9, 2.02))
    written = name_points(axis, places, [span])
    assert 4 <= len(written) < len(places)
    boxes = [text.get_window_extent() for text in written.values()]
    points = axis.transData.transform([at for _, at in places])
    for number, box in enumerate(boxes):
        assert not box.count_overlaps(boxes[number + 1 :])
        assert not any(box.contains(*point) for point in points)
        assert not box.overlaps(axis.transData.transform_bbox(Bbox(span)))
        assert axis.bbox.containsx(box.x0) and axis.bbox.containsx(box.x1)
    assert [text.get_text() for text in axis.texts] == [places[n][0] for n in written]


def test_a_logarithmic_axis_has_plain_numbers() -> None:
    figure, (axis,) = canvas(width=5, height=3)
    log_scale(axis, "y")
    axis.plot([0, 1], [0.0021, 0.03])
    figure.draw_without_rendering()
    low, high = axis.get_ylim()
    ticks = zip(axis.get_yticks(), axis.get_yticklabels(), strict=True)
    seen = [label.get_text() for at, label in ticks if low <= at <= high]
    assert seen == ["0.002", "0.005", "0.01", "0.02"]
    assert axis.get_yticklabels(minor=True) == []


@pytest.mark.parametrize("near", [True, False])
def test_names_of_points_close_together_are_in_a_legend(
    near: bool, drawn: list[Figure], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(joined, "to_svg", figures.to_svg)
    sizes = {"original": (6.0, 0.0), "gptq": (1.71, 0.09), "awq": (1.72 if near else 4.0, 0.08)}
    points = {
        name: joined.ParetoPoint(mib * 2**20, 100.0 / mib, 3.0, kl, "t")
        for name, (mib, kl) in sizes.items()
    }
    joined.pareto_svg(points, "kl", "size")
    (axis,) = drawn[0].axes
    legends = [one.get_text() for legend in drawn[0].legends for one in legend.get_texts()]
    assert legends == ([*sizes] if near else [])
    assert [one.get_text() for one in axis.texts] == ([] if near else [*sizes])
    assert min(axis.get_yticks()) == 0


def test_each_run_is_under_its_own_ceilings(drawn: list[Figure]) -> None:
    """Runs at the same share of their own ceilings are at one place, however far these lie apart."""
    slow, fast = (roofline(flops, 1e9, of_roof=0.5) for flops in (1e9, 64e9))
    figures.roofline_svg({"slow": slow, "fast": fast})
    (axis,) = drawn[0].axes
    marks = [line for line in axis.lines if line.get_marker() in ("o", "s")]
    places = {str(line.get_label()): place_of(line) for line in marks}
    assert places["decode, slow: 50.0% of the roof"] == places["decode, fast: 50.0% of the roof"]
    assert places["prefill, slow: 50.0% of the roof"] == pytest.approx([8.0, 0.5])
    figures.roofline_svg({"slow": slow})
    (axis,) = drawn[1].axes
    assert axis.get_ylabel() == "FLOP/s" and "matmul 1 GFLOP/s" in axis.get_title(loc="left")


def test_more_runs_than_colours_are_all_drawn(drawn: list[Figure]) -> None:
    count = len(SERIES) + 2
    figures.distributions_svg({f"run{n}": figures.latency_samples(data()) for n in range(count)})
    figures.roofline_svg({f"run{n}": roofline(1e9, 1e9, of_roof=0.5) for n in range(count)})
    assert len(drawn[0].axes[0].lines) == count
    assert sum(line.get_marker() == "o" for line in drawn[1].axes[0].lines) == count


def test_a_note_names_its_runs_and_is_said_once() -> None:
    runs = {name: data(name).result for name in ("one", "two", "three")}
    runs["two"]["llmopt"]["preemptions"] = 3
    runs["three"]["llmopt"]["preemptions"] = 3
    caveats = named_caveats(runs)
    (preempted,) = caveats["warnings"]
    assert preempted.startswith("two, three: 3 sequences were preempted")
    assert len(caveats["notes"]) == 2 and "Every run: A <note> & more." in caveats["notes"]
    runs["two"]["llmopt"]["slowdown"] = 2.0
    (of_two,) = (note for note in named_caveats(runs)["warnings"] if note.startswith("two: "))
    assert "2 times as long on purpose" in of_two and "preempted" not in of_two
    runs["three"]["llmopt"]["slowdown"] = 2.0
    assert len(named_caveats(runs)["warnings"]) == 1, "caveats of the same runs stand together"
    runs["two"]["llmopt"]["slowdown"] = runs["three"]["llmopt"]["slowdown"] = 1.0
    page = joined_page([RunData(result) for result in runs.values()])
    assert page.warnings == [preempted] and page.notes == caveats["notes"]
