"""Each engine's name of a metric that llmopt exposes: for exposition, dashboards, rules and autoscalers.

Sources: vLLM's own documentation; `sglang/srt/observability/metrics_collector.py` of SGLang 0.5.23.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

VLLM_NAMES: Mapping[str, str] = {
    "iteration_tokens": "iteration_tokens_total",
    "kv_cache_usage_ratio": "kv_cache_usage_perc",
}
"""vLLM's name by llmopt's, where vLLM's breaks Prometheus' naming rules."""

OURS_ALONE = (
    *("ready", "steps", "failed_steps", "step_seconds", "http_responses"),
    *("feature_info", "device_info"),
    *("kv_evicted_tokens", "kv_kept_tokens"),
)
"""Metrics without a counterpart in vLLM."""


_SUFFIX = re.compile(r"(_bucket|_sum|_count)$")
_SGLANG_NAMES: Mapping[str, str] = {
    "num_requests_running": "num_running_reqs",
    "num_requests_waiting": "num_queue_reqs",
    "kv_cache_usage_ratio": "token_usage",
    "num_preemptions_total": "num_retracted_requests_total",
    "request_queue_time_seconds": "queue_time_seconds",
    "prompt_tokens_total": "prompt_tokens_total",
    "generation_tokens_total": "generation_tokens_total",
    "time_to_first_token_seconds": "time_to_first_token_seconds",
    "inter_token_latency_seconds": "inter_token_latency_seconds",
    "e2e_request_latency_seconds": "e2e_request_latency_seconds",
}


def llmopt_metric(name: str) -> str | None:
    return f"llmopt_{name}"


def vllm_metric(name: str) -> str | None:
    """vLLM's name; None for a metric that it has not."""
    if any(name == ours or name.startswith(f"{ours}_") for ours in OURS_ALONE):
        return None
    for llmopt_name, vllm_name in VLLM_NAMES.items():
        if name == llmopt_name or name.startswith(f"{llmopt_name}_"):
            return "vllm:" + vllm_name + name.removeprefix(llmopt_name)
    return f"vllm:{name}"


def sglang_metric(name: str) -> str | None:
    """SGLang's name; None for a metric that it has not."""
    base = _SUFFIX.sub("", name)
    known = _SGLANG_NAMES.get(base)
    return known and f"sglang:{known}{name.removeprefix(base)}"
