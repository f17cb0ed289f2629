"""What was seen of one request, and of one pass over a workload: times, and nothing derived."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

from ...engine.execution.step_trace import StepTrace


@dataclass(slots=True)
class RequestTrace:
    """One request as the load driver saw it. Times are seconds from the start of the pass.

    A chunk is one delivery of tokens: it may hold several, and its time is that of the delivery.
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

    @property
    def output_len(self) -> int:
        """Tokens that were generated."""
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
    def queued(self) -> float:
        """Seconds from being due to being sent: the wait in the client."""
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
        """One gap per token after the first chunk: a chunk's gap is shared by its tokens."""
        counts = self.chunk_tokens[1:]
        return [
            gap / count for gap, count in zip(self.itls, counts, strict=True) for _ in range(count)
        ]


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step of an engine that runs in this process. Times are seconds from the start of the pass.

    Attributes:
        num_sequences: sequences that got a token.
        num_first: of these, the ones that got their first.
        new_tokens: tokens that came out of the step.
        decode_only: every running sequence got exactly its next token, so no prompt was computed.
        context_tokens: tokens in the KV cache that a decode-only step read, over its sequences.
        computed_tokens: positions that the model computed, of prompts and of answers.
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
    """One pass over a workload: every request's trace, the steps, and how long it all took.

    `steps` are what the client saw of them, `engine_steps` what the engine itself tells.
    `began_at` is the wall clock at its start, in seconds since the epoch.
    """

    traces: list[RequestTrace]
    duration: float
    steps: list[StepRecord] = field(default_factory=list)
    interrupted: bool = False
    began_at: float = 0.0
    engine_steps: list[StepTrace] = field(default_factory=list)
