"""Golden transcripts of each format, cut at every place, and how the work grows."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llmopt.engine.base.sampling_params import SamplingParams
from llmopt.engine.scheduling.outputs import CompletionText
from llmopt.engine.server.parsing.calls import TextSource
from llmopt.engine.server.parsing.formats import (
    DEEPSEEK_V3,
    DEEPSEEK_V31,
    DEEPSEEK_V32,
    FORCED,
    FORMATS,
    GLM45,
    GRANITE,
    HARMONY,
    HERMES,
    KIMI_K2,
    LFM2,
    LLAMA3_JSON,
    LLAMA4_PYTHONIC,
    MINIMAX_M2,
    MISTRAL,
    MISTRAL_THINK,
    QWEN3_CODER,
    SEED_THINK,
    THINK,
    Parsed,
    ReasoningFormat,
    ToolFormat,
    format_of_template,
    reasoning_format,
    reasoning_of_template,
)
from llmopt.engine.server.parsing.parser import OutputFormat, OutputParser

SCHEMAS: dict[str, Any] = {
    "weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "tags": {"type": "array"},
        },
    },
    "clock": {},
}
ARGUMENTS = {"city": 'Köln "am"\\Rhein\n{x}', "days": 3, "tags": ["a", {"b": None}]}
ONE, TWO = ("weather", ARGUMENTS), ("clock", {})
OBJECT = json.dumps(ARGUMENTS, ensure_ascii=False)
JSON_ONE = f'{{"name": "weather", "arguments": {OBJECT}}}'
JSON_TWO = '{"name": "clock", "arguments": {}}'
TAGS = json.dumps(ARGUMENTS["tags"])
CITY = ARGUMENTS["city"]
D = "｜DSML｜"

TRANSCRIPTS: list[tuple[ToolFormat, str, str, list[Any]]] = [
    (HERMES, f"<tool_call>\n{JSON_ONE}\n</tool_call>", "", [ONE]),
    (
        HERMES,
        f"Let me see. <tool_call>{JSON_ONE}</tool_call>\n<tool_call>{JSON_TWO}</tool_call>\n Done.",
        "Let me see. Done.",
        [ONE, TWO],
    ),
    (HERMES, f"<tool_call>{JSON_TWO}}}</tool_call>", "", [TWO]),
    (HERMES, f'<tool_call>{{"arguments": {OBJECT}, "id": 1, "name": "weather"}}', "", [ONE]),
    (HERMES, f'<tool_call>{{"name": "weather", "arguments": {json.dumps(OBJECT)}}}', "", [ONE]),
    (HERMES, '<tool_call>{"name": "clock"}</tool_call>', "", [TWO]),
    (HERMES, "5 < 7 <tool is a tag", "5 < 7 <tool is a tag", []),
    (HERMES, "<tool_call>{broken</tool_call>", "<tool_call>{broken</tool_call>", []),
    (HERMES, '<tool_call>{"a": 1}</tool_call>', '<tool_call>{"a": 1}</tool_call>', []),
    (HERMES, '<tool_call>{"name": "wea', '<tool_call>{"name": "wea', []),
    (HERMES, '{"name": "x"} is JSON', '{"name": "x"} is JSON', []),
    (GRANITE, f"<|tool_call|>[{JSON_ONE}, {JSON_TWO}]", "", [ONE, TWO]),
    (LLAMA3_JSON, JSON_ONE.replace("arguments", "parameters"), "", [ONE]),
    (LLAMA3_JSON, f"<|python_tag|>{JSON_ONE}; {JSON_TWO}<|eot_id|>", "", [ONE, TWO]),
    (LLAMA3_JSON, 'It is {"a": 1}<|eot_id|>', 'It is {"a": 1}', []),
    (LLAMA3_JSON, '{"a": 1} is JSON', '{"a": 1} is JSON', []),
    (LLAMA3_JSON, '  {"a": 1', '  {"a": 1', []),
    (
        LLAMA4_PYTHONIC,
        f"[weather(city={CITY!r}, days=3, tags=['a', {{'b': None}}]), clock()]<|eot_id|>",
        "",
        [ONE, TWO],
    ),
    (LLAMA4_PYTHONIC, "<|python_start|>[clock()]<|python_end|>", "", [TWO]),
    (LLAMA4_PYTHONIC, "[a list], not calls", "[a list], not calls", []),
    (LLAMA4_PYTHONIC, "[1, f(x)]", "[1, f(x)]", []),
    (LFM2, "<|tool_call_start|>[clock()]<|tool_call_end|>It is.", "It is.", [TWO]),
    (MISTRAL, f"[TOOL_CALLS][{JSON_ONE}, {JSON_TWO}]", "", [ONE, TWO]),
    (MISTRAL, f"[TOOL_CALLS]weather[ARGS]{OBJECT}", "", [ONE]),
    (MISTRAL, f"Yes.[TOOL_CALLS]weather{OBJECT}[TOOL_CALLS]clock[ARGS]{{}}", "Yes.", [ONE, TWO]),
    (MISTRAL, "[a list]", "[a list]", []),
    (FORCED, f"[ {JSON_ONE},\n{JSON_TWO}]", "", [ONE, TWO]),
    (
        QWEN3_CODER,
        f"Look:\n<tool_call>\n<function=weather>\n<parameter=city>\n{CITY}\n</parameter>\n"
        f"<parameter=days>\n3\n</parameter>\n<parameter=tags>{TAGS}</parameter>\n</function>\n"
        "</tool_call>\n<tool_call>\n<function=clock>\n</function>\n</tool_call>",
        "Look:\n",
        [ONE, TWO],
    ),
    (QWEN3_CODER, "<tool_call> is a tag", "<tool_call> is a tag", []),
    (
        GLM45,
        f"<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>{CITY}</arg_value>\n"
        f"<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n<arg_key>tags</arg_key>"
        f"<arg_value>{TAGS}</arg_value>\n</tool_call>\n<tool_call>clock\n</tool_call>\nSo.",
        "So.",
        [ONE, TWO],
    ),
    (
        DEEPSEEK_V3,
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n"
        f"{OBJECT}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>clock\n```json\n"
        "{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "",
        [ONE, TWO],
    ),
    (
        DEEPSEEK_V31,
        f"So.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{OBJECT}<｜tool▁call▁end｜>"
        "<｜tool▁call▁begin｜>clock<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "So.",
        [ONE, TWO],
    ),
    (
        DEEPSEEK_V32,
        f'<{D}function_calls>\n<{D}invoke name="weather">\n'
        f'<{D}parameter name="city" string="true">{CITY}</{D}parameter>\n'
        f'<{D}parameter name="days" string="false">3</{D}parameter>\n'
        f'<{D}parameter name="tags" string="false">{TAGS}</{D}parameter>\n</{D}invoke>\n'
        f'<{D}invoke name="clock">\n</{D}invoke>\n</{D}function_calls>',
        "",
        [ONE, TWO],
    ),
    (
        KIMI_K2,
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0"
        f"<|tool_call_argument_begin|>{OBJECT}<|tool_call_end|><|tool_call_begin|>functions.clock:1"
        "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
        "",
        [ONE, TWO],
    ),
    (
        MINIMAX_M2,
        f'<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">{CITY}</parameter>\n'
        f'<parameter name="days">3</parameter>\n<parameter name="tags">{TAGS}</parameter>\n</invoke>\n'
        '<invoke name="clock">\n</invoke>\n</minimax:tool_call>',
        "",
        [ONE, TWO],
    ),
    (
        HARMONY,
        "<|channel|>commentary<|message|>Let me see.<|end|><|start|>assistant<|channel|>commentary "
        f"to=functions.weather <|constrain|>json<|message|>{OBJECT}<|call|>",
        "Let me see.",
        [ONE],
    ),
    (HARMONY, "<|channel|>final<|message|>It is dry.<|return|>", "It is dry.", []),
    (HARMONY, "plain", "plain", []),
]


def parsed(form: OutputFormat, pieces: list[str]) -> Parsed:
    parser, whole = OutputParser(form), Parsed()
    for index, piece in enumerate(pieces, 1):
        whole.add(parser.feed(piece, is_last=index == len(pieces)))
    assert parser.num_calls == len(whole.calls)
    return whole


def calls_of(whole: Parsed) -> list[tuple[str, Any]]:
    return [(call.name, json.loads(call.arguments)) for call in whole.calls]


def format_for(form: ToolFormat | None, **options: Any) -> OutputFormat:
    return OutputFormat(form, schemas=SCHEMAS, stop_texts=["<|eot_id|>"], **options)


@pytest.mark.parametrize(("form", "text", "shown", "calls"), TRANSCRIPTS)
def test_a_transcript_cut_at_every_place(
    form: ToolFormat, text: str, shown: str, calls: list[Any]
) -> None:
    # The stop marker is one token, so it arrives in one piece.
    body, ending = (text.removesuffix("<|eot_id|>"), text[len(text.removesuffix("<|eot_id|>")) :])
    cuts = [[body[:at], body[at:], ending] for at in range(len(body) + 1)]
    cuts += [[*body, ending], [text]]
    for pieces in cuts:
        whole = parsed(format_for(form), pieces)
        assert (whole.text, calls_of(whole)) == (shown, calls), pieces
        assert not whole.reasoning


def test_every_format_has_a_transcript_with_a_call() -> None:
    assert {form.name for form, _, _, calls in TRANSCRIPTS if calls} == {*FORMATS, "forced"}


class _Bytes:
    """A tokenizer whose tokens are bytes, as byte-level vocabularies have for rare characters."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        return bytes(token_ids).decode(errors="replace")


