"""Server metrics: counters and histograms, updated on the engine thread after each step."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass

from ...base.sampling_params import SamplingParams
from ...config.adapters import adapter_name
from ...core.engine import Engine
from ...execution.step_loop import StepRecorder
from ...scheduling.outputs import EngineStats, RequestOutput
from ...scheduling.request import RequestStatus

SECONDS = tuple(digit * 10.0**power for power in range(-4, 3) for digit in (1, 2, 5))
TOKENS = tuple(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5))
COUNTS = (1.0, 2.0, 5.0, 10.0, 20.0)
MAX_RECENT_PREEMPTIONS = 12


class Histogram:
    """Histogram with fixed bucket bounds, the last of them +Inf; `text` says of what."""

    def __init__(self, bounds: Sequence[float], text: str) -> None:
        self.bounds, self.text = tuple(bounds), text
        self.counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value


@dataclass(frozen=True, slots=True)
class Preemption:
    """A preempted sequence; `at` is a time of `time.perf_counter`."""

    sequence_id: str
    at: float
    num_tokens: int


class Distributions:
    """Histograms of requests and steps, named as in vLLM for its dashboards."""

    def __init__(self) -> None:
        self.time_to_first_token_seconds = Histogram(
            SECONDS, "Time from the arrival of a request to its first token."
        )
        self.inter_token_latency_seconds = Histogram(
            SECONDS, "Time between two steps that gave a sequence tokens."
        )
        self.e2e_request_latency_seconds = Histogram(
            SECONDS, "Time from the arrival of a request to its last token."
        )
        self.request_queue_time_seconds = Histogram(
            SECONDS, "Time from the arrival of a request to its first scheduled step."
        )
        self.request_prefill_time_seconds = Histogram(
            SECONDS, "Time from the first scheduled step of a request to its first token."
        )
        self.request_decode_time_seconds = Histogram(
            SECONDS, "Time from the first token of a request to its last token."
        )
        self.request_inference_time_seconds = Histogram(
            SECONDS, "Time from the first scheduled step of a request to its last token."
        )
        self.request_prompt_tokens = Histogram(TOKENS, "Prompt tokens of a request.")
        self.request_generation_tokens = Histogram(TOKENS, "Generated tokens of a sequence.")
        self.request_params_n = Histogram(COUNTS, "The n parameter of a request.")
        self.request_params_max_tokens = Histogram(TOKENS, "The max_tokens parameter of a request.")
        self.iteration_tokens = Histogram(TOKENS, "Tokens computed by a step, prefill and decode.")


class ServerMetrics:
    """Counters and histograms since the end of warm-up. Written by the engine thread only; readers on
    other threads may see a partially counted step.

    All intervals use `time.perf_counter`, the clock of the engine's request timestamps.

    Attributes:
        stats: the engine's counters after the last step.
        finished: sequences by finish reason.
        responses: HTTP responses by status; written by the event loop.
        preemptions: the most recent ones, the newest last.
        running_adapters, waiting_adapters: LoRA adapters of running and waiting sequences.
    """

    def __init__(self) -> None:
        self.stats = EngineStats()
        self.distributions = Distributions()
        self.num_prompt_tokens = 0
        self.num_generation_tokens = 0
        self.finished: Counter[str] = Counter({"stop": 0, "length": 0, "abort": 0, "error": 0})
        self.responses: Counter[int] = Counter()
        self.step_seconds = dict.fromkeys(("schedule", "model", "output"), 0.0)
        self.num_steps = self.num_failed_steps = 0
        self.preemptions: deque[Preemption] = deque(maxlen=MAX_RECENT_PREEMPTIONS)
        self.running_adapters: frozenset[str] = frozenset()
        self.waiting_adapters: frozenset[str] = frozenset()
        self._last_token: dict[str, dict[int, float]] = {}
        self._times_preempted: Counter[str] = Counter()

    def begin(self, engine: Engine) -> None:
        """Start counting now."""
        self._engine = engine
        self._recorder = engine.recorder = StepRecorder(engine.scheduler)
        self._num_preemptions = engine.scheduler.num_preemptions
        self.stats = engine.stats

    def note_added(self, params: Sequence[SamplingParams]) -> None:
        for request in params:
            self.distributions.request_params_n.observe(request.n)
            if request.max_tokens is not None:
                self.distributions.request_params_max_tokens.observe(request.max_tokens)

    def note_aborted(self, request_id: str) -> None:
        self._last_token.pop(request_id, None)
        self.finished["abort"] += 1

    def note_failed_step(self, request_ids: Sequence[str]) -> None:
        """Record a step that failed, and the requests that ended with it."""
        self.num_failed_steps += 1
        for request_id in request_ids:
            self._last_token.pop(request_id, None)
            self.finished["error"] += 1

    def note_step(self, outputs: Sequence[RequestOutput]) -> None:
        """Record the outputs of a step; empty if only calls ran since the last step."""
        self.stats = self._engine.stats
        for step in self._recorder.steps:
            self.num_steps += 1
            self.step_seconds["schedule"] += step.schedule_seconds
            self.step_seconds["model"] += step.execute_seconds
            self.step_seconds["output"] += step.update_seconds
            self.distributions.iteration_tokens.observe(step.prefill_tokens + step.decode_tokens)
        self._recorder.steps.clear()
        for output in outputs:
            self._take(output)
        if self._engine.scheduler.num_preemptions != self._num_preemptions:
            self._update_preemptions()
        if self._engine.loras.loaded.max_loras:
            self._update_adapters()

    def _take(self, output: RequestOutput) -> None:
        histograms, times = self.distributions, output.times
        assert times.first_scheduled is not None and times.first_token is not None
        assert times.last_token is not None
        is_pooled = output.pooled is not None  # such a prompt has no token, hence no TTFT
        last = self._last_token.setdefault(output.request_id, {})
        self.num_generation_tokens += len(output.new_token_ids)
        if output.index in last:
            histograms.inter_token_latency_seconds.observe(times.last_token - last[output.index])
        elif output.index == 0:
            self.num_prompt_tokens += output.num_prompt_tokens
            if not is_pooled:
                ttft = times.first_token - times.arrival
                histograms.time_to_first_token_seconds.observe(ttft)
            histograms.request_queue_time_seconds.observe(times.first_scheduled - times.arrival)
            histograms.request_prefill_time_seconds.observe(
                times.first_token - times.first_scheduled
            )
            histograms.request_prompt_tokens.observe(output.num_prompt_tokens)
        last[output.index] = times.last_token
        if output.finish_reason is None:
            return
        self.finished[output.finish_reason] += 1
        histograms.e2e_request_latency_seconds.observe(times.last_token - times.arrival)
        histograms.request_inference_time_seconds.observe(times.last_token - times.first_scheduled)
        if not is_pooled:
            histograms.request_decode_time_seconds.observe(times.last_token - times.first_token)
            histograms.request_generation_tokens.observe(output.num_output_tokens)
        del last[output.index]
        if not last:
            del self._last_token[output.request_id]

    def _update_preemptions(self) -> None:
        scheduler, now = self._engine.scheduler, time.perf_counter()
        self._num_preemptions = scheduler.num_preemptions
        known, self._times_preempted = self._times_preempted, Counter()
        for request in scheduler.requests():
            if request.num_preemptions > known[request.sequence_id]:
                self.preemptions.append(Preemption(request.sequence_id, now, request.num_tokens))
            if request.num_preemptions:
                self._times_preempted[request.sequence_id] = request.num_preemptions

    def _update_adapters(self) -> None:
        used = [(r.lora, r.status) for r in self._engine.scheduler.requests() if r.lora is not None]
        used = [(adapter_name(key), status) for key, status in used]
        self.running_adapters = frozenset(n for n, at in used if at is RequestStatus.RUNNING)
        self.waiting_adapters = frozenset(n for n, at in used if at is RequestStatus.WAITING)
