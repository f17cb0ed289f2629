"""Processor cores and memory available to this process."""

from __future__ import annotations

import pytest
from llmopt.engine.base.host import usable_cores


@pytest.mark.parametrize(
    ("asked", "most"), [("1", 1), ("1,4", 1), ("100000", 100000), ("", 100000)]
)
def test_threads_that_the_user_asked_for_are_an_upper_bound(
    monkeypatch: pytest.MonkeyPatch, asked: str, most: int
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    free = usable_cores()
    monkeypatch.setenv("OMP_NUM_THREADS", asked)
    assert usable_cores() == min(free, most)


@pytest.mark.parametrize("asked", ["0", "many", "-1"])
def test_a_thread_count_that_is_no_number_is_ignored(
    monkeypatch: pytest.MonkeyPatch, asked: str
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    free = usable_cores()
    monkeypatch.setenv("OMP_NUM_THREADS", asked)
    assert usable_cores() == free
