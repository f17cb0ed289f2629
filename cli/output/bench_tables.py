"""Terminal output of `llmopt bench`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

    from ...bench.options.options import BenchOptions
    from ...bench.page.page import Table


def show_run(result: dict[str, Any], options: BenchOptions, out: Console) -> None:
    """Print the metrics table, a summary, and the comparison with a plan if there is one."""
    from ...bench.report.console_table import console_table
    from .console import people

    table = console_table(result, options.reported_metrics, options.metric_percentiles)
    out.print(table, markup=False)
    out.print(_summary(result), markup=False)
    if against := result["llmopt"].get("plan"):
        from ...bench.report.plan_residuals import residual_table

        out.print(residual_table(against))
        for difference in against["differs"]:
            people.print(f"not as planned: {difference}", markup=False, soft_wrap=True)


def print_table(shown: Table, out: Console) -> None:
    """Print a report's table on the console."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE, padding=0)
    for heading in shown.header:
        table.add_column(heading, justify="right", no_wrap=True)
    for row in shown.rows:
        table.add_row(*row)
    out.print(table)


def _summary(result: Mapping[str, Any]) -> str:
    """Quality, memory and precision of the run in a few lines."""
    from ...bench.metrics.turn_report import turns_in_words, window_sentence
    from ...bench.page.page import number, percent, size

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
    if client := ours.get("client"):
        from ...bench.report.client_report import certificate

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
        lines.append(
            f"Smallest change of throughput that {ours['num_runs']} "
            f"{'pass' if ours['num_runs'] == 1 else 'passes'} could have shown: "
            f"{percent(spread['smallest_visible_change'])}"
        )
    return "\n".join(lines)
