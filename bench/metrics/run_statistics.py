"""Statistics over the passes of a run: distributions, spread, peaks, phases, steady state, and cost.

The steady state is the window between the first and the last moment at full concurrency.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from . import statistics
from .metrics import aggregate, exact_peaks, in_flight, samples, slo_share, summary, vllm_keys
from .names import LATENCIES
from .trace import LoadPass, RequestTrace, tokens_between

PERCENTILES = (50, 90, 95, 99)
# The metrics of the default gate. Medians, because one stall of a shared machine can dominate a mean.
HEADLINES = ("output_throughput", "median_ttft_ms", "median_tpot_ms", "median_e2el_ms")
POOLED = ("itl", "token_gap")


def summarize_pass(
    load_pass: LoadPass, limits_ms: Mapping[str, float] | None = None
) -> dict[str, Any]:
    """The figures of one pass, for the spread between passes; `limits_ms` are the limits of `--goodput`."""
    figures = aggregate(
        [load_pass], metrics=LATENCIES, percentiles=PERCENTILES, goodput_ms=limits_ms
    )
    return {**figures, "slo_share": slo_share(load_pass.traces, limits_ms or {})}


def distributions(passes: Sequence[LoadPass], seed: int) -> dict[str, Any]:
    """Every metric's summary over all passes, with 95 % bootstrap intervals over requests."""
    traces = [trace for load_pass in passes for trace in load_pass.traces]
    by_request = [samples([trace]) for trace in traces if trace.success]
    by_metric: dict[str, Any] = {}
    p99 = partial(np.percentile, q=99)
    for metric, values in samples(traces).items():
        groups = [sample[metric] for sample in by_request if len(sample[metric])]
        by_metric[metric] = {
            **summary(values, PERCENTILES),
            "count": len(values),
            "interval_95": {
                name: statistics.bootstrap_interval(groups, figure, seed=seed)
                for name, figure in (("mean", np.mean), ("median", np.median), ("p99", p99))
            },
            # Gaps within a request are correlated, so pooled gaps have no order-statistic interval.
            "order_interval_95": None
            if metric in POOLED
            else {f"p{q}": statistics.order_interval(values, q) for q in PERCENTILES},
        }
    return by_metric


