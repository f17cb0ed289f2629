"""Table of the formulas of all reported metrics."""

from __future__ import annotations

from ..load import certify
from ..machine import roofline
from ..metrics import metrics, run_statistics, turns
from ..page.page import Table
from ..quality import summary


def formula_table() -> Table:
    """The formula of every metric that a report shows."""
    return Table(
        ["metric", "formula"],
        [[name, text] for name, text in formulas().items()],
        is_prose=True,
        caption="Latency and throughput definitions are those of vllm bench serve.",
    )


def formulas() -> dict[str, str]:
    """{metric: formula} of all metrics."""
    return {
        **metrics.FORMULAS,
        **run_statistics.STEADY_FORMULAS,
        **turns.FORMULAS,
        **summary.FORMULAS,
        **roofline.FORMULAS,
        **certify.FORMULAS,
    }
