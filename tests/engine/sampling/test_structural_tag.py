"""Structural tags: the texts that a format takes, whole, and those that it does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer
from llmopt.base.errors import BadInput
from llmopt.engine.sampling.grammar import WHITESPACE, GrammarCompiler
from llmopt.engine.sampling.structural_tag import MAX_DEPTH, structural_tag
from llmopt.engine.server.protocol.structure import StructuralTag
from llmopt.recipes import MODELS
from transformers import AutoTokenizer

BYTES = LLTokenizer("byte")
INTEGER = {"type": "json_schema", "json_schema": {"type": "integer"}}
TEXT = {"type": "any_text"}


def const(value: str) -> dict[str, Any]:
    return {"type": "const_string", "value": value}


def regex(pattern: str, **more: Any) -> dict[str, Any]:
    return {"type": "regex", "pattern": pattern, **more}


def tag(begin: str, content: dict[str, Any], end: str | list[str]) -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def triggered(triggers: list[str], *tags: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "triggered_tags", "triggers": triggers, "tags": list(tags), **more}


def takes(grammar: str, text: str) -> bool:
    """Whether a text may be written, and may end there."""
    matcher = LLMatcher(BYTES, grammar, log_level=0)
    assert not matcher.is_error(), LLMatcher.validate_grammar(grammar, BYTES)
    tokens = BYTES.tokenize_str(text)
    count = matcher.validate_tokens(tokens)
    matcher.consume_tokens(tokens[:count])
    return count == len(tokens) and matcher.is_accepting()


NUMBERS = triggered(["<f"], tag("<f=", INTEGER, "</f>"))
LETTERS = triggered(["<f", "<g"], tag("<f=", INTEGER, ">"), tag("<fx=", regex("[a-z]+"), ">"),
                    tag("<g>", const("ok"), ""))  # fmt: skip
THINK = {"type": "sequence", "elements": [tag("<think>", TEXT, "</think>"), const("\n"), TEXT]}

CASES = [
    (const('a"b\n/'), ['a"b\n/'], ["", "a"]),
    (INTEGER, ["12", "-3"], ["x", "1.5"]),
    (regex("a/b|[0-9]{2}"), ["a/b", "42"], ["a", "423"]),
    (regex("[a-z]*", excludes=["no"]), ["yes", "n"], ["nono", "ano"]),
    ({"type": "grammar", "grammar": 'start: "a" b\nb: "c"+'}, ["acc"], ["a"]),
    ({"type": "grammar", "grammar": 'root ::= "x" [0-9]'}, ["x1"], ["x"]),
    (TEXT, ["", "anything\nat all <f>"], []),
    ({"type": "any_text", "excludes": ["bad"]}, ["ba d"], ["a bad one"]),
    (tag("<t>", TEXT, "</t>"), ["<t></t>", "<t>a < b </ t</t>"], ["<t>", "<t>a</t>b", "a<t></t>"]),
    (tag("<t>", TEXT, ["</t>", "!"]), ["<t>a!", "<t>a</t>"], ["<t>a!</t>"]),
    (tag("(", regex(".*"), ")"), ["(a)", "()"], ["(a", "(a)b"]),
    (tag("[", tag("(", TEXT, ")"), "]"), ["[(a]b)]"], ["[(a)"]),
    (THINK, ["<think>hm</think>\nYes", "<think></think>\n"], ["Yes", "<think>hm</think>Yes"]),
    ({"type": "or", "elements": [const("yes"), INTEGER]}, ["yes", "7"], ["no", "yes7"]),
    ({"type": "optional", "content": const("a")}, ["", "a"], ["aa"]),
    ({"type": "plus", "content": const("a")}, ["a", "aaa"], [""]),
    ({"type": "star", "content": const("a")}, ["", "aa"], ["b"]),
    ({"type": "star", "content": tag("<", INTEGER, ">")}, ["", "<1><2>"], ["<1", "<1>>"]),
    ({"type": "or", "elements": [const(""), const("a")]}, ["", "a"], ["b"]),
    ({"type": "repeat", "content": const("a"), "min": 2, "max": 3}, ["aa", "aaa"], ["a", "aaaa"]),
    ({"type": "repeat", "content": const("a"), "min": 1}, ["a", "aaaaa"], [""]),
    (NUMBERS, ["plain", "", "x <f=3</f> y <f=4</f>", "a < b"], ["<f", "<f=x</f>", "x <f=3 y"]),
    (LETTERS, ["<f=3> <fx=ab> <g>ok.", "<g>ok<g>ok"], ["<fx=3>", "<g>no", "<f=a>"]),
    (NUMBERS | {"at_least_one": True}, ["<f=3</f>", "<f=3</f> and <f=4</f>"], ["", "x <f=3</f>"]),
    (NUMBERS | {"stop_after_first": True}, ["a <f=3</f>", "a"], ["<f=3</f> b"]),
    (NUMBERS | {"stop_after_first": True, "at_least_one": True}, ["<f=3</f>"], ["", "<f=3</f>b"]),
    (NUMBERS | {"excludes": ["bad"]}, ["good"], ["bad", "bad <f=3</f>"]),
    (tag("<all>", NUMBERS, "</all>"), ["<all>a <f=3</f> b</all>"], ["<all>a <f=3</f>", "<all><f</all>"]),
    (
        {"type": "tags_with_separator", "tags": [tag("<", INTEGER, ">")], "separator": ","},
        ["", "<1>", "<1>,<2>,<3>"], ["<1>,", "<1><2>"],
    ),
    (
        {"type": "tags_with_separator", "tags": [tag("<", INTEGER, ">")], "separator": "",
         "at_least_one": True, "stop_after_first": True},
        ["<1>"], ["", "<1><2>"],
    ),
]  # fmt: skip


@pytest.mark.parametrize(("form", "taken", "refused"), CASES)
def test_a_format_takes_its_texts_alone(
    form: dict[str, Any], taken: list[str], refused: list[str]
) -> None:
    given = StructuralTag.model_validate({"type": "structural_tag", "format": form})
    grammar = structural_tag(given.value, WHITESPACE)
    assert [text for text in taken if not takes(grammar, text)] == []
    assert [text for text in refused if takes(grammar, text)] == []


def test_the_older_form_is_triggered_tags() -> None:
    older = StructuralTag.model_validate(
        {
            "type": "structural_tag",
            "structures": [{"begin": "<f=", "schema": {"type": "integer"}, "end": "</f>"}],
            "triggers": ["<f"],
        }
    )
    newer = StructuralTag.model_validate({"format": NUMBERS})
    texts = ["x <f=3</f> y", "<f=x</f>", "plain", "<f"]
    grammars = [structural_tag(each.value, WHITESPACE) for each in (older, newer)]
    old, new = ([takes(grammar, text) for text in texts] for grammar in grammars)
    assert old == new == [True, False, True, False]


def test_special_tokens_are_tokens_and_no_text() -> None:
    tokenizer = AutoTokenizer.from_pretrained(MODELS / "stories3M")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|call|>", "<|end|>"]})
    compiler = GrammarCompiler(tokenizer, len(tokenizer), [tokenizer.eos_token_id])
    inner = tag("<|call|> f:", {"type": "or", "elements": [INTEGER, TEXT]}, "<|end|>")
    form = triggered(["<|call|>"], inner, excludes=["bad"])
    value = StructuralTag.model_validate({"format": form}).value

    def num_taken(text: str) -> tuple[int, int]:
        """How many tokens of a text may be written, and how many it has."""
        tokens = tokenizer(text, add_special_tokens=False).input_ids
        (state,) = compiler.structural_tag_mask(value)._states
        return state.matcher.validate_tokens(tokens), len(tokens)

    for text in ("plain", "x<|call|>f:3<|end|> y", "<|call|>f:3<|end|><|call|>f:a<|end|>"):
        taken, count = num_taken(text)
        assert taken == count, text
    for text in ("x<|call|>3<|end|>", "x<|end|>", "bad"):
        taken, count = num_taken(text)
        assert taken < count, text


NESTINGS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "or": lambda form: {"type": "or", "elements": [form]},
    "sequence": lambda form: {"type": "sequence", "elements": [form]},
    "tag": lambda form: tag("<", form, ">"),
    "star": lambda form: {"type": "star", "content": form},
}


def deep(depth: int, kind: str = "or") -> dict[str, Any]:
    form = const("x")
    for _ in range(depth):
        form = NESTINGS[kind](form)
    return form


@pytest.mark.parametrize("kind", NESTINGS)
def test_a_format_within_another_is_one_level(kind: str) -> None:
    def grammar(depth: int) -> object:
        value = StructuralTag.model_validate({"format": deep(depth, kind)}).value
        return structural_tag(value, WHITESPACE)

    assert grammar(MAX_DEPTH)
    with pytest.raises(BadInput, match="nested more than 32 deep"):
        grammar(MAX_DEPTH + 1)


@pytest.mark.parametrize(
    ("form", "message"),
    [
        (triggered(["<f"], tag("<g", TEXT, ">")), "format.tags.0.begin: '<g' begins with none of the"),
        ({"type": "sequence", "elements": [TEXT, const("a")]}, "format.elements.0: free text may only"),
        ({"type": "star", "content": TEXT}, "format.content: free text may only come last"),
        ({"type": "repeat", "content": const("a"), "min": 3, "max": 2}, "max 2 is less than min 3"),
        ({"type": "grammar", "grammar": "root ::= ("}, "format.grammar: "),
    ],
)  # fmt: skip
def test_a_format_that_contradicts_itself(form: dict[str, Any], message: str) -> None:
    value = StructuralTag.model_validate({"format": form}).value
    with pytest.raises(BadInput) as told:
        structural_tag(value, WHITESPACE)
    assert message in str(told.value)
