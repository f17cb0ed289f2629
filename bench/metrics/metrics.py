"""Serving metrics (TTFT, TPOT, ITL, throughput) from request traces, as `vllm bench serve` defines them.

Pure functions. Per-request times are seconds, aggregates are milliseconds, as in vLLM. Failed requests
are counted and excluded from everything else. A value that was not measured is None, never 0 or NaN.
Of conversations and fixed durations: latency by turn, growth of the prefix, expected hits; and in words.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, groupby
from operator import attrgetter
from typing import Any

import numpy as np

from ..page.page import number, percent
from .trace import LoadPass, RequestTrace


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
    return f"p{int(percentile) if percentile == int(percentile) else percentile}"


def vllm_keys(summary_of: Mapping[str, float | None], metric: str) -> dict[str, float | None]:
    return {f"{statistic}_{metric}_ms": value for statistic, value in summary_of.items()}


def aggregate(
    passes: Sequence[LoadPass],
    *,
    metrics: Sequence[str],
    percentiles: Sequence[float],
    goodput_ms: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """The aggregate keys of `vllm bench serve`, over one pass or several. Several passes are pooled:
    durations and counts are summed, latencies form one sample, and peaks are the largest of any pass.
    Throughput and token totals of a pass with a window count only requests in it; `completed` and the
    latencies also have the requests that were drained after it."""
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
    """The number of requests that meet every limit. A request with one token has a TPOT of 0, as in vLLM; one
    that was not streamed keeps no limit of TPOT. `from_schedule` counts TTFT and end-to-end time from when a
    request was due, not from when the client sent it."""

    def is_good(trace: RequestTrace) -> bool:
        wait = trace.queued if from_schedule else 0.0
        tpot = trace.tpot or (0.0 if trace.is_streamed else math.inf)
        seen = {"ttft": trace.ttft + wait, "tpot": tpot, "e2el": trace.e2el + wait}
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
    most = max((count for _, count in in_flight(done)), default=0)
    return {"output_tokens_in_one_second": best, "requests_in_flight": most}


def in_flight(traces: Iterable[RequestTrace]) -> list[tuple[float, int]]:
    """(seconds of the pass, requests in flight from then on), at each sending and each last chunk."""
    begun = [trace for trace in traces if trace.chunk_times]
    # At equal times, ends sort before starts: a freed slot may be reused at once.
    events = sorted([(t.sent, 1) for t in begun] + [(t.ended, -1) for t in begun])
    counts = accumulate(change for _, change in events)
    return [(time, count) for (time, _), count in zip(events, counts, strict=True)]


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


TURN_METRICS = ("ttft", "tpot", "e2el")
TURN_FORMULAS = {
    "turn_new_tokens": "prompt tokens of a turn less the prompt and answer of the turn before it",
    "history_share": "prompt tokens that the turn before held, prompt and answer, over all prompt tokens",
    "expected_prefix_cache_hit_rate": "block arithmetic: of every prompt the full blocks, its last token "
    "aside, that a request had computed before (a prompt when its first token came, an answer without its "
    "last token when it ended), in a cache that evicts nothing; over all prompt tokens",
}


def turn_figures(passes: Sequence[LoadPass], block_size: int | None) -> dict[str, Any]:
    """The figures of conversations: by turn, and over all of them. `block_size` is that of an engine in this
    process with prefix caching; without it there are no expected hits."""
    traces = [trace for load_pass in passes for trace in load_pass.traces]
    old_lens = {id(trace): old for load_pass in passes for trace, old in history_lens(load_pass)}
    done = [trace for trace in traces if trace.success]
    prompt_tokens = sum(trace.prompt_len for trace in done)
    old_tokens = sum(old_lens[id(trace)] for trace in done)
    is_told = any(trace.cached_tokens is not None for trace in done)
    return {
        "history_share": old_tokens / prompt_tokens if prompt_tokens else None,
        "expected_prefix_cache_hit_rate": expected_hit_rate(passes, block_size),
        "turns": [
            figures_of_turn(number, list(of_turn), old_lens, is_told)
            for number, of_turn in groupby(
                sorted(traces, key=attrgetter("turn")), key=attrgetter("turn")
            )
        ],
    }


def figures_of_turn(
    number: int, traces: Sequence[RequestTrace], old_lens: Mapping[int, int], is_told: bool
) -> dict[str, Any]:
    """The figures of all requests that were turn `number` (from 0) of their conversation; the row counts
    from 1. `is_told`: the target says how many tokens were cached, of some requests at least."""
    done = [trace for trace in traces if trace.success]
    prompt_tokens = sum(trace.prompt_len for trace in done)
    cached = sum(trace.cached_tokens or 0 for trace in done)
    sampled = samples(done)

    def mean(total: float) -> float | None:
        return total / len(done) if done else None

    return {
        "turn": number + 1,
        "completed": len(done),
        "failed": len(traces) - len(done),
        "mean_prompt_len": mean(prompt_tokens),
        "mean_new_tokens": mean(sum(trace.prompt_len - old_lens[id(trace)] for trace in done)),
        "mean_output_len": mean(sum(trace.output_len for trace in done)),
        "mean_cached_tokens": mean(cached) if is_told else None,
        "prefix_cache_hit_rate": cached / prompt_tokens if is_told and prompt_tokens else None,
        **{f"{metric}_ms": summary(sampled[metric], (99,)) for metric in TURN_METRICS},
    }


def history_lens(load_pass: LoadPass) -> Iterable[tuple[RequestTrace, int]]:
    """Every request with the tokens of the turn before it, prompt and answer without its reasoning; 0 for a
    first turn. Over HTTP the lengths are the server's counts of a history that it tokenized again."""
    last: dict[tuple[str, int], int] = {}
    for trace in sorted(load_pass.traces, key=attrgetter("turn")):
        key = (trace.conversation, trace.cycle)
        yield trace, min(last.get(key, 0), trace.prompt_len)
        kept = trace.output_len if trace.history_tokens is None else trace.history_tokens
        last[key] = trace.prompt_len + kept


