"""A server that does less than was asked, and does not say so, by the times of its chunks."""

from __future__ import annotations

from typing import Any

import pytest
from llmopt.bench.metrics.run_statistics import silent_failures
from llmopt.bench.metrics.trace import LoadPass, RequestTrace
from llmopt.bench.workloads.workload import Workload, numbered, shared_tokens


def served(places: int, requests: int = 24, asked: int = 8, tokens: int = 20) -> list[RequestTrace]:
    """A closed loop on a server with so many places; a token comes every 10 ms, a prompt takes 20 ms."""
    free, clients, traces = [0.0] * places, [0.0] * asked, []
    for number in range(requests):
        clients.sort()
        free.sort()
        sent = clients.pop(0)
        begins = max(sent, free.pop(0)) + 0.02 + 0.003 * (number % places)
        times = [begins + 0.01 * n for n in range(tokens)]
        traces.append(
            RequestTrace(
                f"bench-{number}", 50, tokens, sent, sent, times, [1] * tokens, success=True
            )
        )
        clients.append(times[-1])
        free.append(times[-1])
    return traces


def said(traces: list[RequestTrace], **given: Any) -> list[str]:
    common: dict[str, Any] = {"concurrency": 8, "fixed_lengths": True, "gauges": {}}
    passes = [LoadPass(traces, 10.0)]
    return silent_failures(passes, **{**common, "hit_rate": None, "shared": 0.0, **given})


@pytest.mark.parametrize("places", [1, 2, 4, 6])
def test_fewer_places_than_asked_show_in_the_first_wave(places: int) -> None:
    (found,) = said(served(places))
    assert f"worked on {places} requests at once, not on 8" in found
    assert said(served(places), concurrency=None) == []


def test_a_server_that_does_what_was_asked_is_not_blamed() -> None:
    assert said(served(8)) == said(served(16)) == []
    slow = served(8)
    for trace in slow:  # prompts one after the other, as in a prefill that is the bottleneck
        late = 0.15 * (int(trace.request_id[6:]) % 8)
        trace.chunk_times = [time + late for time in trace.chunk_times]
    assert said(slow) == []


def test_metrics_decide_where_there_are_any() -> None:
    def gauges(running: float, waiting: float) -> dict[str, dict[str, float]]:
        kinds = {"num_requests_running": running, "num_requests_waiting": waiting}
        return {name: {"mean": most / 2, "max": most} for name, most in kinds.items()}

    assert "worked on 4" in said(served(8), gauges=gauges(4, 4))[0]
    assert said(served(4), gauges=gauges(8, 0)) == []


def test_a_stream_that_stands_still_while_others_go_on() -> None:
    traces = served(8)
    stopped = traces[3].chunk_times
    traces[3].chunk_times = [time + (0.6 if n > 5 else 0) for n, time in enumerate(stopped)]
    traces[3].chunk_times += [t + 0.7 for t in stopped[-1:]]
    traces[3].chunk_tokens.append(1)
    traces[3].wanted_len += 1
    (found,) = said(traces)
    assert found.startswith("1 streams stood still")
    for trace in traces:  # all of them: a long prompt came
        trace.chunk_times = [t + (0.8 if t > 0.1 else 0) for t in trace.chunk_times]
    assert not [one for one in said(traces) if "stood still" in one and not one.startswith("1 ")]


def test_truncated_and_cached() -> None:
    traces = served(8)
    traces[0].wanted_len = 25
    (found,) = said(traces)
    assert found.startswith("1 of 24 answers are 5 tokens shorter")
    assert said(traces, fixed_lengths=False) == []
    assert "40% of the prompt tokens" in said(served(8), hit_rate=0.4, shared=0.1)[0]
    assert (
        said(served(8), hit_rate=0.4, shared=0.39)
        == said(served(8), hit_rate=0.4, shared=None)
        == []
    )


def test_the_share_that_prompts_have_in_common() -> None:
    prompts = [(1, 2, 3, 4), (1, 2, 3, 5), (1, 9, 9, 9), (7, 7, 7, 7)]
    work = Workload("custom", "test", numbered([(prompt, 1) for prompt in prompts]))
    assert shared_tokens(work) == (3 + 3 + 1) / 16
