"""Raw traces of requests, engine steps and passes; the engine's step trace as totals and `steps.parquet`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ...engine.execution.step_loop import StepTrace

STEPS_NAME = "steps.parquet"
READ_SECONDS = 5e-5
"""Chunks that come faster than this on average, 20,000 a second for one request, were read from a buffer."""


@dataclass(slots=True)
class RequestTrace:
    """One request as seen by the load driver. Times are seconds from the start of the pass; a request was due
    (`scheduled`) at its arrival, or at the end of the turn before plus the think time. A chunk is one
    streamed delivery; it may hold several tokens, all with the time of the delivery. A conversation's turns
    count from 0; `cycle` is the number of earlier repetitions of the workload. `hidden_tokens` are reasoning
    tokens that the server counted and did not stream, which `output_len` lacks; `cached_tokens` is None where
    it says nothing of them. `history_tokens` are those of the answer that the next turn's prompt holds; None:
    all of them."""

    request_id: str
    prompt_len: int
    wanted_len: int
    scheduled: float
    sent: float
    chunk_times: list[float] = field(default_factory=list)
    chunk_tokens: list[int] = field(default_factory=list)
    success: bool = False
    error: str = ""
    text: str = ""
    cached_tokens: int | None = 0
    conversation: str = ""
    turn: int = 0
    cycle: int = 0
    prompt_token_ids: tuple[int, ...] = ()
    token_ids: list[int] = field(default_factory=list)
    lora: str | None = None
    hidden_tokens: int = 0
    history_tokens: int | None = None

    @property
    def output_len(self) -> int:
        return sum(self.chunk_tokens)

    @property
    def ttft(self) -> float:
        return self.chunk_times[0] - self.sent

    @property
    def e2el(self) -> float:
        return self.chunk_times[-1] - self.sent

    @property
    def ended(self) -> float:
        """The time of the last chunk, or of sending without one."""
        return self.chunk_times[-1] if self.chunk_times else self.sent

    @property
    def queued(self) -> float:
        return self.sent - self.scheduled

    @property
    def tpot(self) -> float | None:
        """Seconds per output token after the first; None without a second token, or without a stream."""
        if self.output_len < 2 or not self.is_streamed:
            return None
        return (self.e2el - self.ttft) / (self.output_len - 1)

    @property
    def is_streamed(self) -> bool:
        """False for an answer of several tokens that came in one piece, as through a proxy that buffers."""
        if self.output_len < 2:
            return True
        return self.e2el - self.ttft > READ_SECONDS * (len(self.chunk_times) - 1)

    @property
    def itls(self) -> list[float]:
        times = self.chunk_times if self.is_streamed else []
        return [later - earlier for earlier, later in pairwise(times)]

    @property
    def token_gaps(self) -> list[float]:
        """One gap per token after the first chunk: a chunk's gap divided over its tokens."""
        gaps = self.itls
        counts = self.chunk_tokens[1:] if gaps else []
        return [gap / count for gap, count in zip(gaps, counts, strict=True) for _ in range(count)]


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step of an in-process engine; times are seconds from the start of the pass. `num_first` sequences
    produced their first token. In a `decode_only` step every running sequence produced exactly its next
    token, and `context_tokens` of the KV cache were read, summed over its sequences. `computed_tokens` are
    prefill and decode."""

    start: float
    end: float
    num_sequences: int
    num_first: int
    decode_only: bool
    context_tokens: int = 0
    computed_tokens: int = 0

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(slots=True)
class LoadPass:
    """One pass over a workload: request traces, steps, and duration. `steps` are as seen by the client,
    `engine_steps` the engine's step trace. `began_at` is the wall clock at its start, in seconds since the
    epoch. A pass of fixed duration has a `window`: seconds after which nothing was sent. Requests in flight
    then were drained; `duration` is the window, `drain_seconds` the time after it. `cancelled` counts
    requests that the client left as the trace's did; they have no trace here."""

    traces: list[RequestTrace]
    duration: float
    steps: list[StepRecord] = field(default_factory=list)
    interrupted: bool = False
    began_at: float = 0.0
    engine_steps: list[StepTrace] = field(default_factory=list)
    window: float | None = None
    drain_seconds: float = 0.0
    cancelled: int = 0

    def is_drained(self, trace: RequestTrace) -> bool:
        return self.window is not None and trace.ended > self.window

    @property
    def all_tokens(self) -> tuple[int, int]:
        """(prompt, output) tokens of the successful requests, including those drained after the window: the
        energy counters run until the last of them."""
        done = [trace for trace in self.traces if trace.success]
        return sum(trace.prompt_len for trace in done), sum(trace.output_len for trace in done)

    def tokens_in_window(self) -> tuple[int, int]:
        """(prompt, output) tokens of the successful requests; with a window, prompts with their first chunk
        and output tokens within it."""
        end = math.inf if self.window is None else self.window
        done = [trace for trace in self.traces if trace.success]
        prompt = sum(trace.prompt_len for trace in done if trace.chunk_times[0] <= end)
        return prompt, tokens_between(done, -math.inf, end)


def tokens_between(traces: Iterable[RequestTrace], start: float, end: float) -> int:
    """Output tokens of the successful requests that came in a time, both ends included."""
    return sum(
        count
        for trace in traces
        if trace.success
        for time, count in zip(trace.chunk_times, trace.chunk_tokens, strict=True)
        if start <= time <= end
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

    slots = total("kv_blocks_used") * block_size
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
        # Internal fragmentation: share of the slots in used KV blocks without a token, over all steps.
        "kv_unfilled_share": total("kv_slots_unfilled") / slots if slots else 0.0,
    }


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
