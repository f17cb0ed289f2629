"""Server metrics: counters and histograms, updated on the engine thread after each step, and their exposition
for Prometheus under `llmopt_` and `vllm:` names.

Both names expose the same values. The `llmopt_` ones follow Prometheus' naming rules; the `vllm:` ones, whose
colon those rules reserve for recording rules, serve existing vLLM dashboards.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate

import torch
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from ...base.sampling_params import SamplingParams
from ...config.adapters import adapter_name
from ...core.engine import Engine
from ...execution.step_loop import StepRecorder
from ...scheduling.outputs import EngineStats, RequestOutput
from ...scheduling.request import RequestStatus
from .metric_names import llmopt_metric, vllm_metric

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


class Distributions:
    """Histograms of requests and steps, named as in vLLM for its dashboards."""

    def __init__(self) -> None:
        arrival, scheduled = "Time from the arrival of a request to its", "first scheduled step"
        begun = f"Time from the {scheduled} of a request to its"
        first = "Time from the first token of a request to its"
        self.time_to_first_token_seconds = Histogram(SECONDS, f"{arrival} first token.")
        between = "Time between two steps that gave a sequence tokens."
        self.inter_token_latency_seconds = Histogram(SECONDS, between)
        self.e2e_request_latency_seconds = Histogram(SECONDS, f"{arrival} last token.")
        self.request_queue_time_seconds = Histogram(SECONDS, f"{arrival} {scheduled}.")
        self.request_prefill_time_seconds = Histogram(SECONDS, f"{begun} first token.")
        self.request_decode_time_seconds = Histogram(SECONDS, f"{first} last token.")
        self.request_inference_time_seconds = Histogram(SECONDS, f"{begun} last token.")
        self.request_prompt_tokens = Histogram(TOKENS, "Prompt tokens of a request.")
        self.request_generation_tokens = Histogram(TOKENS, "Generated tokens of a sequence.")
        longest = "Generated tokens of the longest sequence of a request."
        self.request_max_num_generation_tokens = Histogram(TOKENS, longest)
        computed = "Prompt tokens of a request that were not in the prefix cache."
        self.request_prefill_kv_computed_tokens = Histogram(TOKENS, computed)
        per_token = "Mean time of a sequence's tokens after the first."
        self.request_time_per_output_token_seconds = Histogram(SECONDS, per_token)
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
        preemptions: sequence id, time of `time.perf_counter` and tokens of the most recent ones, the newest
            last.
        running_adapters, waiting_adapters: LoRA adapters of running and waiting sequences.
    """

    def __init__(self) -> None:
        self.stats = EngineStats()
        self.distributions = Distributions()
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.num_generation_tokens = 0
        self.finished: Counter[str] = Counter({"stop": 0, "length": 0, "abort": 0, "error": 0})
        self.responses: Counter[int] = Counter()
        self.step_seconds = dict.fromkeys(("schedule", "model", "output"), 0.0)
        self.num_steps = self.num_failed_steps = 0
        self.preemptions: deque[tuple[str, float, int]] = deque(maxlen=MAX_RECENT_PREEMPTIONS)
        self.running_adapters: frozenset[str] = frozenset()
        self.waiting_adapters: frozenset[str] = frozenset()
        self._last_token: dict[str, dict[int, float]] = {}
        self._times_preempted: Counter[str] = Counter()
        self._longest: Counter[str] = Counter()

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

    def note_unfinished(self, request_id: str, reason: str) -> None:
        self._last_token.pop(request_id, None)
        self._longest.pop(request_id, None)
        self.finished[reason] += 1

    def note_failed_step(self, request_ids: Sequence[str]) -> None:
        self.num_failed_steps += 1
        for request_id in request_ids:
            self.note_unfinished(request_id, "error")

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
        scheduler = self._engine.scheduler
        if scheduler.num_preemptions != self._num_preemptions:
            self._update_preemptions()
        if self._engine.loras.loaded.max_loras:
            used = [(r.lora, r.status) for r in scheduler.requests() if r.lora is not None]
            names = [(adapter_name(key), status) for key, status in used]
            running, waiting = RequestStatus.RUNNING, RequestStatus.WAITING
            self.running_adapters = frozenset(name for name, at in names if at is running)
            self.waiting_adapters = frozenset(name for name, at in names if at is waiting)

    def _take(self, output: RequestOutput) -> None:
        histograms, times = self.distributions, output.times
        assert times.first_scheduled is not None and times.first_token is not None
        assert times.last_token is not None
        is_pooled = output.pooled is not None  # such a prompt has no token, hence no TTFT
        last = self._last_token.setdefault(output.request_id, {})
        longest = max(self._longest[output.request_id], output.num_output_tokens)
        self._longest[output.request_id] = longest
        self.num_generation_tokens += len(output.new_token_ids)
        if output.index in last:
            histograms.inter_token_latency_seconds.observe(times.last_token - last[output.index])
        elif output.index == 0:
            self.num_prompt_tokens += output.num_prompt_tokens
            self.num_cached_tokens += output.num_cached_tokens
            num_computed = output.num_prompt_tokens - output.num_cached_tokens
            histograms.request_prefill_kv_computed_tokens.observe(num_computed)
            if not is_pooled:
                histograms.time_to_first_token_seconds.observe(times.first_token - times.arrival)
            histograms.request_queue_time_seconds.observe(times.first_scheduled - times.arrival)
            prefill = times.first_token - times.first_scheduled
            histograms.request_prefill_time_seconds.observe(prefill)
            histograms.request_prompt_tokens.observe(output.num_prompt_tokens)
        last[output.index] = times.last_token
        if output.finish_reason is None:
            return
        self.finished[output.finish_reason] += 1
        histograms.e2e_request_latency_seconds.observe(times.last_token - times.arrival)
        histograms.request_inference_time_seconds.observe(times.last_token - times.first_scheduled)
        if not is_pooled:
            seconds = times.last_token - times.first_token
            histograms.request_decode_time_seconds.observe(seconds)
            if (num_after := output.num_output_tokens - 1) > 0:
                histograms.request_time_per_output_token_seconds.observe(seconds / num_after)
            histograms.request_generation_tokens.observe(output.num_output_tokens)
        del last[output.index]
        if not last:
            del self._last_token[output.request_id]
            del self._longest[output.request_id]
            if not is_pooled:
                histograms.request_max_num_generation_tokens.observe(longest)

    def _update_preemptions(self) -> None:
        scheduler, now = self._engine.scheduler, time.perf_counter()
        self._num_preemptions = scheduler.num_preemptions
        known, self._times_preempted = self._times_preempted, Counter()
        for request in scheduler.requests():
            if request.num_preemptions > known[request.sequence_id]:
                self.preemptions.append((request.sequence_id, now, request.num_tokens))
            if request.num_preemptions:
                self._times_preempted[request.sequence_id] = request.num_preemptions


