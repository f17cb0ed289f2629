"""The C argmax of logits on every path that this processor has, against NumPy's."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from llmopt.base.processor import VARIABLE
from llmopt.engine.kernels.elementwise.native_rows import argmax_rows, native_argmax

from ...support.native_paths import native_paths

HERE = native_paths()
pytestmark = pytest.mark.skipif(not HERE, reason="the C kernels want AVX2 or NEON, and a compiler")


@pytest.fixture(params=HERE or ["off"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Every path, forced."""
    monkeypatch.setenv(VARIABLE, request.param)
    if (reason := native_argmax().reason) is not None:
        pytest.skip(reason)
    yield request.param


@pytest.mark.parametrize("vocab", [1, 7, 16, 33, 2047, 2048, 2049, 4100, 10_000])
def test_it_is_the_first_of_the_largest(path: str, vocab: int) -> None:
    generator = torch.Generator().manual_seed(vocab)
    # Few distinct values: the largest occurs many times, in many blocks and at their ends.
    logits = torch.randint(-3, 3, (9, vocab), generator=generator).float()
    logits[1] = -5.0
    logits[2] = float("-inf")
    logits[3, -1] = 8.0
    logits[4, 0] = 8.0
    logits[5] = logits[5].masked_fill(torch.arange(vocab) % 3 > 0, float("-inf"))
    logits[6] = torch.randn(vocab, generator=generator)
    assert argmax_rows(logits).tolist() == logits.numpy().argmax(axis=-1).tolist()


def test_threads_change_nothing_and_a_token_is_valid_whatever_the_logits(path: str) -> None:
    logits = torch.randn(40, 3000, generator=torch.Generator().manual_seed(1))
    alone = argmax_rows(logits)
    torch.set_num_threads(2)
    try:
        assert torch.equal(argmax_rows(logits), alone)
    finally:
        torch.set_num_threads(1)
    tokens = argmax_rows(torch.full((2, 3000), float("nan")))
    assert all(0 <= token < 3000 for token in tokens.tolist())
    assert argmax_rows(logits[:0]).shape == (0,)
