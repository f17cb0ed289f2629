"""Grammars as token masks: allowed tokens alone, forked, preempted and with draft tokens."""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema
import pytest
import torch
from llmopt.base.errors import BadInput
from llmopt.engine import LLM, SamplingParams
from llmopt.engine.base.logits import dense_mask
from llmopt.engine.config.config import SpeculationConfig
from llmopt.engine.sampling.grammar import (
    GrammarCompiler,
    GrammarMask,
    choice,
    context_free,
    json_schema,
    regex,
)

from ...support.json_schemas import make_schemas

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "story": {"type": "string", "minLength": 60, "maxLength": 90},
        "count": {"type": "integer", "minimum": 0, "maximum": 9},
    },
    "required": ["story", "count"],
    "additionalProperties": False,
}


def build(**options: Any) -> LLM:
    return LLM("stories3M", dtype="float32", num_threads=1, **options)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return build()


@pytest.fixture(scope="module")
def compiler(llm) -> GrammarCompiler:
    engine = llm.engine
    return GrammarCompiler(engine.tokenizer, engine.vocab_size, engine.eos_token_ids)


def texts(llm: LLM, mask: GrammarMask, prompts: list[str], **params: Any) -> list[str]:
    own = SamplingParams(max_tokens=120, token_mask=mask, **{"temperature": 0, **params})
    results = llm.generate(prompts, own)
    return [completion.text for result in results for completion in result.completions]


PROMPTS = ["Once upon a time", "Lily and Tom", "The dog was"]


def test_schedule_and_speculation_change_nothing(llm, compiler):
    wanted = texts(llm, compiler.json_schema_mask(SCHEMA), PROMPTS[:1], seed=3, temperature=1.0)
    assert json.loads(wanted[0])
    for options in (
        {"speculation": SpeculationConfig("ngram", num_tokens=4)},
        {"num_blocks": 16, "block_size": 8, "enable_prefix_caching": False},
    ):
        other = build(**options)
        for n, prompts in ((1, PROMPTS), (4, PROMPTS[:1])):
            params: dict[str, Any] = {"seed": 3, "temperature": 1.0, "n": n}
            expected = texts(llm, compiler.json_schema_mask(SCHEMA, n), prompts, **params)
            assert texts(other, compiler.json_schema_mask(SCHEMA, n), prompts, **params) == expected
            assert n == 1 or len(set(expected)) > 1
        if "num_blocks" in options:
            assert other.engine.stats.num_preemptions > 0
        else:
            assert other.engine.stats.num_draft_tokens > 0


def test_every_kind_of_grammar(llm, compiler):
    for grammar, pattern in (
        (regex("[a-f]{3}(-[0-9]+)?"), r"[a-f]{3}(-\d+)?"),
        (choice(["blau", "grün", 'a "quote"\n']), 'blau|grün|a "quote"\n'),
        (context_free('root ::= "<" [a-z] "/>"'), "<[a-z]/>"),
        (context_free('start: "x" | "y" other\nother: "z"'), "x|yz"),
        (json_schema({"type": "object"}), r"\{.*"),
    ):
        for text in texts(llm, compiler.mask(grammar), ["Lily"], logit_bias={436: 3.0}):
            assert re.fullmatch(pattern, text, re.DOTALL), (grammar, text)


class Counted:
    """Counts the tokens that its matcher reads."""

    def __init__(self, matcher: Any, log: list[str]) -> None:
        self.matcher, self.log = matcher, log

    def __getattr__(self, name: str) -> Any:
        return getattr(self.matcher, name)

    def consume_tokens(self, tokens: list[int]) -> bool:
        self.log += ["read"] * len(tokens)
        return self.matcher.consume_tokens(tokens)

    def rollback(self, count: int) -> bool:
        self.log += ["back"] * count
        return self.matcher.rollback(count)

    def deep_copy(self) -> Counted:
        self.log.append("copy")
        return Counted(self.matcher.deep_copy(), self.log)