@pytest.mark.parametrize(("form", "text", "shown", "calls"), TRANSCRIPTS)
def test_a_transcript_in_tokens_that_split_characters(
    form: ToolFormat, text: str, shown: str, calls: list[Any]
) -> None:
    body = text.removesuffix("<|eot_id|>").encode()
    texts = CompletionText(_Bytes(), [], SamplingParams())
    pieces = [texts.feed(byte, is_last=at == len(body))[0] for at, byte in enumerate(body, 1)]
    assert "".join(pieces).encode() == body
    whole = parsed(format_for(form), pieces)
    assert (whole.text, calls_of(whole)) == (shown, calls)


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_any_cutting_gives_the_same(data: st.DataObject) -> None:
    form, text, shown, calls = data.draw(st.sampled_from(TRANSCRIPTS))
    body = text.removesuffix("<|eot_id|>")
    cuts = sorted(data.draw(st.sets(st.integers(0, len(body)), max_size=8)) | {0, len(body)})
    pieces = [body[a:b] for a, b in pairwise(cuts)] + [""]
    whole = parsed(format_for(form), pieces)
    assert (whole.text, calls_of(whole)) == (shown, calls)


@settings(deadline=None, max_examples=200)
@given(
    form=st.sampled_from([*FORMATS.values(), FORCED]),
    parts=st.lists(
        st.sampled_from(
            ["<tool_call>", "</tool_call>", "{", "}", '"name"', '"x"', ":", "[", "]", "<|channel|>"]
            + [form.start for form in FORMATS.values()]
            + ["<function=f>", "<parameter=", ">", "(", "a", " ", "\n", "\\", "\0", "<|message|>"]
        ),
        max_size=12,
    ),
)
def test_nonsense_neither_fails_nor_depends_on_the_cut(form: ToolFormat, parts: list[str]) -> None:
    text = "".join(parts)
    whole, single = parsed(format_for(form), [text]), parsed(format_for(form), [*text, ""])
    assert (whole.text, [c.arguments for c in whole.calls]) == (
        single.text, [c.arguments for c in single.calls],
    )  # fmt: skip


