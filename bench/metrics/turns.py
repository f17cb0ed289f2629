"""Conversations and fixed durations: latency by turn, growth of the prefix, expected hits; and in words."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

from ..page.page import number, percent
from .metrics import samples, summary
from .trace import LoadPass, RequestTrace

METRICS = ("ttft", "tpot", "e2el")
FORMULAS = {
    "turn_new_tokens": "prompt tokens of a turn less the prompt and answer of the turn before it",
    "history_share": "prompt tokens that the turn before held, prompt and answer, over all prompt tokens",
    "expected_prefix_cache_hit_rate": "block arithmetic: of every prompt the full blocks, its last token "
    "aside, that a request had computed before (a prompt when its first token came, an answer without its "
    "last token when it ended), in a cache that evicts nothing; over all prompt tokens",
}


def turn_figures(passes: Sequence[LoadPass], block_size: int | None) -> dict[str, Any]:
    """The figures of conversations: by turn, and over all of them.

    `block_size` is that of an engine in this process with prefix caching; None leaves the expected hits out.
    """
    traces = [trace for load_pass in passes for trace in load_pass.traces]
    grown = {id(trace): old for load_pass in passes for trace, old in history_lens(load_pass)}
    done = [trace for trace in traces if trace.success]
    prompt_tokens = sum(trace.prompt_len for trace in done)
    old_tokens = sum(grown[id(trace)] for trace in done)
    return {
        "history_share": old_tokens / prompt_tokens if prompt_tokens else None,
        "expected_prefix_cache_hit_rate": expected_hit_rate(passes, block_size),
        "turns": [
            figures_of_turn(number, list(of_turn), grown)
            for number, of_turn in groupby(sorted(traces, key=_turn), key=_turn)
        ],
    }


def figures_of_turn(
    number: int, traces: Sequence[RequestTrace], grown: Mapping[int, int]
) -> dict[str, Any]:
    """The figures of all requests that were turn `number` (from 0) of their conversation; the row counts
    from 1."""
    done = [trace for trace in traces if trace.success]
    prompt_tokens = sum(trace.prompt_len for trace in done)
    cached = sum(trace.cached_tokens for trace in done)
    sampled = samples(done)

    def mean(total: float) -> float | None:
        return total / len(done) if done else None

    return {
        "turn": number + 1,
        "completed": len(done),
        "failed": len(traces) - len(done),
        "mean_prompt_len": mean(prompt_tokens),
        "mean_new_tokens": mean(sum(trace.prompt_len - grown[id(trace)] for trace in done)),
        "mean_output_len": mean(sum(trace.output_len for trace in done)),
        "mean_cached_tokens": mean(cached),
        "prefix_cache_hit_rate": cached / prompt_tokens if prompt_tokens else None,
        **{f"{metric}_ms": summary(sampled[metric], (99,)) for metric in METRICS},
    }


def history_lens(load_pass: LoadPass) -> Iterable[tuple[RequestTrace, int]]:
    """Every request with the tokens of the turn before it, prompt and answer; 0 for a first turn.

    Over HTTP the lengths are the server's counts, of a history that it tokenized again.
    """
    last: dict[tuple[str, int], int] = {}
    for trace in sorted(load_pass.traces, key=_turn):
        key = (trace.conversation, trace.cycle)
        yield trace, min(last.get(key, 0), trace.prompt_len)
        last[key] = trace.prompt_len + trace.output_len


def expected_hit_rate(passes: Sequence[LoadPass], block_size: int | None) -> float | None:
    """Mean over the passes of the hit rate that block arithmetic expects; None where tokens are unknown."""
    traces = [trace for load_pass in passes for trace in load_pass.traces]
    if block_size is None or not traces or not all(t.prompt_token_ids for t in traces):
        return None
    rates = []
    for load_pass in passes:
        tokens = sum(trace.prompt_len for trace in load_pass.traces)
        rates.append(expected_hits(load_pass.traces, block_size) / tokens if tokens else 0.0)
    return sum(rates) / len(rates)


def expected_hits(traces: Sequence[RequestTrace], block_size: int) -> int:
    """Prompt tokens that a prefix cache without eviction serves, by the order of the requests.

    A prompt is in the cache when its first token has come, an answer when it has ended, without its last
    token, which is sampled and never computed.
    """
    events: list[tuple[float, int, int, RequestTrace]] = []
    for place, trace in enumerate(traces):
        events.append((trace.sent, 1, place, trace))
        if trace.chunk_times:
            # At equal times, what has been computed sorts before the prompt that is looked up.
            events.append((trace.chunk_times[0], 0, place, trace))
            events.append((trace.ended, 0, place, trace))
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
    """`llmopt.window` of a run of fixed duration: how much it sent, and what was drained behind it."""
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
    seen = [turn for turn in part["turns"] if turn["completed"]]
    if not seen:
        return "No turn was answered"
    ends = seen[:1] if len(seen) == 1 else [seen[0], seen[-1]]
    words = ", ".join(
        f"turn {turn['turn']}: median TTFT {number(turn['ttft_ms']['median'])} ms, "
        f"{number(turn['mean_prompt_len'], 0)} prompt tokens, {percent(turn['prefix_cache_hit_rate'])} cached"
        for turn in ends
    )
    return f"{part['num_conversations']} conversations; {words}"


def window_sentence(window: Mapping[str, Any]) -> str:
    """The requests that a run of fixed duration sent, and those in flight when the window closed."""
    passes = len(window["seconds"])
    return (
        f"{passes} {'pass' if passes == 1 else 'passes'} of {number(window['seconds'][0], 1)} s sent "
        f"{sum(window['sent'])} requests; {sum(window['drained'])} were in flight at the end and "
        "drained: their latencies count, the throughput does not have what came after the window"
    )


def _turn(trace: RequestTrace) -> int:
    return trace.turn
