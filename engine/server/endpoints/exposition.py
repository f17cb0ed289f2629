"""Prometheus exposition of the server's metrics, under `llmopt_` and `vllm:` names, and of usage by API key.

Both names expose the same values. The `llmopt_` ones follow Prometheus' naming rules; the `vllm:` ones, whose
colon those rules reserve for recording rules, serve existing vLLM dashboards.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping

import torch
from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from ...engine import Engine
from ...scheduling.outputs import EngineStats
from ..requests.keys import KeyRing
from ..requests.loop import EngineLoop
from ..requests.metric_names import VLLM_NAMES
from ..requests.metrics import Histogram, ServerMetrics

HELP = {
    "time_to_first_token_seconds": "Time from the arrival of a request to its first token.",
    "inter_token_latency_seconds": "Time between two steps that gave a sequence tokens.",
    "e2e_request_latency_seconds": "Time from the arrival of a request to its last token.",
    "request_queue_time_seconds": "Time from the arrival of a request to its first scheduled step.",
    "request_prefill_time_seconds": "Time from the first scheduled step of a request to its first token.",
    "request_decode_time_seconds": "Time from the first token of a request to its last token.",
    "request_inference_time_seconds": "Time from the first scheduled step of a request to its last token.",
    "request_prompt_tokens": "Prompt tokens of a request.",
    "request_generation_tokens": "Generated tokens of a sequence.",
    "request_params_n": "The n parameter of a request.",
    "request_params_max_tokens": "The max_tokens parameter of a request.",
    "iteration_tokens": "Tokens computed by a step, prefill and decode.",
}
Labels = Mapping[str, str]


class Exposition:
    """Exposes the metrics of one engine. It has a separate registry, so a process may hold several."""

    def __init__(self, engine: Engine, loop: EngineLoop, model_name: str, keys: KeyRing) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        ProcessCollector(registry=self._registry)
        features, device = speed_features(engine), device_labels(engine.device)
        for prefix in ("llmopt_", "vllm:"):
            collector = _EngineCollector(prefix, loop, model_name, features, device)
            self._registry.register(collector)
        self._registry.register(KeyCollector(keys, model_name))

    def text(self) -> bytes:
        return generate_latest(self._registry)


def speed_features(engine: Engine) -> dict[str, str]:
    """The engine's performance options and their settings, as labels."""
    config, limits = engine.config, engine.scheduler.config
    speculation = config.speculation
    return {
        "prefix_caching": "on" if config.enable_prefix_caching else "off",
        "chunked_prefill_tokens": str(limits.prefill_chunk_size or limits.max_num_batched_tokens),
        "speculation": "off" if speculation is None else str(speculation.method),
        "kv_cache_dtype": engine.stats.kv_dtype,
        "kv_eviction": "off"
        if limits.eviction is None
        else f"{limits.eviction.method} {limits.eviction.budget}",
        "num_lora_adapters": str(engine.loras.loaded.max_loras),
        "overlapped_loop": "on" if config.overlaps(engine.device.type) else "off",
        "tensor_parallel_size": str(config.tensor_parallel_size),
        "scheduling_policy": str(config.scheduling_policy),
    }


def device_labels(device: torch.device) -> dict[str, str]:
    """The device, and the GPU's name or `none`: a benchmark's client compares it."""
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else "none"
    return {"device": str(device), "gpu": gpu}


