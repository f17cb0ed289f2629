from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from llmopt.base.errors import BadInput
from llmopt.engine.base.sampling_params import SamplingParams
from llmopt.engine.sampling.rowwise import RowwiseSampling, SamplingRow, filter_mask, penalize
from llmopt.engine.sampling.sampler import Logprobs, Sampler


def row(history=(1,), num_prompt_tokens=1, seed=0, suppressed_ids=(), **params) -> SamplingRow:
    return SamplingRow(
        SamplingParams(**params), seed, list(history), num_prompt_tokens, frozenset(suppressed_ids)
    )


def draw(logits: list[float], **kwargs) -> int:
    return Sampler().draw(torch.tensor([logits]), [row(**kwargs)])[0][0]


def test_greedy_takes_the_first_of_the_best():
    assert draw([0.0, 3.0, 3.0], temperature=0) == 1
    assert draw([0.0, 3.0, 3.0], top_k=1) == 1, "top_k = 1 is greedy, ties and all"
    for tiny in (1e-4, 1e-6, 1e-40, 1e-320):
        assert draw([0.0, 900.0, 800.0], temperature=tiny, top_p=0.1) == 1


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_samples_follow_the_distribution(temperature):
    """Chi-square over 4,000 draws at different positions; the 99.99 % point for 4 degrees is 23.5."""
    logits = torch.tensor([1.0, 0.0, -1.0, 0.5, 2.0])
    n = 4000
    rows = [row(history=[0] * (i + 1), temperature=temperature, seed=11) for i in range(n)]
    drawn, _ = Sampler().draw(logits.expand(n, -1), rows)
    expected = (logits / temperature).softmax(-1).numpy() * n
    observed = np.bincount(drawn, minlength=5)
    assert ((observed - expected) ** 2 / expected).sum() < 23.5


def test_sampling_depends_on_seed_and_position_only():
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    rows = [row(history=[1] * 5, seed=s) for s in (1, 2, 3)]
    together, _ = Sampler().draw(logits, rows)
    alone = [Sampler().draw(logits[i : i + 1], rows[i : i + 1])[0][0] for i in range(3)]
    assert together == alone
    other = [draw(logits[0].tolist(), history=[1] * k, seed=1) for k in range(1, 30)]
    assert len(set(other)) > 1


def test_noise_is_exponential_positive_and_of_its_key_alone():
    kernel, device = RowwiseSampling(), torch.device("cpu")
    noise = kernel.noise([(5, 9), (5, 10), (6, 9), (5, 9)], 20000, 0, device)
    assert noise.min() > 0
    assert (noise.mean(dim=1) - 1).abs().max() < 0.03
    key, counter = np.array([5, 9], np.uint64), np.array([0, 0, 0, 0], np.uint64)
    philox = np.random.Generator(np.random.Philox(key=key, counter=counter))
    expected = torch.from_numpy(philox.standard_exponential(20000, dtype=np.float32))
    assert torch.equal(noise[0], expected) and torch.equal(noise[3], expected)
    assert not torch.equal(noise[1], expected) and not torch.equal(noise[2], expected)
    assert not torch.equal(kernel.noise([(5, 9)], 20000, 1, device)[0], expected)


@settings(max_examples=60, deadline=None)
@given(
    vocab=st.sampled_from([1, 2, 33, 300, 5000]),
    scale=st.sampled_from([0.1, 3.0, 20.0]),
    steps=st.sampled_from([None, 1.0, 0.0]),
    seed=st.integers(0, 1000),
    params=st.builds(
        SamplingParams,
        temperature=st.sampled_from([0.5, 1.0]),
        top_p=st.sampled_from([1e-6, 0.5, 0.95, 1.0 - 1e-7, 1.0]),
        top_k=st.sampled_from([0, 1, 40, 6000]),
        min_p=st.sampled_from([0.0, 0.01, 0.5, 1.0]),
    ),
)
def test_filters_of_candidates_keep_what_filters_of_all_scores_keep(
    vocab, scale, steps, seed, params
):
    logits = scale * torch.randn(vocab, generator=torch.Generator().manual_seed(seed))
    logits = logits if steps is None else (logits * steps).round()
    sampled = SamplingRow(params, 0, [1], 1)
    probabilities = RowwiseSampling().distributions(logits[None], [sampled])[0]
    ordered, order = (logits / params.temperature).sort(descending=True, stable=True)
    expected = torch.zeros(vocab, dtype=torch.bool)
    expected[order] = filter_mask(ordered, params) if params.filters else True
    differs = (probabilities > 0) != expected
    if differs.any():  # only where rounding decides what reaches p, or what float32 has for nothing
        chances = (logits / params.temperature).double().softmax(dim=-1)
        before = torch.zeros_like(chances)
        before[order] = chances[order].cumsum(dim=-1) - chances[order]
        is_near = (before - params.top_p).abs() < 1e-5
        assert (is_near | (chances < 1e-38))[differs].all()


