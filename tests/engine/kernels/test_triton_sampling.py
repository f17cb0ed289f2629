"""Sampling kernels in Triton against torch's, row by row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from llmopt.engine import LLM, SamplingParams
from llmopt.engine.config.config import SpeculationConfig
from llmopt.engine.execution.step_loop import DeviceAsyncLoop
from llmopt.engine.kernels.common.devices import VARIABLE
from llmopt.engine.sampling.rowwise import RowwiseSampling, SamplingRow, filter_mask
from llmopt.engine.sampling.sampler import SAMPLING, SamplingKernel, SamplingKernelQuery
from llmopt.engine.sampling.triton_sampling import TokenCounts
from llmopt.engine.scheduling.request import TokenView

from ...support.model_families import save_model
from ...support.triton_world import DEVICE

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's: log of 0
LOWEST = float("-inf")
ON = torch.device(DEVICE)


@pytest.fixture
def batched(monkeypatch: pytest.MonkeyPatch) -> SamplingKernel:
    monkeypatch.setenv(VARIABLE, "interpret" if DEVICE == "cpu" else "auto")
    chosen = SAMPLING.select(SamplingKernelQuery(DEVICE))
    assert chosen.name == "triton-batched"
    return chosen.run()


def row(known: Sequence[int] = (1,), seed: int = 0, prompt: int = 1, **given: Any) -> SamplingRow:
    others = {
        name: given.pop(name)
        for name in ("suppressed_ids", "stop_ids", "draft_ids")
        if name in given
    }
    return SamplingRow(SamplingParams(**given), seed, known, prompt, **others)


def scores(rows: int, vocab: int, seed: int = 0) -> torch.Tensor:
    made = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3
    return made.to(DEVICE)


FILTERS = st.tuples(
    st.sampled_from([0.3, 1.0, 2.5]),
    st.sampled_from([0.0, 0.02, 0.5, 1.0]),
    st.sampled_from([1.0, 0.95, 0.5, 0.01]),
    st.sampled_from([0, 1, 2, 7, 40, 10**6]),
)


@settings(max_examples=14, deadline=None)
@given(
    vocab=st.sampled_from([1, 2, 5, 33, 300, 2048, 2500, 5000]),
    most=st.sampled_from([16, 16384]),
    steps=st.sampled_from([None, 1.0, 0.0]),
    suppressed_ids=st.sampled_from([0.0, 0.4, 0.99]),
    filters=st.lists(FILTERS, min_size=1, max_size=4),
    seed=st.integers(0, 1000),
)
def test_what_stays_of_a_row(
    vocab: int,
    most: int,
    steps: float | None,
    suppressed_ids: float,
    filters: list[Any],
    seed: int,
) -> None:
    """The tokens that a stable sort leaves, ties included; where rounding decides, either.

    Among the candidates, and in a row that has more of them than there is memory for.
    """
    from llmopt.engine.sampling import triton_thresholds

    logits = scores(len(filters), vocab, seed)
    if steps is not None:
        logits = (logits * steps).round()
    noise = torch.rand(logits.shape, generator=torch.Generator().manual_seed(seed))
    logits = logits.masked_fill(noise.to(ON) < suppressed_ids, LOWEST)
    floats = torch.tensor([one[:3] for one in filters], device=ON)
    integers = torch.tensor([[0, 0, one[3]] for one in filters], device=ON)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(triton_thresholds, "MOST_CANDIDATES", most)
        threshold, last = triton_thresholds.thresholds(logits, floats, integers)
    for index, (temperature, min_p, top_p, top_k) in enumerate(filters):
        heated = logits[index] / floats[index, 0]  # CUDA divides by a number through its reciprocal
        tokens = torch.arange(vocab, device=ON)
        stays = (heated > threshold[index]) | (
            (heated == threshold[index]) & (tokens <= last[index])
        )
        possible = heated > LOWEST
        if not possible.any():
            continue
        params = SamplingParams(temperature=temperature, min_p=min_p, top_p=top_p, top_k=top_k)
        ordered, order = heated.sort(descending=True, stable=True)
        wanted = torch.zeros_like(stays).index_copy_(0, order, filter_mask(ordered, params))
        differs = ((stays != wanted) & possible)[order]
        if ON == "cuda":  # whose kernels divide to two units in the last place
            differs &= ~torch.isclose(ordered, threshold[index], rtol=1e-6, atol=0.0)
        if differs.any():
            # Of what min-p and top-k leave.
            left = filter_mask(ordered, replace(params, top_p=1.0))
            chances = ordered.masked_fill(~left, LOWEST).double().softmax(-1)
            before = chances.cumsum(-1) - chances
            assert (before[differs] - top_p).abs().max() < 1e-5 and differs.sum() <= 2


def test_the_noise_is_philox() -> None:
    """Against the published algorithm in whole numbers."""
    from llmopt.engine.sampling.triton_sampling import exponential

    keys = [(5, 9), (-(2**62) + 3, 70000), (5, 10)]
    got = exponential(torch.tensor(keys, device=ON), 50, 2).cpu()
    for (seed, position), own in zip(keys, got, strict=True):
        for token in range(50):
            expected = -np.log1p(-(philox((token, position, 2, 0), seed) + 0.5) / 2**32)
            assert own[token].item() == pytest.approx(expected, rel=3e-4)


def philox(counter: tuple[int, int, int, int], seed: int) -> int:
    """The first word of Philox4x32-10 (Salmon et al., 2011)."""
    a, b, c, d = counter
    low, high = seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF
    for _ in range(10):
        first, second = 0xD2511F53 * a, 0xCD9E8D57 * c
        a, b = (second >> 32) ^ b ^ low, second & 0xFFFFFFFF
        c, d = (first >> 32) ^ d ^ high, first & 0xFFFFFFFF
        low, high = (low + 0x9E3779B9) & 0xFFFFFFFF, (high + 0xBB67AE85) & 0xFFFFFFFF
    return a


class Mask:
    """Allows some tokens, packed or not."""

    def __init__(self, mask: torch.Tensor) -> None:
        self._mask = mask

    def allowed(self, prompt: Any, output: Any) -> torch.Tensor:
        return self._mask


def demanding_rows(vocab: int) -> list[SamplingRow]:
    """One row per sampling parameter that changes logits, and some with several."""
    known = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]
    some = torch.arange(vocab) % 3 == 0
    words = torch.tensor([-(2**31) + 5, 77], dtype=torch.int32)
    penalties: dict[str, Any] = {
        "repetition_penalty": 1.7,
        "frequency_penalty": 0.4,
        "presence_penalty": -0.3,
    }
    return [
        row(known, temperature=0),
        row(known, seed=1, temperature=0.7),
        row(known, seed=2, logit_bias={0: 4.0, vocab - 1: -3.0}, top_k=9),
        row(known, 3, 4, **penalties),
        row(known, 4, 4, **penalties, draft_ids=[7, 7, 8], top_p=0.8),
        row(known, 5, 11, repetition_penalty=0.5, temperature=0),
        row(known, 6, suppressed_ids=frozenset({1, 2}), min_p=0.1),
        row(known, 7, token_mask=Mask(some), stop_ids=frozenset({1})),
        row(known, 8, token_mask=Mask(words), stop_ids=frozenset({1}), temperature=0, **penalties),
        row(known, 9, token_mask=Mask(some[:0]), stop_ids=frozenset({2, 5}), temperature=0),
        row(known, 10, token_mask=Mask(some & ~some), stop_ids=frozenset({2, 5, 8}), top_k=2),
        row(known, 11, logits_processors=(lambda ids, own: own.roll(len(ids)),), **penalties),
    ]


@pytest.mark.parametrize("vocab", [40, 64, 2100])
def test_distributions_are_those_of_the_rows(batched: SamplingKernel, vocab: int) -> None:
    rows, logits = demanding_rows(vocab), scores(12, vocab)
    expected = RowwiseSampling().distributions(logits, rows)
    before = logits.clone()
    torch.testing.assert_close(batched.distributions(logits, rows), expected, atol=2e-6, rtol=1e-4)
    drawn = batched.draw(logits, rows)
    assert torch.equal(logits, before), "the scores belong to the caller"
    assert (expected.gather(1, drawn[:, None]) > 0).all()
    greedy = [index for index, own in enumerate(rows) if own.params.is_greedy]
    assert drawn[greedy].tolist() == RowwiseSampling().draw(logits, rows)[greedy].tolist()
    preferences = batched.preferences(logits, rows)
    assert torch.equal(preferences.argmax(-1), drawn)
    torch.testing.assert_close(preferences.sum(-1), torch.ones(12, device=ON))


def test_sampling_depends_on_no_other_row(batched: SamplingKernel) -> None:
    rows, logits = demanding_rows(500), scores(12, 500)
    together = batched.draw(logits, rows).tolist()
    assert [batched.draw(logits[i : i + 1], [own]).item() for i, own in enumerate(rows)] == together
    assert batched.draw(logits.flip(0), rows[::-1]).tolist() == together[::-1]


@pytest.mark.whole
@pytest.mark.parametrize("filters", [(0.7, 0.0, 1.0, 0), (2.0, 0.1, 0.8, 9)])
def test_samples_follow_the_distribution(
    batched: SamplingKernel, filters: tuple[float, float, float, int]
) -> None:
    """Chi-squared over 200 draws at different positions; 29.6 is the 99.9 % point for ten degrees."""
    from llmopt.engine.sampling import triton_sampling as kernels
    from llmopt.engine.sampling.triton_thresholds import thresholds

    logits, count = scores(1, 11, seed=4) / 4, 200
    floats = torch.tensor([filters[:3]], device=ON)
    integers = torch.tensor([[11, i, filters[3]] for i in range(count)], device=ON)
    stays = thresholds(logits, floats, integers[:1])
    drawn = kernels.draw(
        logits.repeat(count, 1),
        floats.repeat(count, 1),
        integers,
        *(part.repeat(count) for part in stays),
    )
    names = ("temperature", "min_p", "top_p", "top_k")
    given = row(**dict(zip(names, filters, strict=True)))
    expected = RowwiseSampling().distributions(logits, [given])[0] * count
    observed = torch.bincount(drawn, minlength=11)
    assert (observed[expected == 0] == 0).all()
    kept = expected > 0
    assert ((observed - expected)[kept] ** 2 / expected[kept]).sum() < 29.6


def test_the_best_of_a_vocabulary_in_several_parts(batched: SamplingKernel) -> None:
    logits = torch.zeros(3, 40000, device=ON)
    logits[0, [17000, 39999]] = 5.0
    logits[1, :] = LOWEST
    logits[2, 39999] = 300.0
    mixed = [row(temperature=0), row(), row(temperature=0.5)]
    assert batched.draw(logits, mixed).tolist() == [17000, 0, 39999]
    assert batched.draw(logits, [row(temperature=0)] * 3).tolist() == [17000, 0, 39999]


def test_counts_follow_the_sequences() -> None:
    """Slots of penalty counts are reused; sequences grow, are preempted, and have draft tokens."""
    generator = np.random.default_rng(0)
    counts, vocab = TokenCounts(), 13
    tokens = [generator.integers(0, vocab, 60).tolist() for _ in range(7)]
    lengths = [5] * 7
    for step in range(60):
        chosen = generator.choice(7, size=1 + step % 4, replace=False)
        rows = []
        for index in chosen:
            lengths[index] += int(generator.integers(0, 3))
            if lengths[index] > 55:
                lengths[index] = 5
            draft = tokens[index][:2] if step % 5 == 0 else ()
            rows.append(row(TokenView(tokens[index], lengths[index]), 0, 4, draft_ids=draft))
        table, places = counts.of(rows, vocab, ON)
        for own, place in zip(rows, places.tolist(), strict=True):
            output = np.bincount(own.history[4:], minlength=vocab)
            prompt = np.isin(np.arange(vocab), own.history[:4])
            assert table[place].tolist() == (2 * output + prompt).tolist()


PROMPTS = [[1, 403, 407], [1, 261, 378, 261]]
Generate = Callable[..., list[list[int]]]


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "interpret" if DEVICE == "cpu" else "auto")


@pytest.fixture
def generate(interpreted: None, tmp_path: Path) -> Generate:
    """Seeded tokens of a model of one layer."""
    save_model(tmp_path, "LlamaConfig", {"num_hidden_layers": 1})

    def generated(prompts: list[list[int]], penalty: float = 1.0, **options: Any) -> Any:
        llm = LLM(tmp_path, device=DEVICE, dtype="float32", **options)
        params = SamplingParams(
            seed=7, max_tokens=3, top_p=0.9, repetition_penalty=penalty, logprobs=1, ignore_eos=True
        )
        results = llm.generate(prompts, params)
        assert all(len(result.logprobs or ()) == 3 for result in results)
        return [list(result.token_ids) for result in results]

    return generated


@pytest.mark.whole
def test_seeded_tokens_are_the_same_alone_in_a_batch_with_drafts_and_async_scheduling(
    generate: Generate, monkeypatch: pytest.MonkeyPatch
) -> None:
    together = generate(PROMPTS)
    assert generate(PROMPTS[1:]) == together[1:]
    assert generate(PROMPTS, speculation=SpeculationConfig("ngram", ngram_min=1)) == together
    monkeypatch.setattr(
        "llmopt.engine.core.build.open_loop",
        lambda runner, device, *, overlapped: DeviceAsyncLoop(runner),
    )
    assert generate(PROMPTS) == together


def test_penalties_and_rejection_in_an_engine(generate: Generate, tmp_path: Path) -> None:
    draft = SpeculationConfig("draft", tmp_path, num_tokens=1, acceptance="rejection")
    (tokens,) = generate(PROMPTS[:1], 100.0, speculation=draft)
    assert len({*PROMPTS[0], *tokens}) == 6, "nothing comes twice"
