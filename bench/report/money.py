"""Cost and energy sections of a report."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..metrics.run_statistics import COST_FORMULAS
from ..page.page import Section, Table, number


def money_sections(results: Mapping[str, Mapping[str, Any]]) -> list[Section]:
    """Cost and energy of one or several runs; nothing where neither is known."""
    tables = [table for table in (cost_table(results), energy_table(results)) if table.rows]
    if not tables:
        return []
    used = [key for key in COST_FORMULAS if key.startswith("usd") or len(tables) > 1]
    paragraph = "; ".join(f"{key}: {COST_FORMULAS[key]}" for key in used) + "."
    return [Section("Money and energy", (paragraph,), (), tables)]


def cost_table(results: Mapping[str, Mapping[str, Any]]) -> Table:
    """Dollars per million tokens of the runs that have a price."""
    header = ["model", "price of an hour", "$/M input", "$/M output", "$/M all tokens"]
    rows = []
    for name, result in results.items():
        if cost := result["llmopt"].get("cost"):
            per_million = (
                cost[f"usd_per_million_{side}_tokens"] for side in ("input", "output", "total")
            )
            price = f"${cost['hour_price']:g}"
            rows.append([name, price, *(number(value, 4) for value in per_million)])
    return Table(header, rows)


def energy_table(results: Mapping[str, Mapping[str, Any]]) -> Table:
    """Joules of the runs with energy counters."""
    header = ["model", "CPU (J)", "GPU (J)", "J/M input tokens", "J/M output tokens"]
    rows = []
    for name, result in results.items():
        energy = result["llmopt"].get("energy")
        if energy and energy["joules"] is not None:
            keys = ("cpu_joules", "gpu_joules", "joules_per_million_input_tokens",
                    "joules_per_million_output_tokens")  # fmt: skip
            rows.append([name, *(number(energy[key], 1) for key in keys)])
    return Table(header, rows)
