"""Token buckets on a clock of the test's own: refusals, refill, reservation, correction and headers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llmopt.engine.server.protocol.errors import TooMany
from llmopt.engine.server.requests.limits import RateLimits, duration


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def limits(clock: Clock, rpm: int | None = None, tpm: int | None = None) -> RateLimits:
    made = RateLimits(clock)
    made.configure(rpm, tpm)
    return made


def headers(limited: RateLimits) -> dict[str, str]:
    return {name.decode().removeprefix("x-ratelimit-"): v.decode() for name, v in limited.headers()}


def test_no_limit_has_no_headers_and_refuses_nothing(clock: Clock) -> None:
    free = limits(clock)
    for _ in range(1000):
        free.take_request()
    free.reserve(10**9, at_least=10**9).settle(10**9)
    assert free.headers() == [] and not free.refused


def test_requests_are_refused_until_the_bucket_has_one(clock: Clock) -> None:
    limited = limits(clock, rpm=3)
    for left in ("2", "1", "0"):
        limited.take_request()
        assert headers(limited)["remaining-requests"] == left
    assert headers(limited) == {
        "limit-requests": "3",
        "remaining-requests": "0",
        "reset-requests": "1m0s",
    }
    with pytest.raises(TooMany) as refused:
        limited.take_request()
    assert refused.value.status == 429 and limited.refused["requests"] == 1
    assert (refused.value.headers or {})["Retry-After"] == "20"
    clock.now += 19.9
    with pytest.raises(TooMany):
        limited.take_request()
    clock.now += 0.2
    limited.take_request()


def test_tokens_are_reserved_and_the_unused_come_back(clock: Clock) -> None:
    limited = limits(clock, tpm=600)
    reservation = limited.reserve(500, at_least=500)
    assert headers(limited)["remaining-tokens"] == "100"
    with pytest.raises(TooMany) as refused:
        limited.reserve(300, at_least=300)
    assert (refused.value.headers or {})["Retry-After"] == "20"
    reservation.settle(120)
    reservation.settle(0)  # once only
    assert headers(limited)["remaining-tokens"] == "480"
    limited.reserve(300, at_least=300)


def test_an_open_end_takes_what_the_limit_has_and_no_more(clock: Clock) -> None:
    limited = limits(clock, tpm=600)
    reservation = limited.reserve(100_000, at_least=50)
    assert headers(limited)["remaining-tokens"] == "0"
    reservation.settle(900)  # it generated more than a minute's worth: later requests pay
    clock.now += 29
    with pytest.raises(TooMany):
        limited.reserve(1, at_least=1)
    clock.now += 1.2
    limited.reserve(1, at_least=1)


def test_what_can_never_fit_is_refused_for_good(clock: Clock) -> None:
    limited = limits(clock, tpm=600)
    with pytest.raises(TooMany, match="asks for 601 tokens, more than the 600") as refused:
        limited.reserve(601, at_least=601)
    assert (refused.value.headers or {})["x-should-retry"] == "false"
    assert headers(limited)["remaining-tokens"] == "600"


def test_new_limits_count_what_was_used(clock: Clock) -> None:
    limited = limits(clock, rpm=10, tpm=100)
    for _ in range(8):
        limited.take_request()
    limited.configure(20, None)
    assert headers(limited)["remaining-requests"] == "12" and "limit-tokens" not in headers(limited)
    limited.configure(5, 50)
    assert headers(limited)["remaining-requests"] == "0"
    assert headers(limited)["remaining-tokens"] == "50"
    with pytest.raises(TooMany):
        limited.take_request()


@given(st.lists(st.tuples(st.integers(1, 200), st.integers(0, 200), st.floats(0, 30)), max_size=40))
def test_never_more_than_capacity_and_refill(steps: list[tuple[int, int, float]]) -> None:
    """Over any time, the tokens of settled requests are within the capacity and what was refilled."""
    clock = Clock()
    limited, used = limits(clock, tpm=300), 0
    begin = clock.now
    for asked, generated, seconds in steps:
        try:
            reservation = limited.reserve(asked, at_least=asked)
        except TooMany:
            continue
        finally:
            clock.now += seconds
        spent = min(asked, generated)
        reservation.settle(spent)
        used += spent
        assert used <= 300 + (clock.now - begin) * 5 + 1e-6


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0ms"), (0.0121, "13ms"), (1, "1s"), (59.2, "1m0s"), (90, "1m30s"), (6.5, "7s")],
)
def test_durations_are_openai_s(seconds: float, text: str) -> None:
    assert duration(seconds) == text
