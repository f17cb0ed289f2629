"""best_of: the likeliest completions of a request."""

from __future__ import annotations

from typing import Any

import pytest
from llmopt.base.errors import BadInput
from llmopt.engine import LLM, SamplingParams
from llmopt.recipes import DATA, MODELS
from transformers import AutoTokenizer


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Beginnings of held-out stories, half of them close to the end."""
    tokenizer = AutoTokenizer.from_pretrained(MODELS / "stories3M")
    stories = (DATA / "evaluation.txt").read_text().split("\n\n")
    near_end = [tokenizer(story[:-10]).input_ids for story in stories[:2]]
    return [near_end[0][:5], near_end[1][:23], *near_end]


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
    assert not engine.output_processor.best_of
    engine.add_request("a", prompts[0], SamplingParams(max_tokens=1))
    assert len(engine.step()) == 1, "the id is free again, and no contest"


@pytest.mark.parametrize(("n", "best_of"), [(3, 2), (1, 0), (1, 129)])
def test_best_of_has_limits(n, best_of):
    with pytest.raises(BadInput, match=f"best_of = {best_of}: need n = {n} to 128"):
        SamplingParams(n=n, best_of=best_of)
