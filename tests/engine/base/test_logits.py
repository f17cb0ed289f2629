"""Token masks and logits processors, held against transformers' on the trained model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from llmopt.base.errors import BadInput
from llmopt.engine import LLM, SamplingParams
from llmopt.engine.base.logits import dense_mask
from llmopt.engine.config.config import SpeculationConfig
from llmopt.engine.sampling.rowwise import SamplingRow
from llmopt.engine.sampling.sampler import Sampler
from llmopt.recipes import MODELS
from transformers import AutoModelForCausalLM, AutoTokenizer, LogitsProcessorList

MODEL = MODELS / "stories3M"
PROMPTS = [
    "Once upon a time",
    "Lily and Tom went to the",
    "The dog was so happy that",
    "One day, a big",
    "Mom said",
    "He saw a red ball and",
]
EOS = 2


class Sentence:
    """The regular expression `( [a-z]+){3}\\.`, then the end, as an automaton over a token's characters.

    States 0, 2 and 4 wait for a space, 1, 3 and 5 for the first letter, 6 is behind the dot; within a word
    the state is that of the next space, with a flag. -1 is what the expression refuses.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._pieces = [t.replace("▁", " ") for t in tokenizer.convert_ids_to_tokens(range(512))]
        self._masks: dict[int, torch.Tensor] = {}

    start = 0

    def advance(self, state: int, token_id: int) -> int:
        return self._walk(state, self._pieces[token_id])

    def allowed(self, state: int) -> torch.Tensor:
        if state not in self._masks:
            mask = torch.tensor([self._walk(state, piece) >= 0 for piece in self._pieces])
            mask[EOS] = state == 7
            self._masks[state] = mask
        return self._masks[state]

    def _walk(self, state: int, text: str) -> int:
        for character in text:
            letter = "a" <= character <= "z"
            if state in (1, 3, 5) and letter:
                state += 1  # into a word
            elif state in (2, 4, 6) and letter:
                pass
            elif state in (0, 2, 4) and character == " ":
                state += 1
            elif state == 6 and character == ".":
                state = 7
            else:
                return -1
        return state


class AutomatonMask:
    """Token mask of an automaton, which reads the whole output at every step."""

    def __init__(self, automaton: Sentence) -> None:
        self._automaton = automaton

    def allowed(self, prompt: Sequence[int], output: Sequence[int]) -> torch.Tensor:
        state = self._automaton.start
        for token_id in output:
            state = self._automaton.advance(state, token_id)
        return self._automaton.allowed(state)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(MODEL)


@pytest.fixture(scope="module")
def oracle() -> Any:
    return AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def prompts(tokenizer) -> list[list[int]]:
    return [tokenizer(text).input_ids for text in PROMPTS]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(MODEL, dtype="float32", block_size=4, num_threads=1)


def generate(oracle: Any, prompt: list[int], **options: Any) -> list[int]:
    ids = torch.tensor([prompt])
    whole = oracle.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=24, **options
    )
    return whole[0, len(prompt) :].tolist()


def outputs(llm: LLM, prompts: list[list[int]], **params: Any) -> list[list[int]]:
    results = llm.generate(prompts, SamplingParams(**{"max_tokens": 24, **params}))
    assert llm.engine.stats.kv_blocks_used == 0
    return [result.token_ids for result in results]


def test_a_regular_expression_as_transformers_follows_it(llm, oracle, tokenizer, prompts):
    grammar = Sentence(tokenizer)
    mask = AutomatonMask(grammar)
    ours = outputs(llm, prompts, temperature=0, token_mask=mask)
    for prompt, tokens in zip(prompts, ours, strict=True):

        def allowed(_: int, ids: torch.Tensor, prompt: list[int] = prompt) -> list[int]:
            state = grammar.start
            for token in ids.tolist()[len(prompt) :]:
                state = grammar.advance(state, token)
            return grammar.allowed(state).nonzero().flatten().tolist()

        assert tokens == generate(oracle, prompt, prefix_allowed_tokens_fn=allowed)
        assert tokens[-1] == EOS
        words = tokenizer.decode(tokens, skip_special_tokens=True).rstrip(".").split()
        assert len(words) == 3
    assert len({tuple(tokens) for tokens in ours}) > 3, "the mask leaves the model a choice"


