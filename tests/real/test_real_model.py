"""SmolLM2-135M-Instruct in the engine: greedy continuations as transformers makes them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.continuations import continuations

COUNT = 100
NEW_TOKENS = 24


@pytest.mark.timeout(900)
def test_greedy_continuations_equal_transformers(real_model: Path) -> None:
    pairs = list(continuations(real_model, COUNT, NEW_TOKENS))
    assert len(pairs) == COUNT
    assert all(len(ours) == NEW_TOKENS for ours, _ in pairs)
    assert [ours for ours, _ in pairs] == [theirs for _, theirs in pairs]