def test_top_p_counts_equal_tokens_at_a_temperature_near_zero():
    logits = torch.tensor([30.0, 30.0, -5.0, -5.0])
    sampled = row(temperature=1e-5, top_p=0.49)
    probabilities = RowwiseSampling().distributions(logits[None], [sampled])[0]
    assert probabilities.tolist() == [1.0, 0.0, 0.0, 0.0]


def survivors(probabilities: list[float], **params) -> list[int]:
    ordered = torch.tensor(probabilities).log()
    return filter_mask(ordered, SamplingParams(**params)).nonzero().flatten().tolist()


def test_filters_keep_what_they_promise():
    p = [0.5, 0.25, 0.15, 0.1]
    assert survivors(p, top_k=2) == [0, 1]
    assert survivors(p, top_p=0.5) == [0]
    assert survivors(p, top_p=0.51) == [0, 1]
    assert survivors(p, top_p=0.76) == [0, 1, 2]
    assert survivors(p, min_p=0.4) == [0, 1]
    assert survivors(p, min_p=1.0) == [0]
    # top-p looks at what top-k left: 0.5 / 0.75 = 0.67 of it is the first.
    assert survivors(p, top_k=2, top_p=0.6) == [0]
    assert survivors(p, top_k=100, top_p=1.0) == [0, 1, 2, 3]


@given(
    logits=st.lists(st.floats(-20, 20), min_size=1, max_size=12),
    top_k=st.integers(1, 14),
    top_p=st.floats(0.01, 1.0),
    min_p=st.floats(0.0, 1.0),
)
def test_filters_never_empty_and_never_grow(logits, top_k, top_p, min_p):
    ordered = torch.tensor(sorted(logits, reverse=True))
    keep = filter_mask(ordered, SamplingParams(top_k=top_k, top_p=top_p, min_p=min_p))
    assert keep[0]
    assert keep.sum() <= min(top_k, len(logits))


def test_penalties_by_hand():
    history, prompt = [0, 1, 1, 2], 1  # prompt 0; output 1, 1, 2
    scores = torch.tensor([2.0, -2.0, 4.0, 1.0])
    penalize(scores, row(history, prompt, repetition_penalty=2.0))
    assert scores.tolist() == [1.0, -4.0, 2.0, 1.0]
    scores = torch.zeros(4)
    penalize(scores, row(history, prompt, frequency_penalty=0.5, presence_penalty=0.25))
    assert scores.tolist() == [0.0, -1.25, -0.75, 0.0]


def test_bias_and_suppressed_tokens():
    assert draw([0.0, 1.0, 2.0], temperature=0, logit_bias={0: 5.0}) == 0
    assert draw([0.0, 1.0, 2.0], temperature=0, suppressed_ids=[2]) == 1
    logits = torch.tensor([[0.0, 1.0]])
    Sampler().draw(logits, [row(temperature=0, logit_bias={0: 9.0})])
    assert logits.tolist() == [[0.0, 1.0]], "the scores belong to the caller"


def test_logprobs_are_the_models_own():
    logits = torch.tensor([[1.0, 2.0, 3.0]])
    _, logprobs = Sampler().draw(logits, [row(temperature=0, logprobs=2, logit_bias={0: 9.0})])
    got = logprobs[0]
    assert got is not None
    normalizer = math.log(math.exp(1) + math.exp(2) + math.exp(3))
    assert got.token_id == 0
    assert got.rank == 3
    assert got.logprob == pytest.approx(1 - normalizer, abs=1e-6)
    assert [token for token, _ in got.top] == [2, 1]
    assert Logprobs(logits, torch.tensor([2]), 0).result()[0].top == ()


@pytest.mark.parametrize(
    "bad",
    [
        {"temperature": -1.0}, {"temperature": float("nan")}, {"top_p": 0.0}, {"top_p": 1.1}, {"top_k": -2},
        {"min_p": 2.0}, {"max_tokens": 0}, {"min_tokens": 5, "max_tokens": 4}, {"n": 0}, {"stop": ("",)},
        {"repetition_penalty": 0.0}, {"repetition_penalty": 1e-300}, {"n": 10**9}, {"presence_penalty": 3.0}, {"logprobs": -1}, {"stop": "text"},
    ],
)  # fmt: skip
def test_nonsense_is_refused(bad):
    with pytest.raises(BadInput):
        SamplingParams(**bad)
