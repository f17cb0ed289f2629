"""The files of a finished comparison by starts: `comparison.json`, `.html` and `.md`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ...quant.base.atomic_io import write_atomically
from ..gate.limits import MEASURED
from ..gate.measured_starts import value_of_start
from ..page.page import Page, Section, Table, number, to_html, to_markdown
from ..record.result import RunData, plain, to_json
from ..report.comparison_page import comparison_page, verdict_of
from .series import Finished

SHOWN = ("duration", "cpu_seconds", "waiting_seconds", "output_throughput", "median_tpot_ms")


def record_of(finished: Finished) -> dict[str, Any]:
    """`comparison.json`: the verdict, the plan, and each start's values."""
    starts = {
        name: [{key: value_of_start(one, key) for key in SHOWN} for one in side]
        for name, side in (("base", finished.base), ("new", finished.new))
    }
    return plain(
        {
            **finished.comparison.as_dict(),
            "stopped_because": finished.stopped_because,
            "plan": asdict(finished.plan),
            "starts": starts,
        }
    )


def write_comparison(finished: Finished, folder: Path) -> None:
    """Write the files; without a finished pair there is no page of two runs to show."""
    write_atomically(folder / "comparison.json", to_json(record_of(finished)))
    write_atomically(folder / "comparison.html", to_html(page_of(finished)))
    write_atomically(folder / "comparison.md", to_markdown(page_of(finished, with_figures=False)))


def page_of(finished: Finished, *, with_figures: bool = True) -> Page:
    """The comparison page of all starts, with a section on each of them."""
    if not finished.new:
        plan, comparison = finished.plan, finished.comparison
        return Page(
            title=f"{plan.new.name} against {plan.base.name}",
            subtitle=f"{plan.base.spec} and {plan.new.spec}",
            verdict=verdict_of(comparison),
            cards=[],
            sections=[],
            warnings=[],
        )
    base, new = pooled(finished.base), pooled(finished.new)
    page = comparison_page(base, new, finished.comparison, with_figures=with_figures)
    first, *others = page.sections
    return replace(page, sections=[first, starts_section(finished), *others])


def starts_section(finished: Finished) -> Section:
    """Every start with its median pass, in the order of the pairs."""
    rows = []
    for pair, sides in enumerate(zip(finished.base, finished.new, strict=True), 1):
        for data in sides if pair % 2 else sides[::-1]:
            passes = data.result["llmopt"]["runs"]
            rows.append(
                [
                    str(pair),
                    data.name,
                    *(number(value_of_start(data, key), 3) for key in SHOWN),
                    str(data.result["llmopt"].get("num_cold_passes", 0)),
                    f"{sum(bool(one.get('disturbed')) for one in passes)} of {len(passes)}",
                ]
            )
    labels = [f"{MEASURED[key].label} ({MEASURED[key].unit})" for key in SHOWN]
    words = (
        f"{len(finished.new)} pairs of starts, alternating in the order ABBA; it ended because of "
        f"{finished.stopped_because}. Each start is a fresh process, and counts once: by the median of its "
        "undisturbed warm passes.",
    )
    header = ["pair", "build", *labels, "cold passes", "disturbed"]
    return Section("Starts", words, (), (Table(header, rows),), folded=True)


def pooled(starts: Sequence[RunData]) -> RunData:
    """The passes of all starts as one run, for figures and dashboards; the rest is the first start's."""
    first = starts[0]
    runs = [one for start in starts for one in start.result["llmopt"]["runs"]]
    ours = {**first.result["llmopt"], "runs": runs, "num_runs": len(runs)}
    tables = [start.requests for start in starts]
    requests: dict[str, list[Any]] | None = None
    if all(table is not None for table in tables):
        columns = first.requests or {}
        requests = {
            key: [cell for table in tables for cell in (table or {})[key]] for key in columns
        }
    return RunData({**first.result, "llmopt": ours}, requests)
