"""Engine step trace: `steps.parquet`, its figure and totals. In-process engines only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from ...engine.execution.step_loop import StepTrace
from ..page.page import number, percent
from ..page.plot_style import BAD, DECODE, INK, MUTED, PREFILL, canvas, title, to_svg
from .trace import LoadPass

STEPS_NAME = "steps.parquet"
NUM_BINS = 240
CAPTION = (
    "First pass. Tokens computed by the model, prefill and decode, and below them the KV blocks held by the "
    "running sequences."
)


def in_pass(steps: Sequence[StepTrace], load_pass: LoadPass) -> list[StepTrace]:
    """The steps of a pass with their times from its start."""
    if not steps or not load_pass.steps:
        return []
    origin = steps[0].start - load_pass.steps[0].start
    return [replace(step, start=step.start - origin) for step in steps]


def step_trace_part(passes: Sequence[LoadPass], block_size: int) -> dict[str, Any] | None:
    """Totals over the steps of all passes; None without a step trace."""
    steps = [step for load_pass in passes for step in load_pass.engine_steps]
    if not steps:
        return None

    def total(name: str) -> Any:
        return sum(getattr(step, name) for step in steps)

    return {
        "num_steps": len(steps),
        "prefill_tokens": total("prefill_tokens"),
        "decode_tokens": total("decode_tokens"),
        "mean_rows": total("num_rows") / len(steps),
        "schedule_seconds": total("schedule_seconds"),
        "execute_seconds": total("execute_seconds"),
        "update_seconds": total("update_seconds"),
        "preemptions": total("num_preemptions"),
        "peak_kv_blocks": max(step.kv_blocks_used for step in steps),
        "kv_unfilled_share": unfilled_share(steps, block_size),
    }


def unfilled_share(steps: Sequence[StepTrace], block_size: int) -> float:
    """Internal fragmentation: fraction of the slots in used KV blocks without a token, over all steps."""
    slots = sum(step.kv_blocks_used for step in steps) * block_size
    return sum(step.kv_slots_unfilled for step in steps) / slots if slots else 0.0


def write_steps(path: Path, passes: Sequence[LoadPass]) -> None:
    """`steps.parquet`: a row for each step, with the number of its pass; nothing without a step trace."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [
        {"run": run, **asdict(step)}
        for run, load_pass in enumerate(passes)
        for step in load_pass.engine_steps
    ]
    for row in rows:
        del row["phases"]  # not recorded in measured passes
    if rows:
        pq.write_table(pa.Table.from_pylist(rows), path)


def steps_svg(load_pass: LoadPass) -> str:
    """Tokens of prefill and decode over the time of a pass, and the KV blocks in use."""
    steps = load_pass.engine_steps
    starts = np.array([step.start for step in steps])
    spans = [s.schedule_seconds + s.execute_seconds + s.update_seconds for s in steps]
    ends = np.maximum.accumulate(starts + np.array(spans))
    edges = np.linspace(0.0, max(load_pass.duration, ends[-1]), NUM_BINS + 1)
    decode = _rate([s.decode_tokens for s in steps], starts, ends, edges)
    prefill = _rate([s.prefill_tokens for s in steps], starts, ends, edges)
    figure, (tokens, blocks) = canvas(
        1, 2, width=11, height=4.2, sharex=True, gridspec_kw={"height_ratios": [2, 1]}
    )
    tokens.stairs(decode, edges, fill=True, color=DECODE, alpha=0.85, label="decode")
    tokens.stairs(
        decode + prefill, edges, baseline=decode, fill=True, color=PREFILL, label="prefill"
    )
    preempted = [step.start for step in steps if step.num_preemptions]
    if preempted:
        top = float((decode + prefill).max())
        tokens.plot(
            preempted, [top] * len(preempted), "v", color=BAD, markersize=5, label="preemption"
        )
    tokens.set_ylabel("tokens/s")
    tokens.legend(loc="upper right", ncols=3, fontsize=9, bbox_to_anchor=(1, 1.16), frameon=False)
    title(tokens, "Tokens computed by the steps")
    # A step holds its blocks until the next step is scheduled.
    latest = np.maximum(np.searchsorted(starts, edges[:-1], side="right") - 1, 0)
    used = np.array([step.kv_blocks_used for step in steps])[latest]
    blocks.stairs(used, edges, fill=True, color=MUTED, alpha=0.35)
    blocks.stairs(used, edges, color=INK, linewidth=1.2)
    blocks.set_ylabel("KV blocks")
    blocks.set_xlabel("seconds from the start of the pass")
    blocks.set_ylim(bottom=0)
    blocks.set_xlim(0, edges[-1])
    return to_svg(figure, "Prefill and decode tokens of the steps over time, and KV blocks in use")


def _rate(
    tokens: Sequence[int], starts: np.ndarray, ends: np.ndarray, edges: np.ndarray
) -> np.ndarray:
    """Tokens per second in each bin, with a step's tokens spread evenly over its duration."""
    sums = np.concatenate([[0], np.cumsum(tokens)])
    times = np.column_stack([starts, ends]).ravel()
    counts = np.column_stack([sums[:-1], sums[1:]]).ravel()
    return np.diff(np.interp(edges, np.maximum.accumulate(times), counts)) / np.diff(edges)


def step_trace_sentence(part: Mapping[str, Any]) -> str:
    """The totals in words."""
    seconds = {name: part[f"{name}_seconds"] for name in ("execute", "schedule", "update")}
    whole = sum(seconds.values())
    return (
        f"The engine took {part['num_steps']:,} steps with {number(part['mean_rows'], 1)} sequences in the "
        f"mean, for {part['prefill_tokens']:,} tokens of prefill and {part['decode_tokens']:,} of decode. "
        f"{percent(seconds['execute'] / whole)} of their time went to the model and the sampler, "
        f"{percent(seconds['schedule'] / whole)} to scheduling and {percent(seconds['update'] / whole)} to "
        f"processing outputs. At most {part['peak_kv_blocks']:,} KV blocks were in use at once; "
        f"{percent(part['kv_unfilled_share'])} of the slots in them held no token. "
        f"{part['preemptions']:,} sequences were preempted."
    )
