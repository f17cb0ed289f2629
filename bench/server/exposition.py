"""Prometheus' text format: counters, gauges and histograms of a server by short name.

llmopt, vLLM, SGLang and llama.cpp name the same quantities differently; the names of `QUANTITIES` are vLLM's
without the prefix. The text itself is parsed by prometheus-client.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from prometheus_client.parser import text_string_to_metric_families

Kind = Literal["counter", "gauge", "sum", "count"]

PREFIXES = ("llmopt_", "vllm:", "sglang:", "llamacpp:")
"""Where a server has a metric under two of them, the first is read."""
SYNONYMS = {
    "kv_cache_usage_ratio": "kv_cache_usage",
    "kv_cache_usage_perc": "kv_cache_usage",
    "gpu_cache_usage_perc": "kv_cache_usage",
    "token_usage": "kv_cache_usage",
    "num_running_reqs": "num_requests_running",
    "requests_processing": "num_requests_running",
    "num_queue_reqs": "num_requests_waiting",
    "requests_deferred": "num_requests_waiting",
    "num_preemptions_total": "num_preemptions",
    "prefix_cache_queries_total": "prefix_cache_queries",
    "gpu_prefix_cache_queries_total": "prefix_cache_queries",
    "prefix_cache_hits_total": "prefix_cache_hits",
    "gpu_prefix_cache_hits_total": "prefix_cache_hits",
    "prompt_tokens_total": "prompt_tokens",
    "generation_tokens_total": "generation_tokens",
    "tokens_predicted_total": "generation_tokens",
    "spec_decode_num_draft_tokens_total": "spec_decode_num_draft_tokens",
    "spec_decode_num_accepted_tokens_total": "spec_decode_num_accepted_tokens",
}
SHARES = {"kv_cache_usage", "cache_hit_rate"}
"""Gauges that are averaged over engines, not summed."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One value of a scrape; `sum` and `count` are a histogram's."""

    kind: Kind
    value: float


def parse_samples(text: str) -> dict[str, Sample]:
    """{short name: sample}, summed over label sets (gauges that are shares: averaged).

    Metrics that only carry labels (`_info`) and those outside the known prefixes are left out.

    Raises:
        ValueError: not the text format.
    """
    sources: dict[str, dict[tuple[int, str], list[float]]] = {}
    kinds: dict[str, Kind] = {}
    for source, name, kind, value in _values(text):
        sources.setdefault(name, {}).setdefault(source, []).append(value)
        kinds[name] = kind
    chosen = {name: by_source[min(by_source)] for name, by_source in sources.items()}
    return {
        name: Sample(kinds[name], sum(each) / len(each) if name in SHARES else sum(each))
        for name, each in chosen.items()
    }


def _values(text: str) -> Iterator[tuple[tuple[int, str], str, Kind, float]]:
    """((rank of the prefix, full name), short name, kind, value) of every sample that is kept."""
    for family in text_string_to_metric_families(text):
        rank = next((n for n, p in enumerate(PREFIXES) if family.name.startswith(p)), None)
        if rank is None or family.name.endswith("_info"):
            continue
        for sample in family.samples:
            if (kind := _kind(family.type, sample.name)) is not None:
                short = sample.name.removeprefix(PREFIXES[rank])
                yield (rank, sample.name), SYNONYMS.get(short, short), kind, sample.value


def _kind(family_type: str, sample_name: str) -> Kind | None:
    if family_type in ("histogram", "summary"):
        ending = sample_name.rpartition("_")[2]
        return {"sum": "sum", "count": "count"}.get(ending)  # type: ignore[return-value]
    if sample_name.endswith("_created"):
        return None
    if family_type == "counter":
        return "counter"
    return "gauge" if family_type in ("gauge", "unknown") else None


def counter_deltas(first: Mapping[str, Sample], last: Mapping[str, Sample]) -> dict[str, float]:
    """What each counter rose by; one that fell (the server was restarted) is left out."""
    return {
        name: sample.value - first[name].value
        for name, sample in last.items()
        if sample.kind == "counter" and name in first and sample.value >= first[name].value
    }


def histogram_means(first: Mapping[str, Sample], last: Mapping[str, Sample]) -> dict[str, float]:
    """The mean of what each histogram observed between two scrapes, where it observed anything."""
    means = {}
    for name, sample in last.items():
        if sample.kind != "count":
            continue
        stem = name.removesuffix("_count")
        total = f"{stem}_sum"
        if name not in first or total not in first or total not in last:
            continue
        count = sample.value - first[name].value
        if count > 0:
            means[stem] = (last[total].value - first[total].value) / count
    return means
