"""Metric names that differ between llmopt and vLLM by more than the prefix."""

from __future__ import annotations

from collections.abc import Mapping

VLLM_NAMES: Mapping[str, str] = {
    "iteration_tokens": "iteration_tokens_total",
    "kv_cache_usage_ratio": "kv_cache_usage_perc",
}
"""vLLM's name by llmopt's, where vLLM's breaks Prometheus' naming rules."""

OURS_ALONE = (
    *("ready", "steps", "failed_steps", "step_seconds", "http_responses", "api_key"),
    *("feature_info", "device_info"),
    *("kv_evicted_tokens", "kv_kept_tokens"),
)
"""Metrics without a counterpart in vLLM."""
