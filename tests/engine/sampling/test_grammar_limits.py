"""Grammars that would cost much: states, masks, and the time that they take in all."""

from __future__ import annotations

import copy
import time
from typing import Any

import pytest
import torch
from llguidance import LLMatcher, LLParserLimits
from llmopt.base.errors import BadInput
from llmopt.engine import LLM
from llmopt.engine.sampling import grammar, schema_limits
from llmopt.engine.sampling.grammar import GrammarCompiler, context_free, regex
from llmopt.engine.sampling.schema_limits import enforceable
from llmopt.engine.sampling.structural_tag import as_lark
from tokenizers import AddedToken


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("stories3M", dtype="float32", num_threads=1)


@pytest.fixture(scope="module")
def compiler(llm: LLM) -> GrammarCompiler:
    engine = llm.engine
    return GrammarCompiler(engine.tokenizer, engine.vocab_size, engine.eos_token_ids)


def ids_of(mask: torch.Tensor) -> list[int]:
    return [i for i in range(32 * len(mask)) if int(mask[i // 32]) >> (i % 32) & 1]


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer", "multipleOf": 9_999_991},
        {"type": "number", "multipleOf": 0.49999},
        {"allOf": [{"multipleOf": 97}, {"multipleOf": 89}]},
        {"properties": {f"p{i}": {"multipleOf": 97} for i in range(50)}},
        {"$ref": "#/any/place", "any": {"place": {"multipleOf": 49_999}}},
    ],
)
def test_multiples_of_many_remainders_are_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(BadInput, match="remainders in the schema, at most 4096"):
        enforceable(schema)


@pytest.mark.parametrize("value", [3 * 2**20, 5**8, 2**30, 4_096_000, 1e-9 * 3**12 * 2**20])
def test_multiples_of_many_factors_of_two_and_five_are_refused(value: float) -> None:
    """llguidance takes 28 s and 461 MiB for 3 * 2**20."""
    with pytest.raises(BadInput, match="remainders in the schema, at most"):
        enforceable({"multipleOf": value})
    with pytest.raises(BadInput, match="remainders in the schema, at most"):
        enforceable({"allOf": [{"multipleOf": 3 * 2**15}, {"multipleOf": 5**7}]})


@pytest.mark.parametrize("value", [1e9, 5e30, 200_000, 0.25, 3600])
def test_multiples_of_powers_of_ten_are_taken(value: float) -> None:
    enforceable({"allOf": [{"multipleOf": value}, {"multipleOf": 100}]})


@pytest.mark.parametrize("value", [0.01, 0.5, 2, 60, 1000, 86_400, 50_000, 1e-7])
def test_multiples_in_use_are_taken(value: float) -> None:
    enforceable({"properties": {f"p{i}": {"multipleOf": value} for i in range(20)}})


def test_an_embedded_schema_has_no_multiples() -> None:
    for text in ('start: %json {"multipleOf": 7}', 'start: %json {"multiple\\u004ff": 7}'):
        with pytest.raises(BadInput, match="grammar: multipleOf in %json"):
            context_free(text)


def test_deep_gbnf_is_bad_input() -> None:
    with pytest.raises(BadInput, match="grammar: maximum recursion depth"):
        as_lark("root ::= " + "(" * 5000 + '"a"' + ")" * 5000, "grammar")


def test_blank_lines_before_a_grammar_take_linear_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """llguidance's own check tries each line of a run of blank ones up to the end of the run."""
    looked_at: list[int] = []

    class Counting:
        def match(self, line: str) -> None:
            looked_at.append(len(line))

    monkeypatch.setattr("llmopt.engine.sampling.structural_tag._LARK_LINE", Counting())
    assert "start" in as_lark('root ::= "a"' + "\n" * 10_000, "grammar")
    assert sum(looked_at) < 100


def test_classes_of_patterns() -> None:
    pieces = schema_limits._PIECE.findall
    assert [*pieces(r"a[^\]\\]b\[c[]]")] == ["a", r"[^\]\\]", "b", r"\[", "c", "[]]"]
    assert [*pieces("[" * 1000)] == ["[" * 1000]
    assert "".join(pieces(text := "x[a" + "\\")) == text


def test_a_pattern_that_backtracks_is_matched_in_linear_time() -> None:
    pattern = "^" + "(a?){40}" + "a" * 40 + "$"
    schema = {"properties": {"a" * 39: {}, "a" * 41: {}}, "patternProperties": {pattern: {}}}
    with pytest.raises(BadInput, match="matches names of properties"):
        enforceable(schema)
    enforceable({**schema, "properties": {"a" * 30 + "b": {}}})
    many = {"properties": {f"p{i}": {} for i in range(200)}}
    with pytest.raises(BadInput, match="more than 10000 pairs"):
        enforceable({**many, "patternProperties": {f"^x{i}$": {} for i in range(200)}})


def test_completions_of_equal_tokens_share_a_mask(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    mask, filled = compiler.mask(regex("[a-z ]*"), 128), []
    fill = type(mask)._fill

    def counted(self: Any, words: torch.Tensor, tokens: list[int]) -> None:
        filled.append(tokens)
        fill(self, words, tokens)

    monkeypatch.setattr(type(mask), "_fill", counted)
    first = [mask.allowed([], []) for _ in range(128)]
    assert len(filled) == 1 and all(torch.equal(first[0], other) for other in first)
    letter = ids_of(first[0])[0]
    for output in ([letter], [], [letter]):
        mask.allowed([], output)
    assert filled == [[], [letter]]


def test_masks_that_take_too_long_fail(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    mask, clock = compiler.mask(regex("[a-z ]*"), 4), iter(range(100))
    monkeypatch.setattr(time, "thread_time", lambda: 0.04 * next(clock))
    letters = ids_of(mask.allowed([], []))
    for number in range(4):  # of one token: 40 ms each, 200 ms for a start
        assert mask.failure is None
        mask.allowed([], [letters[number]])
    for number in range(4, 8):
        mask.allowed([], [letters[number]])
    assert mask.failure is not None and "too long" in mask.failure
    assert not mask.allowed([], [letters[0], letters[0]]).any()
    calm = compiler.mask(regex("[a-z ]*"))
    for length in range(20):
        calm.allowed([], [letters[0]] * length)
    assert calm.failure is None


def test_a_grammar_beyond_the_limits_fails_by_name(llm: LLM, compiler: GrammarCompiler) -> None:
    text = "start: s\ns: s s | s s s | " + " | ".join(f'"{chr(97 + i % 26)}"' for i in range(200))
    limits = LLParserLimits(step_max_items=500, verbose_errors=False)
    matcher = LLMatcher(compiler._tokens, context_free(text), log_level=0, limits=limits)
    mask = grammar.GrammarMask(matcher, compiler._num_words, 1)
    assert {*ids_of(mask.allowed([], []))} <= {*llm.engine.eos_token_ids}
    assert mask.failure is not None and "too complex" in mask.failure


def test_the_cache_has_few_grammars(llm: LLM) -> None:
    engine = llm.engine
    compiler = GrammarCompiler(engine.tokenizer, engine.vocab_size, engine.eos_token_ids)
    for number in range(2 * grammar.REMEMBERED_GRAMMARS):
        compiler.mask(regex(f"a{number}"))
    assert len(compiler._compiled) == grammar.REMEMBERED_GRAMMARS
    for number in range(4):  # of 12 MiB each
        compiler.json_schema_mask({"type": "integer", "multipleOf": 48_025 + 50 * number})
    assert len(compiler._compiled) == 2


@pytest.mark.parametrize("is_special", [False, True])
def test_a_choice_with_the_text_of_an_added_token(llm: LLM, is_special: bool) -> None:
    """Both ways to write it go on to the end of the text, and the token is not offered to be refused."""
    tokenizer = copy.deepcopy(getattr(llm.engine.tokenizer, "whole", llm.engine.tokenizer))
    tokenizer.add_tokens([AddedToken("<think>", special=is_special)], special_tokens=is_special)
    added = tokenizer.convert_tokens_to_ids("<think>")
    ends = llm.engine.eos_token_ids
    end = tokenizer.eos_token_id
    compiler = GrammarCompiler(tokenizer, len(tokenizer), ends)
    for prefer_added in (False, True):
        mask = compiler.choice_mask(["a<think> b", "no"])
        output = [next(i for i in ids_of(mask.allowed([], [])) if tokenizer.decode([i])[0] == "a")]
        while end not in (ids := ids_of(mask.allowed([], output))):
            assert ids, f"after {output} no token is allowed"
            others = [i for i in ids if i != added]
            output.append(added if prefer_added and added in ids else others[0])
        assert tokenizer.decode(output).replace(" ", "") == "a<think>b"
        assert (added in output) == prefer_added
    with pytest.raises(BadInput, match="ends the output"):
        compiler.choice_mask([f"a{tokenizer.decode([end])}b"])