@pytest.mark.sweep(1)
@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_neither_preemption_nor_company_changes_a_constrained_request(
    llm, tokenizer, prompts, temperature
):
    mask = AutomatonMask(Sentence(tokenizer))
    # The tails occupy blocks, so that the short constrained requests are preempted as well.
    params = [
        SamplingParams(max_tokens=24, temperature=temperature, seed=7, token_mask=own)
        if own is not None
        else SamplingParams(max_tokens=60, temperature=0, ignore_eos=True)
        for own in (mask, None, mask, None, mask, mask)
    ]
    alone = [llm.generate([p], one)[0].token_ids for p, one in zip(prompts, params, strict=True)]
    small = LLM(MODEL, dtype="float32", block_size=2, num_blocks=36, num_threads=1)
    preempted: set[str] = set()
    preempt = small.engine.scheduler._preempt

    def noted(request: Any) -> None:
        preempted.add(request.request_id)
        preempt(request)

    small.engine.scheduler._preempt = noted  # type: ignore[method-assign]
    together = [result.token_ids for result in small.generate(prompts, params)]
    assert together == alone
    assert preempted & {"llm-2", "llm-4", "llm-5"}, (
        "a constrained request was meant to be preempted"
    )


def test_every_completion_has_its_own_grammar_state(llm, tokenizer, prompts):
    params = SamplingParams(
        n=3, max_tokens=24, temperature=1.2, seed=3, token_mask=AutomatonMask(Sentence(tokenizer))
    )
    result = llm.generate([prompts[0]], params)[0]
    texts = [completion.text for completion in result.completions]
    assert len(set(texts)) == 3
    for index, completion in enumerate(result.completions):
        assert completion.finish_reason == "stop"
        assert completion.text.endswith(".") and len(completion.text.split()) == 3
        own = AutomatonMask(Sentence(tokenizer))
        again = SamplingParams(max_tokens=24, temperature=1.2, seed=3 + index, token_mask=own)
        assert llm.generate([prompts[0]], again)[0].token_ids == completion.token_ids


