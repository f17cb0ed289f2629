"""Aggregates against traces worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from llmopt.base.errors import BadInput
from llmopt.bench.metrics.metrics import (
    aggregate,
    exact_peaks,
    peaks_by_second,
    percentile_word,
    samples,
    summary,
    turn_figures,
)
from llmopt.bench.metrics.trace import LoadPass, RequestTrace
from llmopt.engine.base.units import parse_slo

SELECTED = ("ttft", "tpot", "itl", "e2el")


def trace(
    name: str,
    chunks: list[tuple[float, int]],
    *,
    sent: float = 0.0,
    scheduled: float = 0.0,
    prompt_len: int = 10,
    success: bool = True,
) -> RequestTrace:
    times, tokens = [time for time, _ in chunks], [count for _, count in chunks]
    return RequestTrace(
        name,
        prompt_len,
        sum(tokens),
        scheduled,
        sent,
        times,
        tokens,
        success,
        "" if success else "refused",
    )


# Three requests: one token a chunk, a chunk of three tokens, and a single token.
PLAIN = trace("plain", [(0.1, 1), (0.2, 1), (0.4, 1)])
BURST = trace("burst", [(1.2, 1), (1.5, 3), (1.6, 2)], sent=1.0, scheduled=0.5, prompt_len=20)
SINGLE = trace("single", [(2.3, 1)], sent=2.0, scheduled=2.0, prompt_len=30)
FAILED = trace("failed", [], sent=0.3, success=False, prompt_len=99)
ALL = LoadPass([PLAIN, BURST, SINGLE, FAILED], duration=4.0)


def test_samples_by_hand() -> None:
    found = samples(ALL.traces)
    assert found["ttft"] == pytest.approx([100, 200, 300])
    # (0.4 - 0.1) / 2 and (0.6 - 0.2) / 5; the single token has no TPOT.
    assert found["tpot"] == pytest.approx([150, 80])
    assert found["itl"] == pytest.approx([100, 200, 300, 100])
    assert found["token_gap"] == pytest.approx([100, 200, 100, 100, 100, 50, 50])
    assert found["e2el"] == pytest.approx([400, 600, 300])
    assert found["client_queue_time"] == pytest.approx([0, 500, 0])
    assert found["e2el_including_client_queue"] == pytest.approx([400, 1100, 300])
    assert found["ttft_from_schedule"] == pytest.approx([100, 700, 300])


def test_aggregate_by_hand() -> None:
    found = aggregate([ALL], metrics=SELECTED, percentiles=(50, 99))
    assert (found["completed"], found["failed"]) == (3, 1)
    assert found["total_input_tokens"] == 60  # the failed prompt is not counted
    assert found["total_output_tokens"] == 10
    assert found["request_throughput"] == pytest.approx(0.75)
    assert found["output_throughput"] == pytest.approx(2.5)
    assert found["total_token_throughput"] == pytest.approx(17.5)
    assert found["mean_ttft_ms"] == pytest.approx(200)
    assert found["std_ttft_ms"] == pytest.approx(math.sqrt(20000 / 3))  # divided by n
    assert found["mean_tpot_ms"] == pytest.approx(115)
    assert found["median_itl_ms"] == pytest.approx(150)
    # Linear interpolation: position 0.99 * 3 = 2.97 of [100, 100, 200, 300].
    assert found["p99_itl_ms"] == pytest.approx(297)
    assert found["p99_ttft_ms"] == pytest.approx(298)
    assert found["request_goodput"] is None


def test_single_token_output_has_no_tpot_and_no_itl() -> None:
    found = aggregate([LoadPass([SINGLE], 3.0)], metrics=SELECTED, percentiles=(99,))
    assert found["mean_ttft_ms"] == pytest.approx(300)
    assert found["mean_e2el_ms"] == pytest.approx(300)
    for key in ("mean_tpot_ms", "median_tpot_ms", "std_tpot_ms", "p99_tpot_ms", "mean_itl_ms"):
        assert found[key] is None


def test_nothing_succeeded_gives_none_and_not_nan() -> None:
    found = aggregate([LoadPass([FAILED], 1.0)], metrics=SELECTED, percentiles=(99,))
    assert (found["completed"], found["failed"]) == (0, 1)
    assert found["mean_ttft_ms"] is None
    assert found["output_throughput"] == 0


def test_passes_are_pooled() -> None:
    other = LoadPass([trace("plain", [(0.3, 1), (0.5, 1)])], duration=1.0)
    found = aggregate([ALL, other], metrics=SELECTED, percentiles=(99,))
    assert found["duration"] == 5.0
    assert found["completed"] == 4
    assert found["output_throughput"] == pytest.approx(12 / 5)
    assert found["mean_ttft_ms"] == pytest.approx((100 + 200 + 300 + 300) / 4)


def test_goodput_counts_requests_that_meet_every_limit() -> None:
    def goodput(*words: str) -> float:
        return aggregate([ALL], metrics=SELECTED, percentiles=(99,), goodput_ms=parse_slo(words))[
            "request_goodput"
        ]

    assert goodput("ttft:200") == pytest.approx(2 / 4)
    assert goodput("ttft:200 tpot:100") == pytest.approx(1 / 4)
    # The single token has a TPOT of 0 here and passes.
    assert goodput("tpot:100") == pytest.approx(2 / 4)
    assert goodput("e2el:599") == pytest.approx(2 / 4)


@pytest.mark.parametrize("word", ["itl:5", "ttft", "ttft:fast", "ttft:-1", "ttft:nan"])
def test_goodput_refuses(word: str) -> None:
    with pytest.raises(BadInput, match="goodput"):
        parse_slo([word])


def test_cached_tokens_that_nobody_tells_are_unknown_and_not_0() -> None:
    def turns(*cached: int | None) -> list[tuple[float | None, float | None]]:
        traces = [trace(str(n), [(0.1, 1)]) for n in range(len(cached))]
        for number, (own, tokens) in enumerate(zip(traces, cached, strict=True)):
            own.turn, own.cached_tokens = number, tokens
        figures = turn_figures([LoadPass(traces, duration=1.0)], None)["turns"]
        return [(turn["mean_cached_tokens"], turn["prefix_cache_hit_rate"]) for turn in figures]

    assert turns(None, None) == [(None, None)] * 2
    assert turns(None, 8) == [(0, 0), (8, 0.8)], "vLLM tells hits alone"
    assert turns(0, 0) == [(0, 0)] * 2


def test_reasoning_that_is_not_sent_back_is_no_history() -> None:
    """The prompt of a second turn has 5 tokens of the first answer and 3 new ones, not its 95 of reasoning."""
    first, second = (trace(str(number), [(0.1, 100)]) for number in range(2))
    second.turn, first.history_tokens = 1, 5
    first.prompt_len, second.prompt_len = 10, 18
    figures = turn_figures([LoadPass([first, second], duration=1.0)], None)["turns"]
    assert [turn["mean_new_tokens"] for turn in figures] == [10, 3]


def test_peaks_as_vllm_counts() -> None:
    # Seconds from the first send: chunks at 0.1 0.2 0.4 | 1.2 1.5 1.6 | 2.3; each touches one second.
    assert peaks_by_second(ALL.traces) == (3, 1)
    crossing = trace("crossing", [(0.9, 1), (1.1, 1)], sent=0.5)
    assert peaks_by_second([PLAIN, crossing]) == (4, 2)
    assert peaks_by_second([FAILED]) == (0, 0)


def test_exact_peaks_count_tokens_and_moments() -> None:
    # Within (0.6, 1.6]: the 6 tokens of BURST.
    assert exact_peaks(ALL.traces) == {"output_tokens_in_one_second": 6, "requests_in_flight": 1}
    freed = trace("freed", [(0.8, 1)], sent=0.4)  # takes the slot that PLAIN frees at 0.4
    assert exact_peaks([PLAIN, freed])["requests_in_flight"] == 1
    beside = trace("beside", [(0.8, 1)], sent=0.39)
    assert exact_peaks([PLAIN, beside])["requests_in_flight"] == 2


def test_percentile_words() -> None:
    assert [percentile_word(p) for p in (99, 99.0, 99.9, 50)] == ["p99", "p99", "p99.9", "p50"]
    assert summary(np.array([1.0, 2.0]), (25,))["p25"] == pytest.approx(1.25)
