"""Where the names of metrics of ours and of vLLM's differ by more than their prefix."""

from __future__ import annotations

from collections.abc import Mapping

VLLM_NAMES: Mapping[str, str] = {
    "iteration_tokens": "iteration_tokens_total",
    "kv_cache_usage_ratio": "kv_cache_usage_perc",
}
"""vLLM's name for ours, where its own breaks Prometheus' rules."""

OURS_ALONE = ("ready", "steps", "step_seconds", "http_responses", "feature_info")
"""What vLLM has no name for."""
