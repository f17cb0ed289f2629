"""The steady-state window, on passes whose figures can be counted by hand."""

from __future__ import annotations

import pytest
from llmopt.bench.metrics.run_statistics import steady_state, window_of
from llmopt.bench.metrics.trace import LoadPass, RequestTrace


def request(sent: float, *chunks: float, ok: bool = True) -> RequestTrace:
    return RequestTrace(
        f"r{sent}", 10, len(chunks), sent, sent, list(chunks), [1] * len(chunks), success=ok
    )


# Two in flight from 1 to 9; before and after only one.
TRACES = [
    request(0.0, 2.0, 4.0),
    request(1.0, 3.0, 9.0),
    request(4.0, 5.0, 6.0),
    request(6.0, 8.0, 12.0),
]


def test_window_spans_the_first_to_the_last_moment_at_the_height() -> None:
    assert window_of(TRACES, 2) == (1.0, 9.0)
    assert window_of(TRACES, 3) is None
    assert window_of(TRACES, 1) == (0.0, 12.0)


def test_figures_of_the_window() -> None:
    found = steady_state([LoadPass(TRACES, 12.0)], 2)
    assert found is not None
    # Ends at 4, 9 and 6; tokens at 2, 4, 3, 9, 5, 6, 8; sent within: at 1, 4 and 6.
    assert found["request_throughput"] == pytest.approx(3 / 8)
    assert found["output_throughput"] == pytest.approx(7 / 8)
    assert found["input_throughput"] == pytest.approx(30 / 8)
    assert found["mean_ttft_ms"] == pytest.approx((2 + 1 + 2) / 3 * 1000)
    (window,) = found["windows"]
    assert (window["start_s"], window["end_s"], window["duration_s"]) == (1.0, 9.0, 8.0)
    assert window["requests_started_in_window"] == window["requests_completed_in_window"] == 3
    assert window["warning"]


def test_passes_are_pooled_and_a_failure_counts_for_nothing() -> None:
    bad = [*TRACES[:3], request(6.0, 8.0, 12.0, ok=False)]
    found = steady_state([LoadPass(TRACES, 12.0), LoadPass(bad, 12.0)], 2)
    assert found is not None
    assert found["request_throughput"] == pytest.approx(6 / 16)
    assert found["output_throughput"] == pytest.approx((7 + 6) / 16)
    assert len(found["windows"]) == 2


def test_no_window_without_a_limit_or_below_it() -> None:
    assert steady_state([LoadPass(TRACES, 12.0)], None) is None
    assert steady_state([LoadPass(TRACES, 12.0)], 8) is None


def test_a_long_window_has_no_warning() -> None:
    traces = [request(0.0, 1.0, 30.0), request(0.0, 1.0, 29.0)]
    found = steady_state([LoadPass(traces, 30.0)], 2)
    assert found is not None
    assert found["windows"][0]["warning"] is None
