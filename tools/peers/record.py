"""Write docs/measured/peers.md from the records of tools/cpu_peers.py: rates, ratios, start-up, memory.

python -m tools.peers.record [--check]
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from tools.document_part import ROOT, put_part

MIB = 2**20
COLUMNS = {
    "import_seconds": "importing",
    "load_seconds": "loading",
    "first_token_seconds": "first token",
    "process_seconds": "process to first token",
}
"""Figures of an engine's start-up."""
RESIDENT = "started_rss"
TORCH = "import torch"
"""The row of a process that does nothing else."""


def rates(found: Sequence[Mapping[str, Any]], row: str, case: str) -> dict[int, float]:
    """By round."""
    mine = (one for one in found if (one["row"], one["case"]) == (row, case))
    return {one["round"]: one["rate"] for one in mine if "rate" in one}


def over(mine: Mapping[int, float], other: Mapping[int, float]) -> dict[str, Any] | None:
    """Mine over the other's, round by round; None where they share no round."""
    by_round = [mine[number] / other[number] for number in mine if number in other]
    if not by_round:
        return None
    return {
        "median": statistics.median(by_round),
        "lowest": min(by_round),
        "highest": max(by_round),
        "rounds": len(by_round),
    }


def show(record: Mapping[str, Any]) -> str:
    """All tables of a record."""
    roof = max(record["read_bytes_per_second"])
    operations = max(record["int8_operations_per_second"])
    level = f" by {record['instructions']}" if record.get("instructions") else ""
    head = (
        f"{record['shape']}, {record['processor']}{level}, {record['threads']} threads, "
        f"{record['rounds']} rounds, roofs: read {roof / 1e9:.1f} GB/s, 8-bit {operations / 1e9:,.0f} GOP/s"
    )
    tables = [rates_table(record), ratios_table(record["ratios"]), memory_table(record)]
    if record.get("loads"):
        tables.insert(2, loads_table(record["loads"], record["load_ratios"]))
    return "\n\n".join([head, *("\n".join(table) for table in tables)])


def rates_table(record: Mapping[str, Any]) -> list[str]:
    """Medians with the lowest and highest round, and the share of the roof."""
    cases = record["cases"]
    lines = ["| tokens/s, of the roof | " + " | ".join(cases) + " |", "|---|" + "---|" * len(cases)]
    for row in record["rows"]:
        cells = []
        for case in cases:
            seen = list(rates(record["found"], row["name"], case).values())
            if not seen:
                tried = any(
                    (one["row"], one["case"]) == (row["name"], case) for one in record["found"]
                )
                cells.append("failed" if tried else "-")
                continue
            middle = statistics.median(seen)
            of_roof = roof_share(record, row.get("work", {}).get(case), middle)
            shown = "" if of_roof is None else f", {of_roof:.0%}"
            cells.append(f"{middle:,.1f} ({min(seen):,.1f}-{max(seen):,.1f}){shown}")
        lines.append(f"| {row['name']} | " + " | ".join(cells) + " |")
    return lines


def roof_share(
    record: Mapping[str, Any], work: Mapping[str, float] | None, rate: float
) -> float | None:
    """The least time that the bytes and 8-bit operations of a step allow, over the time taken."""
    if work is None:
        return None
    least = max(
        work["bytes"] / max(record["read_bytes_per_second"]),
        work["operations"] / max(record["int8_operations_per_second"]),
    )
    return least * rate / work["tokens"]


def ratios_table(ratios: Sequence[Mapping[str, Any]]) -> list[str]:
    """Ours over theirs."""
    lines = ["| ours / theirs | case | ratio |", "|---|---|---|"]
    for one in ratios:
        lines.append(f"| {one['ours']} / {one['theirs']} | {one['case']} | {spread(one)} |")
    return lines


def spread(one: Mapping[str, Any]) -> str:
    return f"{one['median']:.2f} ({one['lowest']:.2f}-{one['highest']:.2f})"


def seconds(measured: Sequence[Mapping[str, Any]], row: str, column: str) -> dict[int, float]:
    """By round; of the imports what a process took before it began to load."""
    if column == "import_seconds":
        whole, own = (
            seconds(measured, row, each) for each in ("process_seconds", "first_token_seconds")
        )
        return {number: whole[number] - own[number] for number in own}
    mine = (entry for entry in measured if entry["row"] == row and column in entry)
    return {entry["round"]: entry[column] for entry in mine}


def loads_table(
    measured: Sequence[Mapping[str, Any]], ratios: Sequence[Mapping[str, Any]]
) -> list[str]:
    """Start-up: the medians with the lowest and highest round, and ours over theirs."""
    names = dict.fromkeys(entry["row"] for entry in measured)
    held = any(RESIDENT in entry for entry in measured)
    head = [*COLUMNS.values(), *(["resident"] if held else [])]
    lines = ["| start, seconds | " + " | ".join(head) + " |", "|---|" + "---|" * len(head)]
    for name in names:
        cells = []
        for column in COLUMNS:
            seen = list(seconds(measured, name, column).values())
            shown = seen and f"{statistics.median(seen):.2f} ({min(seen):.2f}-{max(seen):.2f})"
            cells.append(shown or "")
        if held:
            seen = list(seconds(measured, name, RESIDENT).values())
            cells.append(f"{statistics.median(seen) / MIB:,.0f} MiB" if seen else "")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    if ratios:
        lines += ["", "| seconds, ours / theirs | | ratio |", "|---|---|---|"]
    for one in ratios:
        name = f"{one['ours']} / {one['theirs']}"
        lines.append(f"| {name} | {COLUMNS[one['column']]} | {spread(one)} |")
    return lines


def memory_table(record: Mapping[str, Any]) -> list[str]:
    """Peak memory of our processes, and what of it are weights and KV cache."""
    lines = ["| memory | peak | weights | KV cache | rest |", "|---|---|---|---|---|"]
    for row in record["rows"]:
        if (memory := row["about"].get("memory")) is None:
            continue
        of_row = (one for one in record["found"] if one["row"] == row["name"])
        peaks = [one["peak_rss"] for one in of_row if "peak_rss" in one]
        if peaks:
            rest = max(peaks) - memory["weight_bytes"] - memory["kv_cache_bytes"]
            sizes = (max(peaks), memory["weight_bytes"], memory["kv_cache_bytes"], rest)
            shown = " | ".join(f"{size / MIB:,.0f} MiB" for size in sizes)
            lines.append(f"| {row['name']} | {shown} |")
    return lines


def made() -> str:
    """The tables of each record under its name."""
    parts = []
    folder = ROOT / "docs/measured/cpu"
    for path in [
        *sorted(folder.glob("cpu-peers-*.json")),
        *sorted(folder.glob("cpu-formats-*.json")),
    ]:
        record = json.loads(path.read_text(encoding="utf-8"))
        parts.append(f"### {path.name}\n\n{show(record)}")
    return "\n\n".join(parts)


if __name__ == "__main__":
    put_part("docs/measured/peers.md", "peers/record.py", __doc__, made)