def expected_hit_rate(passes: Sequence[LoadPass], block_size: int | None) -> float | None:
    """Mean over the passes of the hit rate that block arithmetic expects; None if tokens are unknown."""
    traces = [trace for load_pass in passes for trace in load_pass.traces]
    if block_size is None or not traces or not all(t.prompt_token_ids for t in traces):
        return None
    rates = []
    for load_pass in passes:
        tokens = sum(trace.prompt_len for trace in load_pass.traces)
        rates.append(expected_hits(load_pass.traces, block_size) / tokens if tokens else 0.0)
    return sum(rates) / len(rates)


def expected_hits(traces: Sequence[RequestTrace], block_size: int) -> int:
    """Prompt tokens that a prefix cache without eviction serves, by the order of the requests. A prompt is in
    the cache when its first token has come, an answer when it has ended, without its last token, which is
    sampled and never computed."""
    events: list[tuple[float, int, int, RequestTrace]] = []
    for index, trace in enumerate(traces):
        events.append((trace.sent, 1, index, trace))
        if trace.chunk_times:
            # At equal times, computed tokens sort before the prompt that is looked up.
            events.append((trace.chunk_times[0], 0, index, trace))
            events.append((trace.ended, 0, index, trace))
    cached: set[int] = set()
    hits = 0
    for time, is_lookup, _, trace in sorted(events, key=lambda event: event[:3]):
        if is_lookup:
            for name in block_chain(trace.prompt_token_ids[:-1], block_size):
                if name not in cached:
                    break
                hits += block_size
            continue
        tokens = trace.prompt_token_ids
        if time == trace.ended:
            num_computed = len(tokens) + trace.output_len - 1
            tokens = (*tokens, *trace.token_ids)[:num_computed]
        cached.update(block_chain(tokens, block_size))
    return hits


def block_chain(tokens: Sequence[int], block_size: int) -> Iterable[int]:
    """A name for each full block, of its tokens and all before them."""
    name = 0
    for start in range(0, len(tokens) - block_size + 1, block_size):
        name = hash((name, tuple(tokens[start : start + block_size])))
        yield name


def window_part(passes: Sequence[LoadPass]) -> dict[str, Any]:
    """`llmopt.window` of a run of fixed duration: the requests that it sent, and those drained after it."""
    lengths = [t.output_len for load_pass in passes for t in load_pass.traces if t.success]
    return {
        "mean_output_len": sum(lengths) / len(lengths) if lengths else None,
        "seconds": [load_pass.duration for load_pass in passes],
        "drain_seconds": [load_pass.drain_seconds for load_pass in passes],
        "sent": [len(load_pass.traces) for load_pass in passes],
        "drained": [sum(map(load_pass.is_drained, load_pass.traces)) for load_pass in passes],
        "cycles": [
            1 + max((trace.cycle for trace in load_pass.traces), default=0) for load_pass in passes
        ],
    }


def turns_in_words(part: Mapping[str, Any]) -> str:
    """First against last turn in one line, for the console."""
    answered = [turn for turn in part["turns"] if turn["completed"]]
    if not answered:
        return "No turn was answered"
    ends = answered[:1] if len(answered) == 1 else [answered[0], answered[-1]]
    listing = ", ".join(
        f"turn {turn['turn']}: median TTFT {number(turn['ttft_ms']['median'])} ms, "
        f"{number(turn['mean_prompt_len'], 0)} prompt tokens, {percent(turn['prefix_cache_hit_rate'])} cached"
        for turn in ends
    )
    return f"{part['num_conversations']} conversations; {listing}"


def window_sentence(window: Mapping[str, Any]) -> str:
    """The requests that a run of fixed duration sent, and those in flight when the window closed."""
    passes = len(window["seconds"])
    return (
        f"{passes} {'pass' if passes == 1 else 'passes'} of {number(window['seconds'][0], 1)} s sent "
        f"{sum(window['sent'])} requests; {sum(window['drained'])} were in flight at the end and "
        "drained: their latencies count, the throughput does not have what came after the window"
    )
