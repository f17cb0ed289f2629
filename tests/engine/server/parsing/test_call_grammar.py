"""Grammars of calls: what a random model writes under each is a call of a declared tool, by its schema."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import pytest
from llmopt.engine.sampling.grammar import GrammarCompiler
from llmopt.engine.server.parsing.call_grammar import calls_in_text, shaped_answer
from llmopt.engine.server.parsing.formats import (
    FORMATS,
    GLM45,
    HARMONY,
    HERMES,
    KIMI_K2,
    LLAMA3_JSON,
    LLAMA4_PYTHONIC,
    MINIMAX_M2,
    MISTRAL,
    MISTRAL_THINK,
    QWEN3_CODER,
    THINK,
    Parsed,
    ReasoningFormat,
    ToolFormat,
)
from llmopt.engine.server.parsing.parser import OutputFormat, OutputParser
from llmopt.engine.server.protocol.structure import Constraint
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast

from .test_formats import SCHEMAS, TRANSCRIPTS

TOOLS: dict[str, Any] = {
    "weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 12},
            "days": {"type": "integer", "minimum": 1, "maximum": 9},
            "unit": {"type": "string", "enum": ["C", "F"]},
            "wind": {"type": "boolean"},
            "place": {"$ref": "#/$defs/place"},
            "note": {"anyOf": [{"type": "string", "maxLength": 5}, {"type": "null"}]},
            "level": {"enum": ["low", "7", 7, None]},
        },
        "required": ["days", "place"],
        "$defs": {
            "place": {
                "type": "object",
                "properties": {"at": {"type": ["number", "null"]}},
                "required": ["at"],
                "additionalProperties": False,
            }
        },
    },
    "clock": {"type": "object", "properties": {"zone": {"type": "string", "pattern": "^[A-Z]{3}$"},
                                               "summer": {"type": "boolean"}}},
    "clock.set": None,
}  # fmt: skip
FORMS = sorted(FORMATS.values(), key=lambda form: form.name)
MARKERS = {
    *(form.start for form in FORMS if form.special), *(form.end for form in FORMS if form.special),
    *(marker for form in FORMS for marker in form.fillers if marker.startswith("<")),
    "<|tool_call_argument_begin|>", "<｜tool▁sep｜>", "[ARGS]", "[CALL_ID]", "<arg_key>",
    "<|start|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>", "<|constrain|>", "[THINK]", "[/THINK]",
} - {None, "</tool_call>", "<tool_call>"}  # fmt: skip


@pytest.fixture(scope="module", params=["special", "text"])
def compiler(request: pytest.FixtureRequest) -> tuple[Any, GrammarCompiler]:
    """A tokenizer that has the formats' markers as special tokens, and one to which they are text."""
    letters = {letter: number for number, letter in enumerate(sorted(ByteLevel.alphabet()))}
    made = Tokenizer(BPE({**letters, "<eos>": len(letters)}, []))
    made.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<eos>")
    if request.param == "special":
        tokenizer.add_special_tokens({"additional_special_tokens": sorted(MARKERS)})  # type: ignore[arg-type]
    return tokenizer, GrammarCompiler(tokenizer, len(tokenizer), [len(letters)])


