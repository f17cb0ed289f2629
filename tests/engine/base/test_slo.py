"""The grammar of limits, and the search from a guess."""

from __future__ import annotations

import pytest
from llmopt.base.errors import BadInput
from llmopt.engine.base.units import SloResult, highest_near, parse_slo, required_slo


def test_times_have_units_or_are_in_milliseconds() -> None:
    limits = parse_slo(["ttft:1s", "tpot:20ms,e2e:0.5min"])
    assert limits == {"ttft": 1000.0, "tpot": 20.0, "e2el": 30_000.0}
    assert parse_slo(["ttft:200 tpot:50.5 e2el:1e3"]) == {"ttft": 200, "tpot": 50.5, "e2el": 1000}
    assert required_slo("tpot:500us") == {"tpot": 0.5}


@pytest.mark.parametrize("text", ["ttft:1h", "ttft:1.2.3", "itl:5ms", "ttft:", "tpot:-1s", ""])
def test_what_is_no_limit_is_refused(text: str) -> None:
    with pytest.raises(BadInput, match="--slo"):
        required_slo(text)


@pytest.mark.parametrize("guess", [1, 7, 90, 100, 101, 400])
@pytest.mark.parametrize("limit", [1, 2, 3, 57, 100, 399])
def test_counts_are_found_to_five_percent(guess: int, limit: int) -> None:
    tried: list[float] = []

    def keeps(count: float) -> bool:
        tried.append(count)
        return count <= limit

    found = highest_near(keeps, guess, 1, 400, whole=True)
    assert found.best is not None and found.failed is not None
    assert found.best <= limit < found.failed <= max(found.best + 1, 1.06 * found.best)
    assert len(tried) == len(set(tried)) <= 14
    assert all(count == int(count) for count in tried)


def test_a_search_ends_at_its_bounds() -> None:
    assert highest_near(lambda _: True, 5, 1, 40, whole=True) == SloResult(40, None)
    assert highest_near(lambda _: False, 5, 1, 40, whole=True) == SloResult(None, 1)
    found = highest_near(lambda rate: rate <= 3.3, 1.0, 0.001, 1000.0, whole=False)
    assert found.best is not None and found.best == pytest.approx(3.3, rel=0.06)
