"""Prometheus exposition of the server's metrics, under `llmopt_` and `vllm:` names.

Both names expose the same values. The `llmopt_` ones follow Prometheus' naming rules; the `vllm:` ones, whose
colon those rules reserve for recording rules, serve existing vLLM dashboards.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from ...core.engine import Engine
from ..requests.loop import EngineLoop
from ..requests.metric_names import llmopt_metric, vllm_metric
from ..requests.metrics import Histogram, ServerMetrics

Labels = Mapping[str, str]
Values = Sequence[tuple[Labels, float]]
"""Values of a metric, each with the labels that it has beside the model's."""
Scalars = Mapping[str, tuple[str, float]]
"""Text and value by name."""


class Exposition:
    """Exposes the metrics of one engine. It has a separate registry, so a process may hold several."""

    def __init__(self, engine: Engine, loop: EngineLoop, model_name: str) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        ProcessCollector(registry=self._registry)
        features, device = speed_features(engine), device_labels(engine.device)
        for metric in (llmopt_metric, vllm_metric):
            collector = _ServerCollector(metric, loop, model_name, features, device)
            self._registry.register(collector)

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


class _ServerCollector(Collector):
    """All metrics of the server under one engine's names, by `metric`: None for one that it has not."""

    def __init__(
        self,
        metric: Callable[[str], str | None],
        loop: EngineLoop,
        model_name: str,
        features: Labels,
        device: Labels,
    ) -> None:
        self._metric, self._loop = metric, loop
        self._labels = {"model_name": model_name, "engine": "0"}
        self._features, self._device = features, device

    def collect(self) -> Iterator[Metric]:
        metrics = self._loop.metrics
        for name, (text, value) in self._gauges(metrics).items():
            yield from self._family(GaugeMetricFamily, name, text, [({}, value)])
        for name, text, labels, value in self._infos(metrics):
            yield from self._family(GaugeMetricFamily, name, text, [(labels, value)])
        for name, (text, value) in _counters(metrics).items():
            yield from self._family(CounterMetricFamily, name, text, [({}, value)])
        for name, text, values in _labelled_counters(metrics):
            yield from self._family(CounterMetricFamily, name, text, values)
        for name, histogram in vars(metrics.distributions).items():
            yield self._histogram(name, histogram)

    def _gauges(self, metrics: ServerMetrics) -> Scalars:
        stats = metrics.stats
        used = stats.kv_blocks_used / stats.kv_blocks_total if stats.kv_blocks_total else 0.0
        return {
            "num_requests_running": ("Sequences that are running.", stats.num_running),
            "num_requests_waiting": (
                "Sequences that are waiting to be scheduled.",
                stats.num_waiting,
            ),
            "kv_cache_usage_ratio": (
                "KV-cache usage: the fraction of blocks in use, 0 to 1.",
                used,
            ),
            "ready": ("1 while the server is ready.", float(self._loop.is_ready)),
        }

    def _infos(self, metrics: ServerMetrics) -> Iterable[tuple[str, str, Labels, float]]:
        """Gauges whose labels are the information."""
        stats = metrics.stats
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
        family = HistogramMetricFamily(
            str(self._metric(name)), histogram.text, labels=list(self._labels)
        )
        total, buckets = 0, []
        bounds = [*(f"{bound:g}" for bound in histogram.bounds), "+Inf"]
        for bound, count in zip(bounds, list(histogram.counts), strict=True):
            total += count
            buckets.append((bound, total))
        family.add_metric(list(self._labels.values()), buckets, histogram.sum)
        return family


def _counters(metrics: ServerMetrics) -> Scalars:
    stats = metrics.stats
    return {
        "num_preemptions": ("Preempted sequences, cumulative.", stats.num_preemptions),
        "prefix_cache_queries": (
            "Tokens looked up in the prefix cache.",
            stats.prefix_cache_queries,
        ),
        "prefix_cache_hits": ("Prefix-cache hits, in tokens.", stats.prefix_cache_hits),
        "kv_evicted_tokens": (
            "Tokens evicted to the KV-cache budget, cumulative.",
            stats.num_evicted_tokens,
        ),
        "kv_kept_tokens": (
            "Tokens kept whenever a sequence was compacted to the KV-cache budget, cumulative.",
            stats.num_kept_tokens,
        ),
        "spec_decode_num_drafts": ("Drafts verified by the target model.", stats.num_drafts),
        "spec_decode_num_draft_tokens": ("Draft tokens proposed.", stats.num_draft_tokens),
        "spec_decode_num_accepted_tokens": ("Draft tokens accepted.", stats.num_accepted_tokens),
        "prompt_tokens": ("Prompt tokens processed.", metrics.num_prompt_tokens),
        "generation_tokens": ("Generated tokens.", metrics.num_generation_tokens),
        "steps": ("Steps of the engine.", metrics.num_steps),
        "failed_steps": ("Steps that failed; their requests ended.", metrics.num_failed_steps),
    }


def _labelled_counters(metrics: ServerMetrics) -> Iterator[tuple[str, str, Values]]:
    finished, responses = metrics.finished, metrics.responses.copy()
    text = "Time of the steps by part: scheduling, model with sampler, output processing."
    for name, help_text, label, counts in (
        ("request_success", "Finished sequences by finish reason.", "finished_reason", finished),
        ("step_seconds", text, "part", metrics.step_seconds),
        ("http_responses", "HTTP responses by status.", "status", responses),
    ):
        yield name, help_text, [({label: str(key)}, value) for key, value in counts.items()]