@pytest.mark.parametrize("form", [THINK, MISTRAL_THINK, SEED_THINK])
@pytest.mark.parametrize("begun", [False, True])
def test_reasoning_comes_before_the_answer(form: ReasoningFormat, begun: bool) -> None:
    text = f"Hm.\n\nSo \n{form.end}\n\n<tool_call>{JSON_TWO}</tool_call>"
    text = text if begun else f"\n{form.start}\n{text}"
    options = format_for(HERMES, reasoning=form, in_reasoning=begun)
    for at in range(len(text) + 1):
        whole = parsed(options, [text[:at], text[at:], ""])
        assert (whole.reasoning, whole.text, calls_of(whole)) == ("Hm.\n\nSo", "", [TWO])
    assert form.is_begun_by(f"assistant\n{form.start}\n") and not form.is_begun_by(form.end)


def test_an_answer_without_reasoning_is_text() -> None:
    for text in ("4", " <thin", "<think", "\n\nno <think>", ""):
        assert parsed(format_for(None, reasoning=THINK), [*text, ""]).text == text
    unfinished = parsed(format_for(None, reasoning=THINK), ["<think>so"])
    assert (unfinished.reasoning, unfinished.text) == ("so", "")


def test_harmony_reasons_in_its_own_channel() -> None:
    text = (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant to=functions.clock"
        "<|channel|>commentary json<|message|>{}<|call|>"
    )
    for at in range(len(text) + 1):
        whole = parsed(format_for(HARMONY), [text[:at], text[at:]])
        assert (whole.reasoning, whole.text, calls_of(whole)) == ("Hm.", "", [TWO])


def test_ids_are_the_models_own_where_it_gives_them() -> None:
    kimi = next(text for form, text, _, _ in TRANSCRIPTS if form is KIMI_K2)
    assert [call.id for call in parsed(format_for(KIMI_K2), [kimi]).calls] == [
        "functions.weather:0",
        "functions.clock:1",
    ]
    other = parsed(format_for(HERMES), [f"<tool_call>{JSON_TWO}"]).calls[0].id
    assert len(other) == 9 and other.isalnum()


