"""Tables of task scores, for the console and reports."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..page.page import Table


def score_words(row: Mapping[str, Any]) -> str:
    """`0.4250 ± 0.0350`; a standard error only where lm-eval gives one."""
    stderr = row["stderr"]
    return f"{row['value']:.4f}" + (f" ± {stderr:.4f}" if stderr is not None else "")


def metric_name(row: Mapping[str, Any]) -> str:
    """The metric's name, with its filter unless that is lm-eval's default."""
    return row["metric"] if row["filter"] == "none" else f"{row['metric']} ({row['filter']})"


def task_tables(results: Mapping[str, Mapping[str, Any]]) -> list[Table]:
    """Task scores of one or several runs, aligned by metric."""
    parts = {
        name: part for name, result in results.items() if (part := result["llmopt"].get("tasks"))
    }
    if not parts:
        return []
    keyed = [(row["task"], metric_name(row)) for part in parts.values() for row in part["metrics"]]
    order = {key: place for place, key in enumerate(dict.fromkeys(keyed))}
    rows = [(name, row) for name, part in parts.items() for row in part["metrics"]]
    rows.sort(key=lambda pair: order[pair[1]["task"], metric_name(pair[1])])
    cells = [
        [
            row["task"],
            metric_name(row),
            name,
            score_words(row),
            {True: "higher", False: "lower"}.get(row["higher_is_better"], ""),
            "" if row["num_samples"] is None else f"{row['num_samples']:,}",
            "" if row["num_fewshot"] is None else str(row["num_fewshot"]),
            "" if row["version"] is None else str(row["version"]),
        ]
        for name, row in rows
    ]
    versions = ", ".join(dict.fromkeys(part["lm_eval_version"] for part in parts.values()))
    protocols = dict.fromkeys(part["protocol"] for part in parts.values())
    caption = f"lm-eval {versions}: {' | '.join(protocols)}. Value ± standard error."
    for name, part in parts.items():
        if part["limit"] is not None:
            caption += f" {name}: at most {part['limit']} samples a task."
        if part["error"] is not None:
            caption += f" {name} failed: {part['error']}."
    header = ["task", "metric", "model", "value", "better", "samples", "shots", "version"]
    return [Table(header, cells, caption=caption)]
