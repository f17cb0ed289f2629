"""Rates of predicted intervals and of promises at the truth, on answers drawn at random."""

from __future__ import annotations

import numpy as np
import pytest

from tools import flip_rates
from tools.flip_rates import Answers, broken_at_the_truth, held_shares


@pytest.fixture(autouse=True)
def fewer_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flip_rates, "SPLITS", 150)


def drawn(flips: float, count: int = 300) -> Answers:
    rng = np.random.default_rng(0)
    before, flipped = rng.random(count) < 0.7, rng.random(count) < flips
    return Answers(flipped, before, np.where(flipped, ~before, before))


def test_halves_of_one_distribution_predict_each_other() -> None:
    held = held_shares(drawn(0.2), np.random.default_rng(1))
    assert all(0.8 <= share <= 0.99 for share in held)


def test_a_half_of_other_items_is_not_predicted() -> None:
    """Splits that put all flips into one half."""
    answers = drawn(0.2)

    class Sorted:
        def permutation(self, _count: int) -> np.ndarray:
            return np.argsort(answers.flipped, kind="stable")

    assert held_shares(answers, Sorted()) == (0, 0)  # pyright: ignore[reportArgumentType]


def test_promises_at_the_truth_are_seldom_broken() -> None:
    assert (broken_at_the_truth(drawn(0.1), np.random.default_rng(2)) <= 0.07).all()
    equal = Answers(*(np.zeros(50, bool),) * 3)
    assert (broken_at_the_truth(equal, np.random.default_rng(3)) == 0).all()