def test_no_more_calls_than_allowed() -> None:
    text = f"<tool_call>{JSON_ONE}</tool_call><tool_call>{JSON_TWO}</tool_call>"
    assert calls_of(parsed(format_for(HERMES, max_calls=1), [*text, ""])) == [ONE]


def test_arguments_come_before_the_call_is_whole() -> None:
    parser, whole = OutputParser(format_for(QWEN3_CODER)), Parsed()
    whole.add(parser.feed("<tool_call><function=weather><parameter=city>\nKö"))
    assert whole.calls[0].name == "weather" and whole.calls[0].arguments == '{"city": "Kö'
    parser, whole = OutputParser(format_for(HERMES)), Parsed()
    whole.add(parser.feed('<tool_call>{"name": "weather", "arguments": {"city": "Kö'))
    assert whole.calls[0].arguments == '{"city": "Kö'


@pytest.mark.parametrize("form", [HERMES, QWEN3_CODER, MISTRAL, LLAMA4_PYTHONIC, GLM45])
def test_the_work_is_linear(form: ToolFormat, monkeypatch: pytest.MonkeyPatch) -> None:
    """No piece is looked at again with the next: what is searched each time does not grow."""
    searched: list[int] = []
    feed = TextSource.feed

    def counted(source: TextSource, text: str, *, is_last: bool) -> None:
        feed(source, text, is_last=is_last)
        searched.append(len(source._text))

    monkeypatch.setattr(TextSource, "feed", counted)
    filler = 'x{"\n' * 2000 + "x"
    value = json.dumps({"city": filler})
    text = {
        HERMES: f'<tool_call>{{"name": "weather", "arguments": {value}}}</tool_call>',
        QWEN3_CODER: f"<tool_call><function=weather><parameter=city>{filler}</parameter></function>",
        MISTRAL: f"[TOOL_CALLS]weather{value}",
        LLAMA4_PYTHONIC: f"[weather(city={filler!r})]",
        GLM45: f"<tool_call>weather\n<arg_key>city</arg_key><arg_value>{filler}</arg_value></tool_call>",
    }[form]
    whole = parsed(format_for(form), [text[at : at + 4] for at in range(0, len(text), 4)])
    assert calls_of(whole) == [("weather", {"city": filler})]
    assert max(searched) <= 4 + len("</parameter>")


@pytest.mark.parametrize(
    ("template", "form"),
    [
        ("<tool_call>{}</tool_call>", HERMES),
        ("<tool_call><function=x>", QWEN3_CODER),
        ("<tool_call>{name}<arg_key>", GLM45),
        ("{{ '[TOOL_CALLS]' }}", MISTRAL),
        ("<|python_tag|>", LLAMA3_JSON),
        ("<｜tool▁calls▁begin｜>```json", DEEPSEEK_V3),
        ("<｜tool▁calls▁begin｜>", DEEPSEEK_V31),
        ("<｜DSML｜function_calls>", DEEPSEEK_V32),
        ("<|tool_calls_section_begin|>", KIMI_K2),
        ("<minimax:tool_call>", MINIMAX_M2),
        ("<|channel|>analysis namespace functions", HARMONY),
        ("{{ messages }}", None),
    ],
)
def test_the_template_shows_the_format(template: str, form: ToolFormat | None) -> None:
    assert format_of_template(template) is form


def test_the_template_shows_the_reasoning() -> None:
    assert reasoning_of_template("{% split('</think>') %}") is THINK
    assert reasoning_of_template("[/THINK]") is MISTRAL_THINK
    assert reasoning_of_template("{{ messages }}") is None


@pytest.mark.parametrize(
    "written",
    [
        '{"name": "clock", "arguments": {"a": NaN}}',
        '{"name": "clock", "arguments": {"a": 1e999}}',
        '{"name": "clock", "arguments": {"a": "\\ud800"}}',
        '{"name": "clock", "arguments": "{\\"a\\": \\"\\ud800\\"}"}',
        '{"name": "cl\\ud800ock", "arguments": {}}',
        '{"name": ' + "[" * 3000 + "]" * 3000 + "}",
        '{"name": "clock", "arguments": ' + '{"a":' * 3000 + "1" + "}" * 3000 + "}",
    ],
)
def test_values_that_no_response_can_contain(written: str) -> None:
    whole = parsed(OutputFormat(HERMES, schemas=SCHEMAS), [f"<tool_call>{written}</tool_call>"])
    shown = [whole.text, *((call.name, call.value) for call in whole.calls)]
    assert json.dumps(shown, ensure_ascii=False, allow_nan=False).encode()


def test_parsers_of_reasoning_have_vllm_s_names() -> None:
    assert reasoning_format("qwen3") is reasoning_format("deepseek_r1") is THINK