class _EngineCollector(Collector):
    """All metrics of the engine under one prefix."""

    def __init__(
        self, prefix: str, loop: EngineLoop, model_name: str, features: Labels, device: Labels
    ) -> None:
        self._prefix = prefix
        self._loop = loop
        self._labels = {"model_name": model_name, "engine": "0"}
        self._features = features
        self._device = device

    def collect(self) -> Iterator[Metric]:
        metrics = self._loop.metrics
        yield from self._of_engine(metrics)
        yield from self._of_requests(metrics)
        if self._prefix != "vllm:":
            yield from self._of_server(metrics)

    def _of_engine(self, metrics: ServerMetrics) -> Iterator[Metric]:
        stats = metrics.stats
        used = stats.kv_blocks_used / stats.kv_blocks_total if stats.kv_blocks_total else 0.0
        yield self._gauge("num_requests_running", "Sequences that are running.", stats.num_running)
        yield self._gauge(
            "num_requests_waiting", "Sequences that are waiting to be scheduled.", stats.num_waiting
        )
        yield self._gauge(
            "kv_cache_usage_ratio", "KV-cache usage: the fraction of blocks in use, 0 to 1.", used
        )
        yield self._counter(
            "num_preemptions", "Preempted sequences, cumulative.", stats.num_preemptions
        )
        yield self._counter(
            "prefix_cache_queries",
            "Tokens looked up in the prefix cache.",
            stats.prefix_cache_queries,
        )
        yield self._counter(
            "prefix_cache_hits", "Prefix-cache hits, in tokens.", stats.prefix_cache_hits
        )
        yield from self._of_evictions(stats)
        yield self._counter(
            "spec_decode_num_drafts", "Drafts verified by the target model.", stats.num_drafts
        )
        yield self._counter(
            "spec_decode_num_draft_tokens",
            "Draft tokens proposed.",
            stats.num_draft_tokens,
        )
        yield self._counter(
            "spec_decode_num_accepted_tokens",
            "Draft tokens accepted.",
            stats.num_accepted_tokens,
        )
        yield self._gauge(
            "lora_requests_info",
            "LoRA adapters in use, in the labels; the value is the current Unix time.",
            time.time(),
            {
                "running_lora_adapters": ",".join(sorted(metrics.running_adapters)),
                "waiting_lora_adapters": ",".join(sorted(metrics.waiting_adapters)),
                "max_lora": self._features["num_lora_adapters"],
            },
        )
        yield self._gauge(
            "cache_config_info",
            "KV-cache configuration, in the labels; always 1.",
            1,
            {
                "block_size": str(stats.kv_tokens_total // max(1, stats.kv_blocks_total)),
                "num_gpu_blocks": str(stats.kv_blocks_total),
                "cache_dtype": stats.kv_dtype,
                "enable_prefix_caching": str(self._features["prefix_caching"] == "on"),
            },
        )

    def _of_evictions(self, stats: EngineStats) -> Iterator[Metric]:
        if self._prefix == "vllm:":
            return
        yield self._counter(
            "kv_evicted_tokens",
            "Tokens evicted to the KV-cache budget, cumulative.",
            stats.num_evicted_tokens,
        )
        yield self._counter(
            "kv_kept_tokens",
            "Tokens kept whenever a sequence was compacted to the KV-cache budget, cumulative.",
            stats.num_kept_tokens,
        )

    def _of_requests(self, metrics: ServerMetrics) -> Iterator[Metric]:
        yield self._counter("prompt_tokens", "Prompt tokens processed.", metrics.num_prompt_tokens)
        yield self._counter("generation_tokens", "Generated tokens.", metrics.num_generation_tokens)
        yield self._counters(
            "request_success",
            "Finished sequences by finish reason.",
            "finished_reason",
            metrics.finished.items(),
        )
        for name, text in HELP.items():
            yield self._histogram(name, text, getattr(metrics.distributions, name))

    def _of_server(self, metrics: ServerMetrics) -> Iterator[Metric]:
        yield self._gauge("ready", "1 while the server is ready.", float(self._loop.is_ready))
        yield self._counter("steps", "Steps of the engine.", metrics.num_steps)
        yield self._counter(
            "failed_steps", "Steps that failed; their requests ended.", metrics.num_failed_steps
        )
        yield self._counters(
            "step_seconds",
            "Time of the steps by part: scheduling, model with sampler, output processing.",
            "part",
            metrics.step_seconds.items(),
        )
        yield self._counters(
            "http_responses",
            "HTTP responses by status.",
            "status",
            ((str(status), count) for status, count in metrics.responses.copy().items()),
        )
        yield self._gauge(
            "feature_info",
            "Performance options, in the labels; always 1.",
            1,
            self._features,
        )
        yield self._gauge("device_info", "The device, in the labels; always 1.", 1, self._device)

    def _name(self, name: str) -> str:
        return self._prefix + (VLLM_NAMES.get(name, name) if self._prefix == "vllm:" else name)

    def _gauge(self, name: str, text: str, value: float, labels: Labels | None = None) -> Metric:
        labels = {**self._labels, **(labels or {})}
        family = GaugeMetricFamily(self._name(name), text, labels=list(labels))
        family.add_metric(list(labels.values()), value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(self._name(name), text, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), value)
        return family

    def _counters(
        self, name: str, text: str, label: str, values: Iterable[tuple[str, float]]
    ) -> Metric:
        family = CounterMetricFamily(self._name(name), text, labels=[*self._labels, label])
        for key, value in values:
            family.add_metric([*self._labels.values(), key], value)
        return family

    def _histogram(self, name: str, text: str, histogram: Histogram) -> Metric:
        family = HistogramMetricFamily(self._name(name), text, labels=list(self._labels))
        total, buckets = 0, []
        bounds = [*(f"{bound:g}" for bound in histogram.bounds), "+Inf"]
        for bound, count in zip(bounds, list(histogram.counts), strict=True):
            total += count
            buckets.append((bound, total))
        family.add_metric(list(self._labels.values()), buckets, histogram.sum)
        return family


class KeyCollector(Collector):
    """Requests and tokens by key, and requests that its limits refused; nothing without keys."""

    def __init__(self, keys: KeyRing, model_name: str) -> None:
        self._keys = keys
        self._labels = {"model_name": model_name, "engine": "0"}

    def collect(self) -> Iterator[Metric]:
        principals = [*self._keys.named]
        if not principals:
            return
        requests = self._family("requests", "Requests that have ended, by API key.")
        prompt = self._family("prompt_tokens", "Prompt tokens of requests, by API key.")
        generated = self._family("generation_tokens", "Generated tokens, by API key.")
        refused = self._family(
            "refused_requests", "Requests refused by a limit of their API key.", "limit"
        )
        for principal in principals:
            labels = [*self._labels.values(), principal.key_name or ""]
            requests.add_metric(labels, principal.usage.num_requests)
            prompt.add_metric(labels, principal.usage.prompt_tokens)
            generated.add_metric(labels, principal.usage.completion_tokens)
            by_limit = {
                "requests": principal.limits.refused["requests"],
                "tokens": principal.limits.refused["tokens"],
                "concurrency": principal.concurrency.num_refused,
            }
            for limit, count in by_limit.items():
                refused.add_metric([*labels, limit], count)
        yield from (requests, prompt, generated, refused)

    def _family(self, name: str, text: str, *labels: str) -> CounterMetricFamily:
        return CounterMetricFamily(
            f"llmopt_api_key_{name}", text, labels=[*self._labels, "key", *labels]
        )
