"""Beam search against transformers' on the trained models, and best_of."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from llmopt.engine import LLM, BeamSearchParams, SamplingParams
from llmopt.engine.llm import BeamSearch
from llmopt.quant.base.errors import BadInput
from llmopt.recipes import DATA, MODELS
from transformers import AutoModelForCausalLM, AutoTokenizer

NUM_NEW = 14


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Beginnings of held-out stories, half of them close to the end."""
    tokenizer = AutoTokenizer.from_pretrained(MODELS / "stories3M")
    stories = (DATA / "evaluation.txt").read_text().split("\n\n")
    near_end = [tokenizer(story[:-10]).input_ids for story in stories[:2]]
    return [near_end[0][:5], near_end[1][:23], *near_end]


@pytest.fixture(scope="module")
def pairs() -> dict[str, tuple[LLM, Any]]:
    """Every bundled model in our engine and in transformers."""
    return {
        name: (
            LLM(MODELS / name, dtype="float32", block_size=4, num_threads=1),
            AutoModelForCausalLM.from_pretrained(MODELS / name, dtype=torch.float32).eval(),
        )
        for name in ("stories3M", "stories260K")
    }


@pytest.mark.sweep(3)
@pytest.mark.parametrize(
    ("model", "width", "length_penalty", "early_stopping"),
    [
        ("stories3M", 4, 1.0, True),
        ("stories3M", 3, 2.0, "never"),
        ("stories3M", 5, -1.0, False),
        ("stories260K", 4, 1.0, False),
        ("stories260K", 3, 0.0, "never"),
    ],
)
def test_hypotheses_are_those_of_transformers(
    pairs, prompts, model, width, length_penalty, early_stopping
):
    llm, oracle = pairs[model]
    params = BeamSearchParams(width, NUM_NEW, length_penalty, early_stopping)
    results = llm.beam_search(prompts, params)
    reasons = set()
    for prompt, result in zip(prompts, results, strict=True):
        ids = torch.tensor([prompt])
        found = oracle.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            num_beams=width,
            num_return_sequences=width,
            max_new_tokens=NUM_NEW,
            length_penalty=length_penalty,
            early_stopping=early_stopping,
            return_dict_in_generate=True,
            output_scores=True,
        )
        assert len(result.hypotheses) == width
        for ours, theirs, score in zip(
            result.hypotheses, found.sequences, found.sequences_scores, strict=True
        ):
            length = len(ours.token_ids)
            assert list(ours.token_ids) == theirs[len(prompt) : len(prompt) + length].tolist()
            assert ours.score == pytest.approx(score.item(), rel=1e-5, abs=1e-4)
            reasons.add(ours.finish_reason)
    if early_stopping is True:
        assert reasons == {"stop", "length"}, "some should end by themselves, some by their length"
    assert llm.engine.stats.kv_blocks_used == 0


def test_a_wide_search_in_a_narrow_engine(prompts):
    """Fewer batch slots and blocks than beams, chunks, and no prefix cache to rely on."""
    params, prompts = BeamSearchParams(4, 4), prompts[:3]
    wide = LLM("stories3M", dtype="float32", num_threads=1).beam_search(prompts, params)
    narrow = LLM(
        "stories3M",
        dtype="float32",
        num_threads=1,
        max_num_seqs=3,
        num_blocks=60,
        block_size=8,
        prefill_chunk_size=16,
        enable_prefix_caching=False,
    ).beam_search(prompts, params)
    assert [r.texts for r in narrow] == [r.texts for r in wide]


def test_the_prefix_cache_makes_a_round_cheap(prompts):
    llm = LLM("stories3M", dtype="float32", block_size=4, num_threads=1)
    llm.beam_search(prompts[-1], BeamSearchParams(4, NUM_NEW, ignore_eos=True))
    computed = llm.engine.stats.num_computed_tokens - len(prompts[-1])
    assert computed < 4 * NUM_NEW * 4, "at most a block for each beam and round"


def test_texts_and_reasons(prompts):
    llm = LLM("stories3M", dtype="float32", num_threads=1)
    result = llm.beam_search("Once upon a time", BeamSearchParams(2, 8))[0]
    greedy = llm.generate("Once upon a time", SamplingParams(temperature=0, max_tokens=8))[0]
    assert result.prompt_token_ids == greedy.prompt_token_ids
    assert any(text == greedy.text for text in result.texts)
    assert [h.finish_reason for h in result.hypotheses] == ["length", "length"]
    forever = llm.beam_search(prompts, BeamSearchParams(2, NUM_NEW, ignore_eos=True))
    assert {len(h.token_ids) for r in forever for h in r.hypotheses} == {NUM_NEW}


