"""Raw traces of requests, engine steps and passes: times only, nothing derived."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ...engine.execution.step_loop import StepTrace


@dataclass(slots=True)
class RequestTrace:
    """One request as seen by the load driver. Times are seconds from the start of the pass.

    A chunk is one streamed delivery; it may hold several tokens, all with the time of the delivery.

    Attributes:
        conversation: the id of the workload's item.
        turn: position in its conversation, from 0.
        cycle: how often the workload had been repeated before.
        scheduled: when it was due: its arrival, or the end of the turn before plus the think time.
        prompt_token_ids, token_ids: prompt and answer of a conversation's turn, where the target tells them.
    """

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
    cached_tokens: int = 0
    conversation: str = ""
    turn: int = 0
    cycle: int = 0
    prompt_token_ids: tuple[int, ...] = ()
    token_ids: list[int] = field(default_factory=list)
    lora: str | None = None

    @property
    def output_len(self) -> int:
        """Number of generated tokens."""
        return sum(self.chunk_tokens)

    @property
    def ttft(self) -> float:
        """Seconds from sending to the first chunk."""
        return self.chunk_times[0] - self.sent

    @property
    def e2el(self) -> float:
        """Seconds from sending to the last chunk."""
        return self.chunk_times[-1] - self.sent

    @property
    def ended(self) -> float:
        """When the last chunk came, or the request was sent if none did."""
        return self.chunk_times[-1] if self.chunk_times else self.sent

    @property
    def queued(self) -> float:
        """Seconds from due to sent: the client queue time."""
        return self.sent - self.scheduled

    @property
    def tpot(self) -> float | None:
        """Seconds per output token after the first, or None when there is no second token."""
        if self.output_len < 2:
            return None
        return (self.e2el - self.ttft) / (self.output_len - 1)

    @property
    def itls(self) -> list[float]:
        """Gaps between chunks, in seconds."""
        times = self.chunk_times
        return [later - earlier for earlier, later in pairwise(times)]

    @property
    def token_gaps(self) -> list[float]:
        """One gap per token after the first chunk: a chunk's gap divided over its tokens."""
        counts = self.chunk_tokens[1:]
        return [
            gap / count for gap, count in zip(self.itls, counts, strict=True) for _ in range(count)
        ]


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step of an in-process engine. Times are seconds from the start of the pass.

    Attributes:
        num_sequences: sequences that produced a token.
        num_first: those of them whose first token it was.
        new_tokens: tokens generated in the step.
        decode_only: every running sequence produced exactly its next token, without prefill.
        context_tokens: KV-cache tokens read by a decode-only step, summed over its sequences.
        computed_tokens: token positions computed by the model, prefill and decode.
    """

    start: float
    end: float
    num_sequences: int
    num_first: int
    new_tokens: int
    decode_only: bool
    context_tokens: int = 0
    computed_tokens: int = 0

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(slots=True)
class LoadPass:
    """One pass over a workload: request traces, steps, and duration.

    `steps` are as seen by the client, `engine_steps` the engine's step trace.
    `began_at` is the wall clock at its start, in seconds since the epoch.
    A pass of fixed duration has a `window`: seconds after which nothing was sent. What was in flight then was
    drained; `duration` is the window, and `drain_seconds` what followed it.
    """

    traces: list[RequestTrace]
    duration: float
    steps: list[StepRecord] = field(default_factory=list)
    interrupted: bool = False
    began_at: float = 0.0
    engine_steps: list[StepTrace] = field(default_factory=list)
    window: float | None = None
    drain_seconds: float = 0.0

    def is_drained(self, trace: RequestTrace) -> bool:
        """Whether a request was still in flight when the window closed."""
        return self.window is not None and trace.ended > self.window

    @property
    def all_tokens(self) -> tuple[int, int]:
        """(prompt, output) tokens of the successful requests, those drained behind a window included: the
        energy counters run until the last of them."""
        done = [trace for trace in self.traces if trace.success]
        return sum(trace.prompt_len for trace in done), sum(trace.output_len for trace in done)

    def tokens_in_window(self) -> tuple[int, int]:
        """(prompt, output) tokens of the successful requests; with a window, those that it saw: prompts whose
        first chunk came within it, and output tokens delivered within it."""
        end = math.inf if self.window is None else self.window
        done = [trace for trace in self.traces if trace.success]
        prompt = sum(trace.prompt_len for trace in done if trace.chunk_times[0] <= end)
        output = sum(
            count
            for trace in done
            for time, count in zip(trace.chunk_times, trace.chunk_tokens, strict=True)
            if time <= end
        )
        return prompt, output
