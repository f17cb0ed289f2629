"""Cost per million tokens, from the hourly price of the machine."""

from __future__ import annotations

from typing import Any

SECONDS_PER_HOUR = 3600
FORMULAS = {
    "usd": "duration of the passes · price of an hour / 3600",
    "usd_per_million_output_tokens": "the whole price over the generated tokens alone · 10⁶",
    "usd_per_million_input_tokens": "the whole price over the prompt tokens alone · 10⁶",
    "usd_per_million_total_tokens": "the whole price over prompt and generated tokens · 10⁶",
    "joules_per_million_output_tokens": "energy of sockets and GPU during the passes, all of it, over "
    "the generated tokens · 10⁶",
}


def cost_part(
    hour_price: float, seconds: float, input_tokens: int, output_tokens: int
) -> dict[str, Any]:
    """`llmopt.cost` of a result; a price per token is None where there is no such token."""
    usd = seconds * hour_price / SECONDS_PER_HOUR

    def per_million(tokens: int) -> float | None:
        return usd / tokens * 1e6 if tokens else None

    return {
        "hour_price": hour_price,
        "usd": usd,
        "usd_per_million_input_tokens": per_million(input_tokens),
        "usd_per_million_output_tokens": per_million(output_tokens),
        "usd_per_million_total_tokens": per_million(input_tokens + output_tokens),
    }
