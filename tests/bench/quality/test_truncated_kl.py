"""KL divergence from top tokens: a lower bound, exact where every token is told."""

from __future__ import annotations

import numpy as np
import pytest
from llmopt.bench.quality.summary import truncated_kl


def top(logprobs: np.ndarray, count: int) -> dict[int | str, float]:
    kept = np.argsort(-logprobs)[:count]
    return {int(token): float(logprobs[token]) for token in kept}


def test_lower_bound_that_tightens_with_more_tokens() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        logits = rng.normal(0, 3, 200)
        both = [logits, logits + rng.normal(0, 0.5, 200)]
        p, q = (each - np.log(np.exp(each).sum()) for each in both)
        exact = float((np.exp(p) * (p - q)).sum())
        coarse, fine = (truncated_kl(top(p, count), top(q, count)) for count in (5, 60))
        assert 0 <= coarse.kl <= exact + 1e-12 and 0 <= fine.kl <= exact + 1e-12
        assert fine.rest < coarse.rest < 1
        whole = truncated_kl(top(p, 200), top(q, 200))
        assert whole.kl == pytest.approx(exact, abs=1e-6) and whole.rest < 1e-6
        assert truncated_kl(top(p, 20), top(p, 20)).kl == 0.0


def test_tokens_of_one_side_are_in_the_bucket() -> None:
    half: dict[int | str, float] = {1: np.log(0.5), 2: np.log(0.25)}
    other: dict[int | str, float] = {1: np.log(0.25), 3: np.log(0.5)}
    kl, rest = truncated_kl(half, other)  # {1} and the rest: 0.5, 0.5 against 0.25, 0.75
    assert kl == pytest.approx(0.5 * np.log(2) + 0.5 * np.log(0.5 / 0.75))
    assert rest == pytest.approx(0.5)
    assert truncated_kl({1: -0.1}, {2: -0.1}).kl == 0.0