Labels = Mapping[str, str]
Values = Sequence[tuple[Labels, float]]
"""Values of a metric, each with its labels in addition to the model's."""


def exposition(
    engine: Engine, metrics: ServerMetrics, is_ready: Callable[[], bool], model_name: str
) -> CollectorRegistry:
    """The metrics of one engine, in a registry of their own, so that a process may hold several."""
    registry = CollectorRegistry(auto_describe=False)
    ProcessCollector(registry=registry)
    for metric in (llmopt_metric, vllm_metric):
        registry.register(_ServerCollector(metric, engine, metrics, is_ready, model_name))
    return registry


def speed_features(engine: Engine) -> dict[str, str]:
    """The engine's performance options and their settings, as labels."""
    config, limits = engine.config, engine.scheduler.config
    speculation, eviction = config.speculation, limits.eviction
    return {
        "prefix_caching": "on" if config.enable_prefix_caching else "off",
        "chunked_prefill_tokens": str(limits.prefill_chunk_size or limits.max_num_batched_tokens),
        "speculation": "off" if speculation is None else str(speculation.method),
        "kv_cache_dtype": engine.stats.kv_dtype,
        "kv_eviction": "off" if eviction is None else f"{eviction.method} {eviction.budget}",
        "num_lora_adapters": str(engine.loras.loaded.max_loras),
        "overlapped_loop": "on" if config.overlaps(engine.device.type) else "off",
        "tensor_parallel_size": str(config.tensor_parallel_size),
        "scheduling_policy": str(config.scheduling_policy),
    }


