"""Serving metrics (TTFT, TPOT, ITL, throughput) from request traces, as `vllm bench serve` defines them.

Pure functions. Per-request times are seconds, aggregates are milliseconds, as in vLLM. Failed requests
are counted and excluded from everything else. A value that was not measured is None, never 0 or NaN.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from .trace import LoadPass, RequestTrace

METRICS = {
    "ttft": "Time to First Token",
    "tpot": "Time per Output Token (excl. 1st token)",
    "itl": "Inter-token Latency",
    "e2el": "End-to-end Latency",
    "client_queue_time": "Client Queue Time",
    "e2el_including_client_queue": "End-to-end Latency incl. Client Queue",
}
FORMULAS = {
    "ttft": "first chunk − sent, per request; `sent` is after the concurrency limit let it go",
    "tpot": "(e2el − ttft) / (output tokens − 1), per request with at least two tokens; each request "
    "weighs the same",
    "itl": "gap between consecutive chunks, all gaps of all requests pooled; a chunk may hold "
    "several tokens",
    "e2el": "last chunk − sent, per request",
    "client_queue_time": "sent − scheduled, per request",
    "e2el_including_client_queue": "last chunk − scheduled, per request",
    "token_gap": "the gap before a chunk divided over its tokens: one value per token",
    "ttft_from_schedule": "first chunk − scheduled, per request",
    "duration": "start of the pass to the last completion, ramp and drain included; with --duration that "
    "window alone, and throughput counts the completions and tokens within it; passes are summed",
    "request_throughput": "completed requests / duration",
    "output_throughput": "generated tokens of completed requests / duration",
    "total_token_throughput": "(prompt + generated tokens of completed requests) / duration",
    "request_goodput": "completed requests that meet every limit / duration",
    "slo_share": "completed requests that meet every limit of --goodput / all requests, failed ones too",
    "joules_per_token": "energy of sockets and GPU during a pass / its generated tokens; where nothing is "
    "generated, / its prompt tokens",
    "max_output_tokens_per_s": "most chunks in one whole second since the first send, as vLLM counts",
    "max_concurrent_requests": "most requests alive within one whole second, as vLLM counts",
    "percentiles": "linear interpolation between order statistics (numpy); std divides by n",
}


def samples(traces: Iterable[RequestTrace]) -> dict[str, np.ndarray]:
    """Every metric's values in milliseconds over the successful requests, in request order."""
    done = [trace for trace in traces if trace.success]
    # An embedding has no first token.
    generated = [trace for trace in done if trace.output_len]
    values: dict[str, list[float]] = {
        "ttft": [t.ttft for t in generated],
        "tpot": [t.tpot for t in done if t.tpot is not None],
        "itl": [gap for t in done for gap in t.itls],
        "e2el": [t.e2el for t in done],
        "client_queue_time": [t.queued for t in done],
        "e2el_including_client_queue": [t.e2el + t.queued for t in done],
        "token_gap": [gap for t in done for gap in t.token_gaps],
        "ttft_from_schedule": [t.ttft + t.queued for t in generated],
    }
    return {name: np.asarray(seconds) * 1000 for name, seconds in values.items()}


def summary(values_ms: np.ndarray, percentiles: Sequence[float]) -> dict[str, float | None]:
    """`mean`, `median`, `std` and `p{P}` of a sample; all None when it is empty."""
    if len(values_ms) == 0:
        return dict.fromkeys(["mean", "median", "std", *map(percentile_word, percentiles)])
    figures: dict[str, float | None] = {
        "mean": float(np.mean(values_ms)),
        "median": float(np.median(values_ms)),
        "std": float(np.std(values_ms)),
    }
    for percentile in percentiles:
        figures[percentile_word(percentile)] = float(np.percentile(values_ms, percentile))
    return figures


def percentile_word(percentile: float) -> str:
    """vLLM's key for a percentile: `p99`, `p99.9`."""
    return f"p{int(percentile) if percentile == int(percentile) else percentile}"


def vllm_keys(summary_of: Mapping[str, float | None], metric: str) -> dict[str, float | None]:
    """`mean_ttft_ms` and its siblings."""
    return {f"{statistic}_{metric}_ms": value for statistic, value in summary_of.items()}