@pytest.mark.parametrize("method", ["ngram", "draft"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_draft_tokens_that_the_grammar_refuses_leave_nothing_behind(
    llm, tokenizer, prompts, method, temperature
):
    draft = MODELS / "stories260K" if method == "draft" else None
    draft_length = LLM(
        MODEL, dtype="float32", num_threads=1, speculation=SpeculationConfig(method, draft)
    )
    params: dict[str, Any] = {"temperature": temperature, "seed": 2, "ignore_eos": False}
    expected = outputs(llm, prompts, token_mask=AutomatonMask(Sentence(tokenizer)), **params)
    mask = AutomatonMask(Sentence(tokenizer))
    assert outputs(draft_length, prompts, token_mask=mask, **params) == expected
    if method == "draft":
        assert draft_length.engine.stats.num_draft_tokens > 0
    assert all(tokens[-1] == EOS for tokens in expected)


class DigitsOnly:
    """Only digits, packed in words as the grammar libraries do."""

    def __init__(self, tokenizer: Any) -> None:
        pieces = tokenizer.convert_ids_to_tokens(range(512))
        self.digits = [i for i, piece in enumerate(pieces) if piece.isdigit()]
        words = [0] * 16
        for token in self.digits:
            words[token // 32] |= 1 << (token % 32)
        self._packed = torch.tensor(words, dtype=torch.int64).to(torch.int32)

    def allowed(self, prompt: Any, output: Any) -> torch.Tensor | None:
        return self._packed if len(output) < 5 else None


def test_a_packed_mask_and_none(llm, oracle, tokenizer, prompts):
    mask = DigitsOnly(tokenizer)
    assert mask.digits
    ours = outputs(llm, prompts, temperature=0, token_mask=mask)
    for prompt, tokens in zip(prompts, ours, strict=True):

        def allowed(_: int, ids: torch.Tensor, prompt: list[int] = prompt) -> list[int]:
            return mask.digits if len(ids) - len(prompt) < 5 else list(range(512))

        assert set(tokens[:5]) <= set(mask.digits)
        assert tokens == generate(oracle, prompt, prefix_allowed_tokens_fn=allowed)


def test_processors_as_transformers_applies_them(llm, oracle, prompts):
    """Two in a row, the second of which does not commute with the first."""

    def no_repeat(history: Any, scores: torch.Tensor) -> torch.Tensor:
        scores[torch.tensor(sorted(set(history)))] -= 3.0
        return scores

    def halve_the_best(history: Any, scores: torch.Tensor) -> torch.Tensor:
        best = scores.argmax()
        return scores.index_fill(0, best, float(scores[best]) - 0.5 * (len(history) % 2))

    def theirs(call: Any) -> Any:
        return lambda ids, scores: torch.stack(
            [call(own.tolist(), row.clone()) for own, row in zip(ids, scores, strict=True)]
        )

    processors = (no_repeat, halve_the_best)
    ours = outputs(llm, prompts, temperature=0, logits_processors=processors)
    for prompt, tokens in zip(prompts, ours, strict=True):
        listed = LogitsProcessorList([theirs(call) for call in processors])
        assert tokens == generate(oracle, prompt, logits_processor=listed)
    assert ours != outputs(llm, prompts, temperature=0)


class Only:
    """A mask that allows the same tokens for ever."""

    def __init__(self, *tokens: int, size: int = 5) -> None:
        self._mask = torch.zeros(size, dtype=torch.bool)
        self._mask[list(tokens)] = True

    def allowed(self, prompt: Any, output: Any) -> torch.Tensor:
        return self._mask


def draw(
    mask: Any, suppressed_ids: tuple[int, ...] = (), stop_ids: tuple[int, ...] = (0,), **params
) -> int:
    own = SamplingParams(token_mask=mask, **{"temperature": 0, **params})
    row = SamplingRow(own, 0, [1], 1, frozenset(suppressed_ids), frozenset(stop_ids))
    return Sampler().draw(torch.tensor([[0.5, 1.0, 2.0, 3.0, 4.0]]), [row])[0][0]


def test_the_mask_has_the_last_word():
    assert draw(Only(1, 3)) == 3
    assert draw(Only(1, 3), logit_bias={4: 100.0}) == 3
    assert draw(Only(1), logits_processors=(lambda history, scores: scores.zero_(),)) == 1
    assert draw(Only(1, 3), temperature=5.0, top_k=5, seed=1) in (1, 3)
    assert draw(Only(1, size=2)) == 1, "what lies behind the end of a mask may not come"
    assert draw(Only(0, 1, size=1 + 1), suppressed_ids=(0,)) == 1


def test_where_nothing_is_left_the_sequence_ends():
    assert draw(Only()) == 0
    assert draw(Only(), stop_ids=(0, 2)) == 2, "the model chooses among the endings"
    assert draw(Only(3), suppressed_ids=(3, 0)) == 0, (
        "min_tokens yields to a grammar that is at its end"
    )


@pytest.mark.parametrize(
    ("mask", "complaint"),
    [
        (torch.zeros(5), "torch.float32 with shape"),
        (torch.zeros(2, 5, dtype=torch.bool), r"\[2, 5\]"),
        (torch.zeros(6, dtype=torch.bool), "6 tokens: the vocabulary has 5"),
        (torch.zeros(2, dtype=torch.int32), "2 words: the vocabulary has 1"),
    ],
)
def test_masks_that_are_none(mask, complaint):
    with pytest.raises(BadInput, match=complaint):
        dense_mask(mask, 5, torch.device("cpu"))


@pytest.mark.parametrize("size", [1, 31, 32, 33, 100])
def test_packed_masks_unpack(size):
    wanted = torch.rand(size, generator=torch.Generator().manual_seed(size)) < 0.5
    words = [
        sum(1 << i for i, bit in enumerate(wanted[begin : begin + 32].tolist()) if bit)
        for begin in range(0, size, 32)
    ]
    packed = torch.tensor(words, dtype=torch.int64).to(torch.int32)
    assert torch.equal(dense_mask(packed, size, torch.device("cpu")), wanted)


def test_a_failing_logits_processor_fails_its_request_alone(llm, prompts):
    def broken(history: Any, scores: torch.Tensor) -> torch.Tensor:
        return scores[:1] if len(history) > len(prompts[0]) + 2 else scores

    with pytest.raises(BadInput, match=r"need scores of shape \[512\]"):
        outputs(llm, prompts, temperature=0, logits_processors=(broken,))
    assert not llm.engine.has_unfinished()
    assert llm.engine.stats.kv_blocks_used == 0
    assert outputs(llm, prompts[:1], temperature=0)


def test_a_mask_needs_a_stop_token(llm, prompts):
    known, llm.engine.eos_token_ids = llm.engine.eos_token_ids, frozenset()
    try:
        with pytest.raises(BadInput, match="give stop_token_ids"):
            llm.generate([prompts[0]], SamplingParams(token_mask=Only(3)))
    finally:
        llm.engine.eos_token_ids = known