def spread(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Per headline metric: coefficient of variation over the runs, and the smallest change detectable
    in a comparison with an equal run."""
    by_metric: dict[str, Any] = {}
    for key in HEADLINES:
        values = [run[key] for run in runs if run[key]]
        if not values:
            continue
        cv = statistics.run_cv(values)
        by_metric[key] = {
            "run_cv": cv,
            "run_cv_is_assumed": len(values) < 2,
            "interval_95": statistics.mean_interval(values),
            "smallest_visible_change": statistics.smallest_visible_change(cv, len(values)),
        }
    return by_metric


def client_lag(passes: Sequence[LoadPass]) -> dict[str, float | None]:
    """Lateness of sending, in milliseconds after a request was due. Under a concurrency limit it includes the
    wait for a permit, which is part of the load."""
    lag = np.asarray([trace.queued * 1000 for load_pass in passes for trace in load_pass.traces])
    return {**summary(lag, (99,)), "max": float(lag.max()) if len(lag) else None}


def peaks(passes: Sequence[LoadPass]) -> dict[str, float]:
    """`metrics.exact_peaks`, the maximum over passes."""
    by_pass = [exact_peaks(load_pass.traces) for load_pass in passes]
    return {key: max(peak[key] for peak in by_pass) for key in by_pass[0]}


def phases(passes: Sequence[LoadPass]) -> dict[str, float]:
    """Seconds of all passes by phase: decode-only steps, steps with prefill, and time between steps."""
    steps = [step for load_pass in passes for step in load_pass.steps]
    decode = sum(step.seconds for step in steps if step.decode_only)
    prefill = sum(step.seconds for step in steps) - decode
    whole = sum(load_pass.duration for load_pass in passes)
    return {
        "decode_seconds": decode,
        "prefill_seconds": prefill,
        "between_steps_seconds": max(0.0, whole - decode - prefill),
        "num_steps": len(steps),
    }


THRESHOLD = 0.95
SHORTEST_SECONDS = 10.0
SHORTEST_SHARE = 0.1
STEADY_PERCENTILES = (50, 90, 99)
ROOFLINE_FORMULAS = {
    "bytes_per_step": "weights streamed once + KV cache of every running sequence (model bytes, not "
    "counters)",
    "mbu": "model bytes of the decode steps / their time / measured bandwidth",
    "mfu": "model FLOP / time / measured matmul peak; a multiply-add counts as two",
    "intensity": "model FLOP / model bytes",
    "of_roof": "achieved FLOP/s / min(peak, intensity · bandwidth)",
}
STEADY_FORMULAS = {
    "steady_state": f"from the first to the last moment of a pass with at least {THRESHOLD} × "
    "max_concurrency requests in flight; throughput counts what completed, and the tokens that came, "
    "within it; latencies are those of the requests that were sent within it"
}


def window_of(traces: Sequence[RequestTrace], at_least: int) -> tuple[float, float] | None:
    """First and last moment (seconds of the pass) with `at_least` requests in flight, or None."""
    moments = in_flight(traces)
    first = next((time for time, count in moments if count >= at_least), math.inf)
    full = (end for (_, count), (end, _) in pairwise(moments) if count >= at_least)
    last = max(full, default=-math.inf)
    return (first, last) if first < last else None


def steady_state(passes: Sequence[LoadPass], max_concurrency: int | None) -> dict[str, Any] | None:
    """Throughput and latency within the steady-state windows of all passes, with the keys of vllm-bench; None
    without a concurrency limit, or if no pass reached it. A window that is too short to trust (under 10 s, or
    under a tenth of its pass) is reported with a warning."""
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
        output_tokens += tokens_between(load_pass.traces, start, end)
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
    for metric in LATENCIES:
        result |= vllm_keys(summary(sampled[metric], STEADY_PERCENTILES), metric)
    return result


SECONDS_PER_HOUR = 3600
COST_FORMULAS = {
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


STALL_SECONDS, STALL_GAPS, OTHERS = 0.5, 20, 10
"""A stream stood still if its gap exceeds this and so many median gaps, and others sent so many chunks."""
FEWER = 0.9
"""A server with less than this share of the requested concurrency at work has a limit."""
MORE_HITS = 0.02
"""Prompt tokens from the prefix cache beyond those that the workload shares, as a share of all."""


def silent_failures(
    passes: Sequence[LoadPass],
    *,
    concurrency: int | None,
    fixed_lengths: bool,
    gauges: Mapping[str, Mapping[str, float]],
    hit_rate: float | None,
    shared: float | None,
) -> list[str]:
    """Signs in a run's numbers that the server did not do its work as requested, and did not say so. An open
    loop has no `concurrency`; `fixed_lengths`: the server was told to ignore the end of text. `gauges` are
    `mean` and `max` of the server's metrics; `hit_rate` is the share of the prompt tokens from its prefix
    cache, `shared` the share that the prompts of a pass have in common, if known."""
    signs = []
    if concurrency is not None and (fewer := _at_once(passes, concurrency, gauges)):
        signs.append(
            f"the server worked on {fewer} requests at once, not on {concurrency}: the others waited in "
            "its queue, and their TTFT is that of the queue"
        )
    if stalls := sum(_stalls(load) for load in passes):
        signs.append(
            f"{stalls} streams stood still while others went on, as preempted requests do: the server's KV "
            "cache may be too small for this load"
        )
    signs += _unexpected_answers(passes, fixed_lengths=fixed_lengths)
    if hit_rate is not None and shared is not None and hit_rate > shared + MORE_HITS:
        signs.append(
            f"{hit_rate:.0%} of the prompt tokens came from the prefix cache, and the prompts of a pass "
            f"share {shared:.0%}: the rest was cached before, and TTFT is that of a warm cache"
        )
    return signs


def _unexpected_answers(passes: Sequence[LoadPass], *, fixed_lengths: bool) -> list[str]:
    """Answers of another length than asked, answers that were not streamed, and hidden reasoning."""
    done = [t for load in passes for t in load.traces if t.success and t.wanted_len]
    extra = [trace.output_len + trace.hidden_tokens - trace.wanted_len for trace in done]
    missing, longer = [n for n in extra if n < 0], [n for n in extra if n > 0]
    lines = []
    if fixed_lengths and missing:
        lines.append(
            f"{len(missing)} of {len(done)} answers are {-sum(missing)} tokens shorter than asked, although "
            "the end of text was to be ignored: less work was measured"
        )
    if longer:
        lines.append(
            f"{len(longer)} of {len(done)} answers are {sum(longer)} tokens longer than asked: the server "
            "may ignore max_completion_tokens or max_tokens, and more work was measured"
        )
    if unstreamed := sum(not trace.is_streamed for trace in done):
        lines.append(
            f"{unstreamed} of {len(done)} answers came at once, as from a server that ignores `stream` or a "
            "proxy that buffers: their TTFT is the time of the whole answer, and they have no TPOT and ITL"
        )
    if hidden := sum(trace.hidden_tokens for trace in done):
        lines.append(
            f"the server counts {hidden} reasoning tokens that it did not stream: token counts, rates and "
            "TPOT are those of the visible answer, and TTFT includes the reasoning"
        )
    return lines


def _at_once(
    passes: Sequence[LoadPass], concurrency: int, gauges: Mapping[str, Mapping[str, float]]
) -> int | None:
    """The number of requests that the server has at work, if it is less than the concurrency."""
    running, waiting = gauges.get("num_requests_running"), gauges.get("num_requests_waiting")
    if running and waiting:
        is_fewer = 0 < running["max"] < FEWER * concurrency and waiting["max"] > 0
        return round(running["max"]) if is_fewer else None
    counts = [_first_wave(load, concurrency) for load in passes]
    return max(filter(None, counts)) if counts and all(counts) else None


def _first_wave(load: LoadPass, concurrency: int) -> int | None:
    """Requests that stream before the first of them ends, if no other begins for far longer than between
    them: the server has places for so many. None if it goes on, or too few are sent."""
    done = sorted((t for t in load.traces if t.success and t.output_len > 1), key=lambda t: t.sent)
    wave = done[:concurrency]
    if len(wave) < concurrency:
        return None
    end = min(trace.ended for trace in wave)
    begun = sorted(trace.chunk_times[0] for trace in wave if trace.chunk_times[0] < end)
    pace = max((b - a for a, b in pairwise([wave[0].sent, *begun])), default=0.0)
    is_limit = 0 < len(begun) < FEWER * concurrency and end - begun[-1] > 2 * pace
    return len(begun) if is_limit else None


def _stalls(load: LoadPass) -> int:
    """Streams with a gap in which others went on."""
    times = np.sort(np.concatenate([[0.0], *(trace.chunk_times for trace in load.traces)]))
    gaps = np.concatenate([[0.0], *(trace.itls for trace in load.traces)])
    least = max(STALL_SECONDS, STALL_GAPS * float(np.median(gaps)))
    count = 0
    for trace in load.traces:
        pairs = zip(trace.itls, trace.chunk_times[1:], strict=False)  # no gaps: not streamed
        gap, end = max(pairs, default=(0.0, 0.0))
        others = np.searchsorted(times, end) - np.searchsorted(times, end - gap, side="right")
        count += int(gap > least and others >= OTHERS)
    return count