class Walk:
    """An output that is written token by token, each of them allowed."""

    def __init__(self, compiler: tuple[Any, GrammarCompiler], tag: dict[str, Any]) -> None:
        self.tokenizer, made = compiler
        self.mask = made.structural_tag_mask(tag)
        self.ids: list[int] = []

    def allowed(self) -> list[int]:
        words = self.mask.allowed([], self.ids).tolist()
        return [i for i in range(len(self.tokenizer)) if words[i // 32] >> (i % 32) & 1]

    def write(self, text: str) -> bool:
        """Write a text; False, as far as it may be, where a token of it may not."""
        for token in self.tokenizer(text, add_special_tokens=False).input_ids:
            if token not in self.allowed():
                return False
            self.ids.append(token)
        return True

    @property
    def may_end(self) -> bool:
        return self.tokenizer.eos_token_id in self.allowed()

    @property
    def text(self) -> str:
        return self.tokenizer.decode(self.ids, skip_special_tokens=False)


RAW = {
    QWEN3_CODER: "<tool_call>\n<function=f>\n<parameter=x>\n{}\n</parameter>\n</function>\n</tool_call>",
    GLM45: "<tool_call>f\n<arg_key>x</arg_key>\n<arg_value>{}</arg_value>\n</tool_call>",
    MINIMAX_M2: '<minimax:tool_call>\n<invoke name="f">\n<parameter name="x">{}</parameter>\n</invoke>\n'
    "</minimax:tool_call>",
}
COLOR: Any = {"$defs": {"color": {"type": "string", "enum": ["red", "1"]}}}
UNQUOTED: list[tuple[Any, list[Any]]] = [
    ({"anyOf": [{"type": "string"}, {"type": "null"}]}, ["anything", "12345", "true", '"a"', '{"a": 1}', None]),
    ({"type": ["string", "null"]}, ["anything", "007", None]),
    ({"type": ["string", "integer"]}, ["anything", "1.5", 12345]),
    ({"oneOf": [{"type": "string"}, {"type": "array"}]}, ["anything", "5", ["a"]]),
    ({}, ["anything", 5, {"a": 1}]),
    ({"enum": ["red", "1"]}, ["red", "1"]),
    ({"enum": ["1", 2, None]}, ["1", 2, None]),
    ({"const": "5"}, ["5"]),
    ({"$ref": "#/$defs/color"}, ["red", "1"]),
    ({"anyOf": [{"$ref": "#/$defs/color"}, {"type": "null"}]}, ["red", "1", None]),
    ({"allOf": [{"$ref": "#/$defs/color"}], "default": "red"}, ["red", "1"]),
    ({"anyOf": [{"type": "string", "pattern": "^[a-c]+$"}, {"type": "boolean"}]}, ["abc", True]),
    ({"anyOf": [{"type": "string", "maxLength": 3}, {"type": "integer"}]}, ["abc", 12345]),
    ({"anyOf": [{"type": "string", "maxLength": 3}, {"type": "object"}]}, ["anything", {"a": 1}]),
    ({"anyOf": [{"enum": ["red"]}, {"type": "array", "items": {"type": "integer"}}]}, ["red", [1, 2]]),
]  # fmt: skip


def parsed(form: ToolFormat, text: str, **options: Any) -> Parsed:
    whole = Parsed()
    whole.add(OutputParser(OutputFormat(form, schemas=TOOLS, **options)).feed(text, is_last=True))
    return whole


OPENINGS = {form.name: [form.start] for form in FORMS}
OPENINGS["llama3_json"] += ['{"name"']
OPENINGS["llama4_pythonic"] += ["[clock("]
OPENINGS["openai"] = ["<|channel|>commentary to=functions."]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_a_random_model_calls_declared_tools_by_their_schemas(
    form: ToolFormat, compiler: tuple[Any, GrammarCompiler]
) -> None:
    tag, pick, names = calls_in_text(form, TOOLS), random.Random(0), set()
    for seed in range(8):
        walk = Walk(compiler, tag)
        opening = OPENINGS[form.name][seed % len(OPENINGS[form.name])]
        assert walk.write(opening), opening
        for _ in range(500):
            allowed = walk.allowed()
            if walk.tokenizer.eos_token_id in allowed:
                break
            texts = {token: walk.tokenizer.convert_ids_to_tokens(token) for token in allowed}
            # Half of the time what closes something: a random text would go on for ever.
            closing = [token for token in allowed if texts[token][-1:] in '"}])>|`']
            walk.ids.append(pick.choice(closing if closing and pick.random() < 0.6 else allowed))
        else:
            continue
        found = parsed(form, walk.text)
        assert found.calls, walk.text
        for call in found.calls:
            names.add(call.name)
            schema = {"additionalProperties": False, **(TOOLS[call.name] or {"type": "object"})}
            jsonschema.validate(json.loads(call.arguments), schema)
    assert names <= TOOLS.keys() and len(names) > 1


LENIENT = ('"weather"}', ']}"}', "{}}}</tool_call>", '"clock"}</tool_call>')
STRICT = [
    (form, text.removesuffix("<|eot_id|>"))
    for form, text, _, calls in TRANSCRIPTS
    if form.name in FORMATS and calls and not text.endswith(LENIENT)
]
"""Calls as templates write them; parsers take more."""


@pytest.mark.parametrize(("form", "text"), STRICT)
def test_what_models_write_may_be_written(
    form: ToolFormat, text: str, compiler: tuple[Any, GrammarCompiler]
) -> None:
    tools = {"weather": SCHEMAS["weather"], "clock": None}
    text = text.replace("['a', {'b': None}]", '["a", {"b": null}]')
    assert Walk(compiler, calls_in_text(form, tools)).write(text)
    assert not Walk(compiler, calls_in_text(form, {"other": None})).write(text)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_text_without_a_call_is_free(
    form: ToolFormat, compiler: tuple[Any, GrammarCompiler]
) -> None:
    for text in ('{"a": 1} is JSON, [f] no call, <b> no marker.', "[1, 2]", " {", ""):
        walk = Walk(compiler, calls_in_text(form, TOOLS))
        assert walk.write(text) and walk.may_end


@pytest.mark.parametrize("form", [HERMES, LLAMA3_JSON, LLAMA4_PYTHONIC, MISTRAL, QWEN3_CODER])
@pytest.mark.parametrize("reasoning", [THINK, MISTRAL_THINK])
def test_reasoning_before_calls_is_free(
    form: ToolFormat, reasoning: ReasoningFormat, compiler: tuple[Any, GrammarCompiler]
) -> None:
    call = next(text for each, text in STRICT if each is form)
    call = call.replace("['a', {'b': None}]", '["a", {"b": null}]')
    thought = f'{{"name" [x( so{reasoning.end}\n'
    tools = {"weather": SCHEMAS["weather"], "clock": None}
    for in_reasoning in (False, True):
        begins = "" if in_reasoning else f"\n{reasoning.start}"
        for text, others in ((begins + thought + call, False), (begins + thought, True)):
            tag = calls_in_text(form, tools, reasoning, in_reasoning=in_reasoning)
            assert Walk(compiler, tag).write(text)
            tag = calls_in_text(form, {"x": None}, reasoning, in_reasoning=in_reasoning)
            assert Walk(compiler, tag).write(text) == others
    tag = calls_in_text(form, tools, reasoning)
    assert Walk(compiler, tag).write(call), "reasoning may be left out"


@pytest.mark.parametrize("form", [HERMES, QWEN3_CODER, KIMI_K2, MISTRAL, LLAMA3_JSON])
@pytest.mark.parametrize("in_reasoning", [False, True])
def test_a_call_ends_the_reasoning(
    form: ToolFormat, in_reasoning: bool, compiler: tuple[Any, GrammarCompiler]
) -> None:
    call = next(text for each, text in STRICT if each is form and form.start in text)
    call = call[call.index(form.start) :]
    begun = f"{'' if in_reasoning else '<think>'}Hm.\n"
    for tools, is_declared in ((SCHEMAS, True), ({"x": None}, False)):
        tag = calls_in_text(form, tools, THINK, in_reasoning=in_reasoning)
        walk = Walk(compiler, tag)
        assert walk.write(begun + call) == is_declared
        assert not is_declared or walk.may_end
    options: Any = {"reasoning": THINK, "in_reasoning": in_reasoning}
    whole = parsed(form, begun + call, **options)
    assert (whole.reasoning, whole.text) == ("Hm.", "") and whole.calls
    if form.end is not None:
        assert parsed(form, f"{begun}{call}\n</think>\n", **options).text == ""
        whole = parsed(form, f"{begun}{form.start} is a tag.\n</think>\nSo.", **options)
        assert (whole.reasoning, whole.text) == (f"Hm.\n{form.start} is a tag.", "So.")
        text = f"{begun}{form.start} is a tag.\n</think>\n{call}"
        for at in range(len(text)):
            parser, whole = OutputParser(OutputFormat(form, schemas=TOOLS, **options)), Parsed()
            whole.add(parser.feed(text[:at]))
            whole.add(parser.feed(text[at:], is_last=True))
            assert whole.reasoning == f"Hm.\n{form.start} is a tag." and whole.calls
    assert parsed(form, f"{begun}</think>{call}", **options).reasoning == "Hm."


SHAPES = [
    (Constraint("json_schema", {"type": "object", "properties": {"a": {"type": "integer"}}}, ""), '{"a": 1}'),
    (Constraint("regex", "[a-z]{3}-[0-9]", ""), "abc-7"),
    (Constraint("choice", ["red", "green"], ""), "green"),
    (Constraint("grammar", 'root ::= "a" [0-9]', ""), "a5"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("constraint", "answer"), SHAPES, ids=lambda value: getattr(value, "kind", "")
)
@pytest.mark.parametrize("reasoning", [THINK, MISTRAL_THINK])
def test_reasoning_before_a_shaped_answer_is_free(
    constraint: Constraint, answer: str, reasoning: ReasoningFormat,
    compiler: tuple[Any, GrammarCompiler],
) -> None:  # fmt: skip
    for in_reasoning in (False, True):
        tag = shaped_answer(constraint.form, reasoning, in_reasoning=in_reasoning)
        walk = Walk(compiler, tag)
        begins = "" if in_reasoning else reasoning.start
        assert walk.write(f'{begins}\nIt is {{"a or red{reasoning.end}\n\n') and not walk.may_end
        assert not Walk(compiler, tag).write(f"{begins}Hm.{reasoning.end}!")
        assert walk.write(answer) and walk.may_end
        assert not walk.write("x")
    assert Walk(compiler, shaped_answer(constraint.form, reasoning, in_reasoning=False)).write(
        answer
    )


def test_harmonys_last_message_is_the_shaped_answer(compiler: tuple[Any, GrammarCompiler]) -> None:
    for constraint, answer in SHAPES:
        walk = Walk(compiler, shaped_answer(constraint.form, None, in_reasoning=False))
        thought = "<|channel|>analysis<|message|>A user asks.<|end|><|start|>assistant"
        assert walk.write(f"{thought}<|channel|>final<|message|>{answer}") and walk.may_end
        form = OutputFormat(HARMONY)
        whole = Parsed()
        whole.add(OutputParser(form).feed(walk.text, is_last=True))
        assert (whole.reasoning, whole.text) == ("A user asks.", answer)


@pytest.mark.parametrize("form", RAW, ids=lambda form: form.name)
@pytest.mark.parametrize(("declared", "values"), UNQUOTED)
def test_strings_among_other_values_are_written_raw(
    form: ToolFormat, declared: Any, values: list[Any], compiler: tuple[Any, GrammarCompiler]
) -> None:
    tools = {"f": {"properties": {"x": declared}, "required": ["x"], **COLOR}}
    tag = calls_in_text(form, tools)
    for value in values:
        written = value if isinstance(value, str) else json.dumps(value)
        walk = Walk(compiler, tag)
        assert walk.write(RAW[form].format(written)), written
        whole = Parsed()
        parser = OutputParser(OutputFormat(form, schemas=tools))
        for event in map(parser.feed, walk.text):
            whole.add(event)
        whole.add(parser.feed("", is_last=True))
        assert [call.arguments for call in whole.calls] == [json.dumps({"x": value})]
    if "anything" not in values:
        assert not Walk(compiler, tag).write(RAW[form].format("anything"))


def test_calls_without_a_marker_are_of_declared_tools() -> None:
    """Text to the grammar, which knows no call there, is text to the parser, too."""
    for form, text in (
        (LLAMA3_JSON, '{"parameters": {}, "name": "other"}'),
        (LLAMA4_PYTHONIC, "[(other)(a=1)]"),
    ):
        whole = parsed(form, text)
        assert (whole.text, whole.calls) == (text, [])
        assert parsed(form, text.replace("other", "clock")).calls


def test_halves_of_characters_in_python_calls_are_joined() -> None:
    for written, meant in ((r"\ud83e\udd8a", "🦊"), (r"\ud83e", "\ufffd")):
        (call,) = parsed(LLAMA4_PYTHONIC, f'[clock(zone="{written}", summer=true)]').calls
        assert json.loads(call.arguments) == {"zone": meant, "summer": True}
        assert call.arguments.encode()


@pytest.mark.parametrize("form", [MISTRAL, QWEN3_CODER], ids=lambda form: form.name)
def test_as_many_tools_as_may_be(form: ToolFormat, compiler: tuple[Any, GrammarCompiler]) -> None:
    """The rows of llguidance's parser are bounded, and each tool begins an alternative of some."""
    fields = {f"a{number}": {"type": "integer"} for number in range(4)}
    tools = {f"tool_{number}": {"type": "object", "properties": fields} for number in range(128)}
    text = next(text for each, text in STRICT if each is form and "city" in text)
    walk = Walk(compiler, calls_in_text(form, tools, THINK))
    assert walk.write(text[: text.index("weather")]) and walk.write("tool_127")


def test_many_arguments_of_python_calls(compiler: tuple[Any, GrammarCompiler]) -> None:
    """The grammar grows linearly: each argument is written once."""
    fields = {f"a{number}": {"type": "integer"} for number in range(150)}
    tools = {"f": {"type": "object", "properties": fields, "required": ["a3"]}}
    for text, fits in (("a3=1", True), ("a1=1, a3=1, a140=2", True), ("a1=1)", False)):
        tag = calls_in_text(LLAMA4_PYTHONIC, tools)
        assert Walk(compiler, tag).write(f"[f({text}{')]' if fits else ''}") == fits