def test_the_likeliest_beams_go_on_and_the_ended_ones_compete():
    """A search by hand, over tokens 5 and 6 with 0 as the end."""
    search = BeamSearch(BeamSearchParams(2, 4), frozenset({0}))
    search.advance([[(5, -0.5), (6, -1.0), (0, -1.2)]])
    assert [beam.token_ids for beam in search.beams] == [(5,), (6,)]
    assert search.hypotheses == [], "an end that is not among the best two does not count"
    search.advance([[(0, -0.1), (5, -2.0), (6, -3.0)], [(5, -0.2), (0, -0.3), (6, -4.0)]])
    assert [found.token_ids for found in search.hypotheses] == [(5, 0)]
    assert [beam.token_ids for beam in search.beams] == [(6, 5), (5, 5)]
    search.advance([[(0, -0.1), (5, -2.0), (6, -2.5)], [(5, -0.2), (0, -0.3), (6, -4.0)]])
    assert [found.token_ids for found in search.hypotheses] == [(5, 0), (6, 5, 0)]
    assert search.beams == [], "the best beam, -2.7 / 3, does not reach the worst, -1.3 / 3"


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"beam_width": 0}, "beam_width = 0"),
        ({"beam_width": 2, "max_tokens": 0}, "max_tokens = 0"),
        ({"beam_width": 2, "early_stopping": "soon"}, "early_stopping = 'soon'"),
        ({"beam_width": 40}, "the 120 likeliest tokens of a beam: at most 100"),
        ({"beam_width": 2, "max_tokens": 600}, "600 new ones exceed the longest sequence of 512"),
    ],
)
def test_searches_that_cannot_be(options, complaint):
    llm = LLM("stories3M", dtype="float32", num_threads=1)
    with pytest.raises(BadInput, match=complaint):
        llm.beam_search("Once", BeamSearchParams(**options))


@pytest.mark.parametrize("small", [False, True])
def test_best_of_hands_out_the_likeliest(prompts, small):
    """best_of keeps the best of six single requests by cumulative logprob."""
    options: dict[str, Any] = {"num_blocks": 40, "max_num_seqs": 3} if small else {}
    llm = LLM("stories3M", dtype="float32", block_size=4, num_threads=1, **options)
    common: dict[str, Any] = {"max_tokens": 16, "temperature": 1.0}
    result = llm.generate(
        [prompts[0]], SamplingParams(n=2, best_of=6, seed=4, prompt_logprobs=0, **common)
    )[0]
    singles = [
        llm.generate([prompts[0]], SamplingParams(seed=4 + i, logprobs=0, **common))[0]
        for i in range(6)
    ]
    singles.sort(key=lambda r: -sum(one.logprob for one in r.logprobs or ()))
    assert [c.token_ids for c in result.completions] == [r.token_ids for r in singles[:2]]
    assert [c.text for c in result.completions] == [r.text for r in singles[:2]]
    assert [c.finish_reason for c in result.completions] == [r.finish_reason for r in singles[:2]]
    assert result.completions[0].logprobs is None, "nobody asked for them"
    assert result.prompt_logprobs is not None
    assert len(result.prompt_logprobs) == len(prompts[0])
    assert len({tuple(r.token_ids) for r in singles}) == 6
    assert llm.engine.stats.kv_blocks_used == 0


def test_best_of_emits_nothing_before_its_end_and_can_be_aborted(prompts):
    engine = LLM("stories3M", dtype="float32", num_threads=1).engine
    params = SamplingParams(n=1, best_of=3, max_tokens=5, ignore_eos=True, logprobs=1, seed=1)
    engine.add_request("a", prompts[0], params)
    assert [engine.step() for _ in range(4)] == [[]] * 4
    (winner,) = engine.step()
    assert (winner.index, len(winner.new_token_ids), len(winner.logprobs or ())) == (0, 5, 5)
    engine.add_request("a", prompts[0], params)
    engine.step()
    assert engine.abort("a")
    assert not engine.output_processor._best_of
    engine.add_request("a", prompts[0], SamplingParams(max_tokens=1))
    assert len(engine.step()) == 1, "the id is free again, and no contest"


@pytest.mark.parametrize(("n", "best_of"), [(3, 2), (1, 0), (1, 129)])
def test_best_of_has_limits(n, best_of):
    with pytest.raises(BadInput, match=f"best_of = {best_of}: need n = {n} to 128"):
        SamplingParams(n=n, best_of=best_of)