class _ServerCollector(Collector):
    """All metrics of the server under one engine's names, by `metric`: None for one that it has not."""

    def __init__(
        self,
        metric: Callable[[str], str | None],
        engine: Engine,
        metrics: ServerMetrics,
        is_ready: Callable[[], bool],
        model_name: str,
    ) -> None:
        self._metric, self._metrics, self._is_ready = metric, metrics, is_ready
        self._labels = {"model_name": model_name, "engine": "0"}
        self._features, device = speed_features(engine), engine.device
        # A benchmark's client compares the GPU.
        gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else "none"
        self._device = {"device": str(device), "gpu": gpu}

    def collect(self) -> Iterator[Metric]:
        metrics, stats = self._metrics, self._metrics.stats
        for name, text, labels, value in self._gauges(metrics, stats):
            yield from self._family(GaugeMetricFamily, name, text, [(labels, value)])
        for name, text, value in _counters(metrics, stats):
            yield from self._family(CounterMetricFamily, name, text, [({}, value)])
        parts = "Time of the steps by part: scheduling, model with sampler, output processing."
        finished, responses = metrics.finished, metrics.responses.copy()
        reasons = "Finished sequences by finish reason."
        for name, text, label, counts in (
            ("request_success", reasons, "finished_reason", finished),
            ("step_seconds", parts, "part", metrics.step_seconds),
            ("http_responses", "HTTP responses by status.", "status", responses),
        ):
            values = [({label: str(key)}, value) for key, value in counts.items()]
            yield from self._family(CounterMetricFamily, name, text, values)
        for name, histogram in vars(metrics.distributions).items():
            yield self._histogram(name, histogram)

    def _gauges(
        self, metrics: ServerMetrics, stats: EngineStats
    ) -> Iterable[tuple[str, str, Labels, float]]:
        """Name, text, labels and value; of those with labels these are the information."""
        used = stats.kv_blocks_used / stats.kv_blocks_total if stats.kv_blocks_total else 0.0
        waiting = "Sequences that are waiting to be scheduled."
        usage = "KV-cache usage: the fraction of blocks in use, 0 to 1."
        adapters = {
            "running_lora_adapters": ",".join(sorted(metrics.running_adapters)),
            "waiting_lora_adapters": ",".join(sorted(metrics.waiting_adapters)),
            "max_lora": self._features["num_lora_adapters"],
        }
        cache = {
            "block_size": str(stats.kv_tokens_total // max(1, stats.kv_blocks_total)),
            "num_gpu_blocks": str(stats.kv_blocks_total),
            "cache_dtype": stats.kv_dtype,
            "enable_prefix_caching": str(self._features["prefix_caching"] == "on"),
        }
        in_use = "LoRA adapters in use, in the labels; the value is the current Unix time."
        return (
            ("num_requests_running", "Sequences that are running.", {}, stats.num_running),
            ("num_requests_waiting", waiting, {}, stats.num_waiting),
            ("kv_cache_usage_ratio", usage, {}, used),
            ("ready", "1 while the server is ready.", {}, float(self._is_ready())),
            ("lora_requests_info", in_use, adapters, time.time()),
            ("cache_config_info", "KV-cache configuration, in the labels; always 1.", cache, 1),
            ("feature_info", "Performance options, in the labels; always 1.", self._features, 1),
            ("device_info", "The device, in the labels; always 1.", self._device, 1),
        )

    def _family(
        self,
        kind: type[GaugeMetricFamily] | type[CounterMetricFamily],
        name: str,
        text: str,
        values: Values,
    ) -> Iterator[Metric]:
        if (exposed := self._metric(name)) is None:
            return
        names = [*self._labels, *(values[0][0] if values else ())]
        family = kind(exposed, text, labels=names)
        for labels, value in values:
            family.add_metric([*self._labels.values(), *labels.values()], value)
        yield family

    def _histogram(self, name: str, histogram: Histogram) -> Metric:
        exposed = str(self._metric(name))
        family = HistogramMetricFamily(exposed, histogram.text, labels=list(self._labels))
        bounds = [*(f"{bound:g}" for bound in histogram.bounds), "+Inf"]
        buckets = [*zip(bounds, accumulate(histogram.counts), strict=True)]
        family.add_metric(list(self._labels.values()), buckets, histogram.sum)
        return family


def _counters(metrics: ServerMetrics, stats: EngineStats) -> Iterable[tuple[str, str, float]]:
    evicted = "Tokens evicted to the KV-cache budget, cumulative."
    kept = "Tokens kept whenever a sequence was compacted to the KV-cache budget, cumulative."
    queries = "Tokens looked up in the prefix cache."
    cached = "Prompt tokens taken from the prefix cache."
    return (
        ("num_preemptions", "Preempted sequences, cumulative.", stats.num_preemptions),
        ("prefix_cache_queries", queries, stats.prefix_cache_queries),
        ("prefix_cache_hits", "Prefix-cache hits, in tokens.", stats.prefix_cache_hits),
        ("kv_evicted_tokens", evicted, stats.num_evicted_tokens),
        ("kv_kept_tokens", kept, stats.num_kept_tokens),
        ("spec_decode_num_drafts", "Drafts verified by the target model.", stats.num_drafts),
        ("spec_decode_num_draft_tokens", "Draft tokens proposed.", stats.num_draft_tokens),
        ("spec_decode_num_accepted_tokens", "Draft tokens accepted.", stats.num_accepted_tokens),
        ("prompt_tokens", "Prompt tokens processed.", metrics.num_prompt_tokens),
        ("prompt_tokens_cached", cached, metrics.num_cached_tokens),
        ("generation_tokens", "Generated tokens.", metrics.num_generation_tokens),
        ("steps", "Steps of the engine.", metrics.num_steps),
        ("failed_steps", "Steps that failed; their requests ended.", metrics.num_failed_steps),
    )
