"""Recurrences in chunks against their steps token by token, and steps of mixed batches."""

from __future__ import annotations

import sys
from functools import partial

import pytest
import torch
from llmopt.engine.kernels.attention.batch import AttentionBatch, DecodeGroup, SequenceSpan
from llmopt.engine.kernels.common.verdicts import relative_error
from llmopt.engine.kernels.elementwise import dispatch
from llmopt.engine.kernels.elementwise.dispatch import RowKernelQuery
from llmopt.engine.kernels.elementwise.recurrence import (
    causal_conv,
    causal_conv_step,
    delta_rule,
    delta_rule_step,
    ssd_scan,
    ssd_step,
)
from llmopt.engine.model.layers.state import StateBatch, StepStates


def _conv(tokens: int):
    weight, bias = torch.randn(6, 4), torch.randn(6)
    inputs = (torch.randn(tokens, 6),)
    return (
        inputs,
        torch.randn(6, 4),
        lambda x, state: causal_conv(x, state, weight, bias),
        lambda x, state: causal_conv_step(x, state, weight, bias),
    )


def _delta(tokens: int):
    query, key = torch.randn(2, tokens, 3, 8).unbind()
    key = key / key.norm(dim=-1, keepdim=True)
    decay, rate = -torch.rand(tokens, 3), torch.rand(tokens, 3)
    inputs = (query, key, torch.randn(tokens, 3, 5), decay, rate)
    return inputs, torch.randn(3, 8, 5), delta_rule, delta_rule_step


def _ssd(tokens: int):
    rate = -torch.rand(4) - 0.1
    into, out_of = torch.randn(2, tokens, 2, 5).unbind()
    inputs = (torch.randn(tokens, 4, 3), torch.rand(tokens, 4), into, out_of)
    return (
        inputs,
        torch.randn(4, 3, 5),
        partial(ssd_scan, rate=rate),
        partial(ssd_step, rate=rate),
    )


RECURRENCES = {"convolution": _conv, "delta rule": _delta, "state space": _ssd}


@pytest.mark.parametrize("tokens", [1, 2, 63, 64, 65, 150])
@pytest.mark.parametrize("name", RECURRENCES)
def test_a_run_of_tokens_is_its_steps(name, tokens):
    torch.manual_seed(tokens)
    inputs, state, run, step = RECURRENCES[name](tokens)
    got, after = run(*inputs, state)
    expected, states = [], state[None]
    for token in range(tokens):
        out, states = step(*(x[token : token + 1] for x in inputs), states)
        expected.append(out)
    torch.testing.assert_close(got, torch.cat(expected), atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(after, states[0], atol=2e-5, rtol=1e-4)


def test_a_large_decay_stays_finite():
    """Sums of log decays of a chunk that no exponential of their differences may overflow."""
    inputs, state, run, _ = _delta(70)
    out, after = run(*inputs[:3], inputs[3] * 1e4, inputs[4], state)
    assert out.isfinite().all() and after.isfinite().all()
    x, length, into, out_of = _ssd(70)[0]
    out, after = ssd_scan(x, length * 1e4, into, out_of, torch.randn(4, 3, 5), -torch.ones(4))
    assert out.isfinite().all() and after.isfinite().all()


def _batch(lengths: list[int], known: list[int]) -> AttentionBatch:
    """Sequences with so many tokens in the step, after so many known ones."""
    spans, rows, totals, row = [], [], [], 0
    for length, before in zip(lengths, known, strict=True):
        if length > 1:
            spans.append(SequenceSpan(row, row + length, before + length, torch.tensor([1])))
        else:
            rows.append(row)
            totals.append(before + 1)
        row += length
    group = None
    if rows:
        ones = torch.ones(len(rows), dtype=torch.int64)
        group = DecodeGroup(torch.tensor(rows), ones, torch.tensor(totals), ones - 1)
    # Their order is no promise of a batch.
    return AttentionBatch(spans[::-1], group, 4, torch.float32)


@pytest.mark.parametrize(
    ("lengths", "known"),
    [
        ([1, 1, 1], [3, 0, 5]),
        ([1, 4, 1, 1, 3, 1], [2, 0, 0, 7, 6, 1]),
        ([3, 2], [0, 4]),
        ([2, 1, 1], [1, 1, 0]),
    ],
    ids=["decodes", "mixed", "prompts", "a prompt first"],
)
@pytest.mark.parametrize("name", RECURRENCES)
def test_a_mixed_step_is_each_sequence_alone(name, lengths, known):
    """Slots are in any order, and one of a sequence that begins holds its last owner's leavings."""
    torch.manual_seed(0)
    inputs, state, run, step = RECURRENCES[name](sum(lengths))
    tensor = torch.randn(len(lengths) + 2, *state.shape)
    slots = torch.randperm(len(lengths) + 1)[: len(lengths)] + 1
    for index, before in enumerate(known):
        if before == 0:
            tensor[slots[index]] = float("nan")
    held = tensor.clone()
    states = StepStates.of(StateBatch((tensor,), slots), _batch(lengths, known))
    got = states.advance(0, inputs, run, step)
    row = 0
    for index, (length, before) in enumerate(zip(lengths, known, strict=True)):
        rows = slice(row, row + length)
        begin = held[slots[index]] if before else torch.zeros_like(state)
        out, after = run(*(x[rows] for x in inputs), begin)
        torch.testing.assert_close(got[rows], out, atol=2e-5, rtol=1e-4)
        torch.testing.assert_close(tensor[slots[index]], after, atol=2e-5, rtol=1e-4)
        row += length
    others = sorted({*range(len(tensor))} - {*slots.tolist()})
    assert torch.equal(tensor[others], held[others]), "other sequences' states are as they were"


class _StandIn:
    """fla-core's function as it is documented: [batch, tokens, heads, dim] in 16 bits, a state of each batch."""

    def chunk_gated_delta_rule(
        self, q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False
    ):
        assert q.dtype is k.dtype is v.dtype is torch.bfloat16 and q.dim() == v.dim() == 4
        assert g.dtype is beta.dtype is initial_state.dtype is torch.float32
        assert g.shape == beta.shape == q.shape[:3] and scale == 1.0 and output_final_state
        assert initial_state.shape == (1, q.shape[2], q.shape[3], v.shape[3])
        query, key, value = (x[0].float() for x in (q, k, v))
        out, state = delta_rule(query, key, value, g[0], beta[0], initial_state[0])
        return out[None].to(v.dtype), state[None]


def test_fla_is_called_as_it_is_documented(monkeypatch: pytest.MonkeyPatch) -> None:
    """And within the tolerance of its trial, whose inputs are those of a prompt."""
    monkeypatch.setitem(sys.modules, "fla.ops.gated_delta_rule", _StandIn())
    trial = dispatch.delta_rule_trial(RowKernelQuery("cpu", torch.bfloat16, 32))
    got, expected = trial.compute(dispatch.delta_rule_fla), trial.compute(delta_rule)
    assert 0 < relative_error(got, expected) < trial.tolerance
    query = RowKernelQuery("cpu", torch.bfloat16, 32)
    assert dispatch.DELTA_RULE.explain(query).reasons[0] == ("fla", "it is a CUDA library")
    assert dispatch.DELTA_RULE.select(query).name == "torch"
