"""The files of a finished comparison by starts: `comparison.json`, `.html` and `.md`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ...quant.base.atomic_io import write_atomically
from ..gate.limits import MEASURED
from ..gate.measured_starts import value_of_start
from ..page.page import Page, to_html, to_markdown
from ..page.templates import page_of
from ..record.result import RunData, plain, to_json
from ..report.comparison import comparison_page, verdict_of
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
    write_atomically(folder / "comparison.html", to_html(starts_page(finished)))
    write_atomically(
        folder / "comparison.md", to_markdown(starts_page(finished, with_figures=False))
    )


def starts_page(finished: Finished, *, with_figures: bool = True) -> Page:
    """The comparison page of all starts, with a section on each of them."""
    if not finished.new:
        return page_of(
            "starts/crashed.jinja", plan=finished.plan, verdict=verdict_of(finished.comparison)
        )
    pairs = enumerate(zip(finished.base, finished.new, strict=True), 1)
    return comparison_page(
        pooled(finished.base),
        pooled(finished.new),
        finished.comparison,
        with_figures=with_figures,
        template="starts/comparison.jinja",
        finished=finished,
        order=[
            (pair, one) for pair, sides in pairs for one in (sides if pair % 2 else sides[::-1])
        ],
        shown=[MEASURED[key] for key in SHOWN],
        value_of_start=value_of_start,
    )


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