def aggregate(
    passes: Sequence[LoadPass],
    *,
    metrics: Sequence[str],
    percentiles: Sequence[float],
    goodput_ms: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """The aggregate keys of `vllm bench serve`, over one pass or several.

    Several passes are pooled: durations and counts are summed, latencies form one sample, and peaks
    are the largest of any pass. Of a pass with a window, throughput and token totals count what the window
    saw; `completed` and the latencies also have the requests that were drained behind it.
    """
    traces = [trace for load_pass in passes for trace in load_pass.traces]
    done = [trace for trace in traces if trace.success]
    duration = sum(load_pass.duration for load_pass in passes)
    counts = [load_pass.tokens_in_window() for load_pass in passes]
    prompt_tokens, output_tokens = (sum(count[side] for count in counts) for side in (0, 1))
    within = [
        trace
        for load_pass in passes
        for trace in load_pass.traces
        if trace.success and not load_pass.is_drained(trace)
    ]
    peaks = [peaks_by_second(load_pass.traces) for load_pass in passes]

    def per_second(count: float) -> float | None:
        return count / duration if duration > 0 else None

    figures: dict[str, Any] = {
        "duration": duration,
        "completed": len(done),
        "failed": len(traces) - len(done),
        "total_input_tokens": prompt_tokens,
        "total_output_tokens": output_tokens,
        "request_throughput": per_second(len(within)),
        "request_goodput": per_second(count_good(within, goodput_ms)) if goodput_ms else None,
        "output_throughput": per_second(output_tokens),
        "total_token_throughput": per_second(prompt_tokens + output_tokens),
        "max_output_tokens_per_s": max((float(peak[0]) for peak in peaks), default=0.0),
        "max_concurrent_requests": max((peak[1] for peak in peaks), default=0),
        "rtfx": 0.0,
    }
    sampled = samples(traces)
    for metric in metrics:
        figures |= vllm_keys(summary(sampled[metric], percentiles), metric)
    return figures


def count_good(
    done: Iterable[RequestTrace], limits_ms: Mapping[str, float], *, from_schedule: bool = False
) -> int:
    """How many requests meet every limit. A request with one token has a TPOT of 0 here, as in vLLM.

    `from_schedule` counts TTFT and end-to-end time from when a request was due, not from when the client
    sent it.
    """

    def is_good(trace: RequestTrace) -> bool:
        wait = trace.queued if from_schedule else 0.0
        seen = {"ttft": trace.ttft + wait, "tpot": trace.tpot or 0.0, "e2el": trace.e2el + wait}
        return all(seen[metric] * 1000 <= limit for metric, limit in limits_ms.items())

    return sum(map(is_good, done))


def slo_share(
    traces: Sequence[RequestTrace], limits_ms: Mapping[str, float], *, from_schedule: bool = False
) -> float | None:
    """Fraction of all requests, failed ones included, that meet every limit; None without limits."""
    if not limits_ms or not traces:
        return None
    done = [trace for trace in traces if trace.success]
    return count_good(done, limits_ms, from_schedule=from_schedule) / len(traces)


def peaks_by_second(traces: Iterable[RequestTrace]) -> tuple[int, int]:
    """vLLM's peaks: (most chunks in a second, most requests alive in a second), seconds from the
    first send. It counts chunks, and counts a request in every second that it touches."""
    done = [trace for trace in traces if trace.success]
    if not done:
        return 0, 0
    first = min(trace.sent for trace in done)
    last = max(trace.sent + trace.e2el for trace in done)
    chunks = np.zeros(math.ceil(last - first) + 1, dtype=int)
    alive = np.zeros_like(chunks)
    for trace in done:
        for time in trace.chunk_times:
            chunks[int(time - first)] += 1
        alive[int(trace.sent - first) : int(trace.sent + trace.e2el - first) + 1] += 1
    return int(chunks.max()), int(alive.max())


def exact_peaks(traces: Iterable[RequestTrace]) -> dict[str, float]:
    """Exact peaks: the most tokens in any window of one second, and the most requests in flight at once."""
    done = [trace for trace in traces if trace.success]
    tokens = sorted(
        (time, count)
        for trace in done
        for time, count in zip(trace.chunk_times, trace.chunk_tokens, strict=True)
    )
    best = running = first = 0
    for time, count in tokens:
        running += count
        while tokens[first][0] <= time - 1.0:
            running -= tokens[first][1]
            first += 1
        best = max(best, running)
    # At equal times, ends sort before starts: a freed slot may be reused at once.
    events = sorted([(t.sent, 1) for t in done] + [(t.chunk_times[-1], -1) for t in done])
    alive = most = 0
    for _, change in events:
        alive += change
        most = max(most, alive)
    return {"output_tokens_in_one_second": best, "requests_in_flight": most}


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
