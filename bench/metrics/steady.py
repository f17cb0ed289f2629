"""Steady state of a run: the window between the first and the last moment at full concurrency."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from .metrics import samples, summary, vllm_keys
from .trace import LoadPass, RequestTrace

THRESHOLD = 0.95
SHORTEST_SECONDS = 10.0
SHORTEST_SHARE = 0.1
METRICS = ("ttft", "tpot", "itl", "e2el")
PERCENTILES = (50, 90, 99)
FORMULAS = {
    "steady_state": f"from the first to the last moment of a pass with at least {THRESHOLD} × "
    "max_concurrency requests in flight; throughput counts what completed, and the tokens that came, "
    "within it; latencies are those of the requests that were sent within it"
}


def window_of(traces: Sequence[RequestTrace], at_least: int) -> tuple[float, float] | None:
    """First and last moment (seconds of the pass) with `at_least` requests in flight, or None."""
    # At equal times, ends sort before starts: a freed slot may be reused at once.
    ends = [(t.chunk_times[-1], -1) for t in traces if t.chunk_times]
    events = sorted([(t.sent, 1) for t in traces if t.chunk_times] + ends)
    alive = 0
    first = last = None
    for time, change in events:
        if alive >= at_least:
            last = time
        alive += change
        if alive >= at_least and first is None:
            first = time
    return None if first is None or last is None or last <= first else (first, last)


def steady_state(passes: Sequence[LoadPass], max_concurrency: int | None) -> dict[str, Any] | None:
    """Throughput and latency within the steady-state windows of all passes, with the keys of vllm-bench.

    None without a concurrency limit, or where no pass reached it. A window that is too short to
    trust (under 10 s, or under a tenth of its pass) is reported with a warning.
    """
    if max_concurrency is None:
        return None
    at_least = math.ceil(THRESHOLD * max_concurrency)
    seconds = prompt_tokens = output_tokens = completed = 0.0
    windows: list[dict[str, Any]] = []
    started: list[RequestTrace] = []
    for number, load_pass in enumerate(passes):
        window = window_of(load_pass.traces, at_least)
        if window is None:
            continue
        start, end = window
        done = [t for t in load_pass.traces if t.success and start <= t.chunk_times[-1] <= end]
        sent = [t for t in load_pass.traces if start <= t.sent < end]
        seconds += end - start
        completed += len(done)
        prompt_tokens += sum(t.prompt_len for t in done)
        output_tokens += sum(
            count
            for t in load_pass.traces
            if t.success
            for time, count in zip(t.chunk_times, t.chunk_tokens, strict=True)
            if start <= time <= end
        )
        started += sent
        short = end - start < max(SHORTEST_SECONDS, SHORTEST_SHARE * load_pass.duration)
        windows.append(
            {
                "run": number,
                "start_s": start,
                "end_s": end,
                "duration_s": end - start,
                "target_concurrency": max_concurrency,
                "threshold": THRESHOLD,
                "threshold_abs": at_least,
                "requests_started_in_window": len(sent),
                "requests_completed_in_window": len(done),
                "requests_total": len(load_pass.traces),
                "warning": "shorter than 10 s or a tenth of the pass" if short else None,
            }
        )
    if not windows:
        return None
    result: dict[str, Any] = {
        "windows": windows,
        "request_throughput": completed / seconds,
        "input_throughput": prompt_tokens / seconds,
        "output_throughput": output_tokens / seconds,
        "total_token_throughput": (prompt_tokens + output_tokens) / seconds,
    }
    sampled = samples(started)
    for metric in METRICS:
        result |= vllm_keys(summary(sampled[metric], PERCENTILES), metric)
    return result
