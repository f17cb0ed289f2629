"""Pages in Chromium, on phones and desktops, light and dark: nothing is cut off, hard to read, or upon each other."""

from __future__ import annotations

import asyncio
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from llmopt.bench.best.best_page import best_page
from llmopt.bench.gate.compare import compare
from llmopt.bench.page.page import Page, to_html
from llmopt.bench.record.result import RunData
from llmopt.bench.report.comparison import comparison_page
from llmopt.bench.report.joined import joined_page
from llmopt.bench.studies.recipe_page import recipe_page

from ...support.browser import CHROMIUM, opened_page
from ..best.decisions import a_decision
from .test_looks import LEAST_CONTRAST, roofline
from .test_recipe_page import a_recipe
from .test_report_pages import data

LOWEST_CONTRAST = """
(() => {
  const probe = document.createElement('canvas').getContext('2d');
  const parts = (colour) => { probe.fillStyle = colour; probe.fillRect(0, 0, 1, 1);
    return [...probe.getImageData(0, 0, 1, 1).data].slice(0, 3); };
  const light = (colour) => { const [r, g, b] = parts(colour).map((v) => v / 255).map(
    (v) => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
  const ground = light(getComputedStyle(document.body).backgroundColor);
  return Math.min(...[...document.querySelectorAll('svg text')].map((text) => {
    const ink = light(getComputedStyle(text).fill);
    return (Math.max(ink, ground) + 0.05) / (Math.min(ink, ground) + 0.05); })); })()
"""
OVERLAPS = """
[...document.querySelectorAll('svg')].flatMap((svg) => {
  const boxes = [...svg.querySelectorAll('text')].map((text) => [text.textContent,
    text.getBoundingClientRect()]).filter(([_, box]) => box.width > 0);
  return boxes.flatMap(([name, a], place) => boxes.slice(place + 1).filter(([_, b]) =>
    Math.min(a.right, b.right) - Math.max(a.left, b.left) > 2 &&
    Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 3
  ).map(([other]) => `${name} | ${other}`)); })
"""


CUT = """
[...document.querySelectorAll('.scroll, .verdict, .cards, ul')].filter((part) =>
  part.scrollWidth > part.clientWidth + 1).map((part) => part.textContent.slice(0, 60))
"""


def a_joined_page() -> Page:
    """Three runs, each under its own ceilings, with names as people give them."""
    runs = []
    for place, name in enumerate(("SmolLM2-135M-original", "SmolLM2-gptq-int4-g64", "Q4_K_M")):
        one = data(name, 1 + place / 10)
        one.result["llmopt"]["roofline"] = roofline_of(1e11 * (1 + place), 2e10)
        runs.append(RunData(one.result, one.requests))
    return joined_page(runs)


def roofline_of(flops: float, bandwidth: float) -> dict[str, Any]:
    found = roofline(flops, bandwidth, of_roof=0.5)
    for point in found["points"]:
        point |= {"bytes_per_step": 1e8, "achieved_bandwidth": 1e10, "mbu": 0.5, "mfu": 0.2}
        point |= {"bound": "memory", "explanation": "It reads weights."}
    return found


PAGES = {
    "best": lambda: best_page(a_decision()),
    "comparison": lambda: comparison_page(*(two := (data("base"), data("new"))), compare(*two)),
    "joined": a_joined_page,
    "recipe": lambda: recipe_page(a_recipe(100, 104, "float32", "float32")),
}


@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here")
@pytest.mark.parametrize(
    "names",
    [
        ("best", "comparison"),
        pytest.param(("joined", "recipe"), marks=pytest.mark.whole),
    ],
)
def test_a_browser_shows_readable_charts_on_phones_and_desktops(
    names: tuple[str, ...], tmp_path: Path
) -> None:
    grounds, found = set(), {}
    for name in names:
        (tmp_path / f"{name}.html").write_text(to_html(PAGES[name]()), encoding="utf-8")

    async def visit() -> None:
        async with opened_page() as page:
            for name, (width, scheme) in product(
                names, ((320, "light"), (390, "dark"), (1280, "dark"))
            ):
                url = (tmp_path / f"{name}.html").as_uri()
                await page.open(url, width=width, scheme=scheme)
                assert await page.run("document.documentElement.scrollWidth") <= width, name
                assert await page.run(CUT) == [], (name, width)
                assert await page.run(LOWEST_CONTRAST) >= LEAST_CONTRAST, name
                grounds.add(await page.run("getComputedStyle(document.body).backgroundColor"))
                found[name, width] = await page.run(OVERLAPS)
                assert not page.problems

    asyncio.run(visit())
    assert len(grounds) == 2
    assert {where: texts for where, texts in found.items() if texts} == {}