def counted(compiler: GrammarCompiler, num_sequences: int) -> tuple[GrammarMask, list[str]]:
    log: list[str] = []
    mask = compiler.mask(regex("[a-z ]*"), num_sequences)
    state = mask._states[0]
    state.matcher = Counted(state.matcher, log)  # type: ignore[assignment]
    return mask, log


LETTERS = [411, 412, 413, 414, 415, 416, 417, 418]


def test_a_step_reads_one_token_and_a_rejected_draft_token_rolls_back(compiler):
    mask, log = counted(compiler, 1)
    for end in range(len(LETTERS) + 1):
        mask.allowed([], LETTERS[:end])
    assert log == ["read"] * len(LETTERS)
    log.clear()
    mask.allowed([], [*LETTERS[:6], 419])
    assert log == ["back", "back", "read"]


def test_each_completion_keeps_its_reader(compiler):
    mask, log = counted(compiler, 3)
    outputs = [[410 + i] for i in range(3)]
    for _ in range(10):
        for output in outputs:
            mask.allowed([], output)
        for index, output in enumerate(outputs):
            output.append(411 + index)
    assert log.count("copy") == 2
    assert log.count("back") == 2, "only the copies went back"
    assert log.count("read") == 30


def test_what_the_grammar_refuses_leaves_only_the_end(compiler, llm):
    mask = compiler.mask(regex("[0-9]+"))
    size = llm.engine.vocab_size
    letter = next(t for t in range(size) if llm.engine.tokenizer.decode([t]) == "q")
    digit = next(t for t in range(size) if llm.engine.tokenizer.decode([t]) == "7")
    assert not dense_mask(mask.allowed([], [letter, digit]), size, torch.device("cpu")).any()
    assert dense_mask(mask.allowed([], [digit]), size, torch.device("cpu"))[digit]
    ends = sorted(llm.engine.eos_token_ids)
    assert not dense_mask(mask.allowed([], []), size, torch.device("cpu"))[ends].any()
    assert dense_mask(mask.allowed([], [digit]), size, torch.device("cpu"))[ends].all()


def test_schemas_of_growing_nesting_are_kept(llm, compiler):
    schemas = make_schemas(50, seed=1)
    assert {depth for depth, _ in schemas} == set(range(1, 11))
    masks = [compiler.json_schema_mask(schema) for _, schema in schemas]
    params = [SamplingParams(temperature=0, max_tokens=480, token_mask=mask) for mask in masks]
    results = llm.generate(["Once upon a time"] * len(schemas), params)
    for (_, schema), result in zip(schemas, results, strict=True):
        assert result.finish_reason == "stop"
        jsonschema.validate(json.loads(result.text), schema)


def test_whitespace_comes_to_an_end(compiler, llm):
    """A model that would rather write spaces for ever cannot."""
    space = {t: 50.0 for t in range(512) if not llm.engine.tokenizer.decode([t]).strip()}
    schema = {
        "type": "array",
        "items": {"type": "integer", "maximum": 9, "minimum": 0},
        "maxItems": 3,
    }
    (text,) = texts(llm, compiler.json_schema_mask(schema), ["Lily"], logit_bias=space)
    assert isinstance(json.loads(text), list)


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"type": "strin"}, "^Invalid type: strin"),
        ({"properties": {"a/b": {"anyOf": [{}, {"type": "x"}]}}}, "^/properties/a~1b/anyOf/1: "),
        ({"items": {"$ref": "#/$defs/a"}, "$defs": {"a": {"pattern": "("}}}, r"/\$defs/a: .*regex"),
        ({"enum": []}, "Unsatisfiable"),
    ],
)
def test_a_wrong_schema_is_named_by_its_place(compiler, schema, message):
    with pytest.raises(BadInput, match=message) as refused:
        compiler.json_schema_mask(schema)
    assert "\n" not in str(refused.value)


def test_what_no_grammar_can_be_made_of(llm, compiler):
    with pytest.raises(BadInput, match="invalid regex"):
        compiler.mask(regex("("))
    with pytest.raises(BadInput, match="no empty one"):
        choice(["a", ""])
    with pytest.raises(BadInput, match="a token that ends"):
        GrammarCompiler(llm.engine.tokenizer, 512, ())
