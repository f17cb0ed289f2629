"""Direction of a metric: whether higher or lower is better."""

from __future__ import annotations

HIGHER_IS_BETTER = (
    "throughput",
    "goodput",
    "slo_share",
    "top1",
    "completed",
    "accuracy",
    "score",
    "hit_rate",
)


def higher_is_better(key: str) -> bool:
    """Rates, agreement and scores are better when higher; times, bytes, counts and errors when lower."""
    return any(word in key for word in HIGHER_IS_BETTER)
