"""Terminal output of runs and comparisons."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from ...bench.gate.compare import Comparison
    from ...bench.gate.verdict import MeasuredVerdict
    from ...bench.options.options import BenchOptions


def show_run(result: dict[str, Any], options: BenchOptions, out: Console) -> None:
    """Print the metrics table, a summary, and the comparison with a plan if there is one."""
    from ...bench.report.run_report import console_table, plan_table
    from .console import say, table_of

    out.print(console_table(result, options.reported_metrics, options.metric_percentiles))
    out.print(_summary(result))
    if against := result["llmopt"].get("plan"):
        shown = plan_table(against)
        style = {"padding": (0, 1, 0, 0), "pad_edge": False}
        out.print(table_of(shown.header, shown.rows, left=(0, 4), no_wrap=range(4), **style))
        for difference in against["differs"]:
            say(f"not as planned: {difference}")
        if against["row"]:
            what = "kv-plan --measured takes this run, or a folder of such runs"
            say(f"a row of this machine: {what}")


def plain_table(header: Sequence[str], rows: Iterable[Sequence[str]] = (), **style: Any) -> Table:
    """A table without padding, as narrow as can be."""
    from rich import box

    from .console import table_of

    return table_of(header, rows, box=box.SIMPLE, padding=0, **style)


def _summary(result: Mapping[str, Any]) -> str:
    from ...bench.metrics.metrics import turns_in_words, window_sentence
    from ...bench.page.page import number, percent, size
    from ...bench.report.run_report import certificate, failure_lines

    ours = result["llmopt"]
    lines = []
    if scored := ours["quality"]:
        line = f"Perplexity {number(scored['perplexity'], 3)} on {scored['num_tokens']:,} tokens"
        if scored["kl_nats"] is not None:
            bound = "≥ " if (scored.get("served") or {}).get("kl_is_lower_bound") else ""
            tail = scored.get("p99_kl_nats")
            line += f", KL {bound}{scored['kl_nats']:.4f} nats"
            line += "" if tail is None else f" (p99 {tail:.4f})"
            line += f", top-1 {percent(scored['top1_agreement'])}"
        lines.append(line)
    elif reason := ours.get("quality_reason"):
        lines.append(f"Quality: {reason}")
    if conversations := ours.get("conversations"):
        lines.append(turns_in_words(conversations))
    if window := ours.get("window"):
        lines.append(window_sentence(window))
    memory = ours["memory"]
    lines += failure_lines(result)
    lines += [line[0].upper() + line[1:] for line in ours.get("silent_failures") or ()]
    if client := ours.get("client"):
        lines.append(certificate(client))
    else:
        cache, trace = memory["kv_cache"], ours["step_trace"]
        lines.append(
            f"Weights {size(memory['weight_bytes'])}, KV cache up to {size(memory['kv_cache_bytes'])}, "
            f"peak {size(memory['peak_resident_bytes'])}"
        )
        lines.append(
            f"KV cache in {cache['dtype']}: {cache['tokens']:,} tokens of {cache['bytes_per_token']:,} "
            f"bytes, at most {trace['peak_kv_blocks']:,} of {cache['blocks']:,} blocks in use, "
            f"{percent(trace['kv_unfilled_share'])} of the slots in them empty"
        )
    if spread := ours["spread"].get("output_throughput"):
        passes = f"{ours['num_runs']} {'pass' if ours['num_runs'] == 1 else 'passes'}"
        change = percent(spread["smallest_visible_change"])
        lines.append(f"Smallest change of throughput that {passes} could have shown: {change}")
    return "\n".join(lines)


def _half_width(delta: MeasuredVerdict) -> str:
    from ...bench.page.page import percent

    return percent(delta.half_width) if math.isfinite(delta.high) else "unbounded"


def print_comparison(comparison: Comparison, out: Console) -> None:
    from ...bench.report.comparison import (
        aspect_rows,
        check_rows,
        delta_rows,
        operating_table,
        unlimited_table,
    )

    # The page has the intervals too; 80 columns fit only these.
    header = ("", "base", "new", "change", "± 90 %", "limit", "verdict")
    table = plain_table(header, title=comparison.title)
    for row in [*delta_rows(comparison.deltas, _half_width), *check_rows(comparison.checks)]:
        table.add_row(*row)
    table.add_section()
    limited = tuple(check.label for check in comparison.checks)
    for row in unlimited_table(comparison).rows:
        if not row[0].startswith(limited):
            table.add_row(*row)
    if table.row_count:
        out.print(table)
    if comparison.curves:
        curves = operating_table(comparison.curves)
        out.print(plain_table(curves.header, curves.rows, title="Chance of each verdict"))
    for aspect, verdict, explanation in aspect_rows(comparison):
        out.print(f"{aspect:<8} {verdict:<12} {explanation}", markup=False, soft_wrap=True)
    if comparison.differs_by:
        out.print(f"differs by: {'; '.join(comparison.differs_by)}", markup=False, soft_wrap=True)
    for note in comparison.notes:
        out.print(f"note: {note}")
    out.print(f"{comparison.outcome.value.upper()}: {comparison.sentence}")
