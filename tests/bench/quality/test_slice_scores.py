"""Reduction of logits to scores: against log-softmax in float64."""

from __future__ import annotations

import pytest
import torch
from llmopt.base.errors import BadInput
from llmopt.bench.quality import scoring
from llmopt.bench.quality.scoring import reduce_slice


def both(rows: int = 37, vocab: int = 1009) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    reference = torch.randn(rows, vocab) * 4
    model = reference + torch.randn(rows, vocab) * 0.3 + 7.0  # logits are free up to a constant
    return model, reference, torch.randint(vocab, (rows,))


@pytest.mark.parametrize("block_bytes", [scoring.BLOCK_BYTES, 4 * 1009 * 5, 1])
def test_scores_equal_log_softmax(monkeypatch: pytest.MonkeyPatch, block_bytes: int) -> None:
    monkeypatch.setattr(scoring, "BLOCK_BYTES", block_bytes)
    model, reference, ids = both()
    q, p = model.double().log_softmax(-1), reference.double().log_softmax(-1)
    expected = torch.stack(
        [
            -q.gather(1, ids[:, None])[:, 0],
            (q > q.gather(1, ids[:, None])).sum(1) + 1,
            -p.gather(1, ids[:, None])[:, 0],
            (p > p.gather(1, ids[:, None])).sum(1) + 1,
            (p.exp() * (p - q)).sum(1),
            q.argmax(1) == p.argmax(1),
            p.exp().amax(1),
        ],
        dim=1,
    )
    torch.testing.assert_close(reduce_slice(model.clone(), ids), expected[:, :2], atol=1e-5, rtol=0)
    got = reduce_slice(model, ids, reference)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


def test_equal_logits_have_no_distance() -> None:
    model, _, ids = both()
    got = reduce_slice(model.clone(), ids, model)
    assert (got[:, 4] == 0).all() and (got[:, 5] == 1).all()
    assert torch.equal(got[:, 0], got[:, 2]) and torch.equal(got[:, 1], got[:, 3])


def test_other_vocabularies_are_refused() -> None:
    model, reference, ids = both()
    with pytest.raises(BadInput, match="cannot be compared"):
        reduce_slice(model, ids, reference[:, 1:])
