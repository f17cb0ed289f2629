"""Terminal output of a comparison."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

    from ...bench.gate.compare import Comparison


def print_comparison(comparison: Comparison, out: Console) -> None:
    """Print the comparison table and the verdict."""
    from rich import box
    from rich.table import Table

    from ...bench.page.page import number, percent
    from ...bench.report.comparison_tables import (
        check_rows,
        memory_rows,
        operating_table,
        quality_rows,
        task_rows,
    )

    title = f"{comparison.new} against {comparison.base}"
    # The page has the intervals too; 80 columns fit only these.
    table = Table(title=title, title_justify="left", box=box.SIMPLE, padding=0)
    for heading in ("", "base", "new", "change", "± 90 %", "limit", "verdict"):
        table.add_column(heading, justify="left" if not heading else "right")
    for delta in comparison.deltas:
        table.add_row(
            f"{delta.label} ({delta.unit})",
            number(delta.base),
            number(delta.new),
            percent(delta.change, signed=True),
            percent((delta.high - delta.low) / 2) if math.isfinite(delta.high) else "unbounded",
            delta.limit,
            delta.outcome.value,
        )
    for row in check_rows(comparison.checks):
        table.add_row(*row)
    table.add_section()
    for row in [*quality_rows(comparison), *task_rows(comparison), *memory_rows(comparison)]:
        table.add_row(*row)
    if table.row_count:
        out.print(table)
    if comparison.curves:
        curves = operating_table(comparison.curves)
        chances = Table(
            title="Chance of each verdict", title_justify="left", box=box.SIMPLE, padding=0
        )
        for heading in curves.header:
            chances.add_column(heading, justify="left" if heading == "limit" else "right")
        for row in curves.rows:
            chances.add_row(*row)
        out.print(chances)
    for note in comparison.notes:
        out.print(f"note: {note}", markup=False)
    out.print(f"{comparison.outcome.value.upper()}: {comparison.sentence}", markup=False)
