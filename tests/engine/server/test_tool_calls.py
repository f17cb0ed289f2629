"""Tool calls: their formats, the chat template, and forced calls."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import openai
import pytest
from llmopt.cli.main import main
from llmopt.engine.base.sampling_params import SamplingParams
from llmopt.engine.sampling.grammar import GrammarCompiler, choice
from llmopt.engine.server.text.tool_calls import (
    FORCED,
    FORMATS,
    HERMES,
    LLAMA3_JSON,
    MISTRAL,
    ToolFormat,
    ToolReader,
    format_of_template,
)

from ...support.live_server import RunningServer, events, make_engine, running

TEMPLATE = (
    "{% if tools %}Tools: {% for tool in tools %}{{ tool.function.name }} {% endfor %}"
    "as <tool_call>{}</tool_call>\n{% endif %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{% for call in m.tool_calls %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}{{ '\\n' }}"
    "{% endfor %}{% if style %}[{{ style }}]{% endif %}assistant:"
)
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "How it is outside",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 10}},
            "required": ["city"],
        },
    },
}
CLOCK: Any = {"type": "function", "function": {"name": "clock"}}
USER: Any = [{"role": "user", "content": "Is it raining?"}]


@pytest.fixture(scope="module")
def tooled() -> Iterator[RunningServer]:
    with running(make_engine(), chat_template=TEMPLATE) as it:
        yield it


def read(form: ToolFormat, text: str, size: int, **options: Any) -> tuple[str, list[Any]]:
    """A parser's result for a text that arrives in deltas of `size` characters."""
    reader = ToolReader(form, **options)
    shown, calls = "", []
    # The stop marker is one token, so it arrives in one delta.
    body, ending, _ = text.partition("<|eot_id|>")
    pieces = [body[begin : begin + size] for begin in range(0, len(body), size)] + [ending]
    for index, part in enumerate(pieces, 1):
        piece, found = reader.feed(part, is_last=index == len(pieces))
        shown += piece
        calls += [(call.name, json.loads(call.arguments)) for call in found]
        assert all(len(call.id) == 9 and call.id.isalnum() for call in found)
    return shown, calls


ONE = ("weather", {"city": "Köln"})
TWO = ("clock", {})
JSON_ONE = '{"name": "weather", "arguments": {"city": "Köln"}}'
JSON_TWO = '{"name": "clock", "arguments": {}}'


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
@pytest.mark.parametrize(
    ("form", "text", "shown", "calls"),
    [
        (HERMES, f"<tool_call>\n{JSON_ONE}\n</tool_call>", "", [ONE]),
        (
            HERMES,
            f"Let me see. <tool_call>{JSON_ONE}</tool_call>\n<tool_call>{JSON_TWO}</tool_call>",
            "Let me see. ",
            [ONE, TWO],
        ),
        (HERMES, "5 < 7 <tool is a tag", "5 < 7 <tool is a tag", []),
        (HERMES, "<tool_call>{broken</tool_call>", "<tool_call>{broken</tool_call>", []),
        (HERMES, '<tool_call>{"a": 1}</tool_call>', '<tool_call>{"a": 1}</tool_call>', []),
        (HERMES, '{"name": "x"} is JSON', '{"name": "x"} is JSON', []),
        (LLAMA3_JSON, JSON_ONE.replace("arguments", "parameters"), "", [ONE]),
        (LLAMA3_JSON, f"<|python_tag|>{JSON_ONE}; {JSON_TWO}<|eot_id|>", "", [ONE, TWO]),
        (LLAMA3_JSON, 'It is {"a": 1}<|eot_id|>', 'It is {"a": 1}', []),
        (LLAMA3_JSON, '{"a": 1} is JSON', '{"a": 1} is JSON', []),
        (MISTRAL, f"[TOOL_CALLS][{JSON_ONE}, {JSON_TWO}]", "", [ONE, TWO]),
        (MISTRAL, '[TOOL_CALLS]weather[ARGS]{"city": "Köln"}', "", [ONE]),
        (MISTRAL, 'Yes.[TOOL_CALLS]weather{"city": "Köln"}[TOOL_CALLS]clock{}', "Yes.", [ONE, TWO]),
        (MISTRAL, "[a list]", "[a list]", []),
        (FORCED, f"[ {JSON_ONE},\n{JSON_TWO}]", "", [ONE, TWO]),
    ],
)
def test_formats(form: ToolFormat, text: str, shown: str, calls: list[Any], size: int) -> None:
    assert read(form, text, size, stop_texts=["<|eot_id|>"]) == (shown, calls)


def test_one_call_where_one_is_allowed() -> None:
    text = f"<tool_call>{JSON_ONE}</tool_call><tool_call>{JSON_TWO}</tool_call>"
    assert read(HERMES, text, 5, max_calls=1) == ("", [ONE])


def test_the_template_shows_the_format() -> None:
    assert format_of_template(TEMPLATE) is HERMES
    assert format_of_template("{{ '[TOOL_CALLS]' }}") is MISTRAL
    assert format_of_template("<|python_tag|>") is LLAMA3_JSON
    assert format_of_template("<tool_call><function=name>") is None
    assert format_of_template("{{ messages }}") is None
    assert set(FORMATS) == {"hermes", "llama3_json", "mistral"}


def calls_of(answer: Any) -> list[Any]:
    return answer.choices[0].message.tool_calls


def test_a_tool_that_must_be_called_is(tooled: RunningServer) -> None:
    client = tooled.openai()
    fields: Any = {"model": "tiny", "messages": USER, "temperature": 0, "max_tokens": 150}
    named = client.chat.completions.create(
        tools=[WEATHER, CLOCK],
        tool_choice={"type": "function", "function": {"name": "weather"}},
        **fields,
    )
    assert len(calls_of(named)) == 1
    call = calls_of(named)[0]
    assert call.type == "function" and call.function.name == "weather"
    assert set(json.loads(call.function.arguments)) == {"city"}
    assert named.choices[0].message.content is None
    assert named.choices[0].finish_reason == "stop"

    required: Any = {
        "tools": [WEATHER], "tool_choice": "required", "parallel_tool_calls": False, **fields,
    }  # fmt: skip
    whole = client.chat.completions.create(**required)
    assert whole.choices[0].finish_reason == "tool_calls"
    call = calls_of(whole)[0]
    chunks = [chunk.choices[0] for chunk in client.chat.completions.create(stream=True, **required)]
    parts = [part for chunk in chunks for part in chunk.delta.tool_calls or ()]
    assert [(part.index, part.type) for part in parts] == [(0, "function")]
    assert parts[0].function.model_dump() == call.function.model_dump()
    assert chunks[-1].finish_reason == "tool_calls"
    assert not "".join(chunk.delta.content or "" for chunk in chunks)


def saying(server: RunningServer, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """Make the model generate `text`."""
    engine = server.engine
    compiler = GrammarCompiler(engine.tokenizer, engine.vocab_size, engine.eos_token_ids)
    add_request = engine.add_request

    def add(request_id: str, prompt: Any, params: SamplingParams, **options: Any) -> None:
        mask = compiler.mask(choice([text]))
        add_request(request_id, prompt, replace(params, token_mask=mask), **options)

    monkeypatch.setattr(engine, "add_request", add)


def test_tool_calls_are_parsed_from_the_output(
    tooled: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    saying(tooled, monkeypatch, f"I look.\n<tool_call>\n{JSON_ONE}\n</tool_call>")
    body: Any = {"messages": USER, "tools": [WEATHER], "max_tokens": 200, "temperature": 0}
    with tooled.http() as http:
        choice_ = http.post("/v1/chat/completions", json=body).json()["choices"][0]
    assert choice_["finish_reason"] == "tool_calls"
    assert choice_["message"]["content"] == "I look.\n"
    (call,) = choice_["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"city": "Köln"}
    deltas = [e["choices"][0]["delta"] for e in events(tooled, "/v1/chat/completions", body)]
    assert "".join(delta.get("content") or "" for delta in deltas) == "I look.\n"
    (streamed,) = [one for delta in deltas for one in delta.get("tool_calls", ())]
    assert streamed["index"] == 0 and streamed["function"] == call["function"]
    with tooled.http() as http:
        none = http.post("/v1/chat/completions", json={**body, "tool_choice": "none"}).json()
    assert "<tool_call>" in none["choices"][0]["message"]["content"]
    assert none["choices"][0]["finish_reason"] == "stop"


def test_the_template_gets_tools_calls_and_results(tooled: RunningServer) -> None:
    function = {"name": "weather", "arguments": '{"city": "Köln"}'}
    turns: Any = [
        *USER,
        {
            "role": "assistant",
            "tool_calls": [{"id": "a", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "a", "content": "dry"},
    ]
    text = (
        "Tools: weather clock as <tool_call>{}</tool_call>\nuser: Is it raining?\nassistant: "
        '<tool_call>{"name": "weather", "arguments": {"city": "Köln"}}</tool_call>\ntool: dry\n'
        "[short]assistant:"
    )
    body: Any = {
        "messages": turns,
        "tools": [WEATHER, CLOCK],
        "chat_template_kwargs": {"style": "short"},
        "max_tokens": 1,
        "logprobs": True,
    }
    expected = tooled.engine.tokenizer(text, add_special_tokens=False).input_ids
    with tooled.http() as http:
        usage = http.post("/v1/chat/completions", json=body).json()["usage"]
        card = http.get("/v1/models/tiny").json()
    assert usage["prompt_tokens"] == len(expected)
    assert card["chat_template"] == {"source": "file"}


def test_tools_that_cannot_be_used_are_refused(
    server: RunningServer, tooled: RunningServer
) -> None:
    def refusal(at: RunningServer, **fields: Any) -> str:
        with pytest.raises(openai.BadRequestError) as refused:
            at.openai().chat.completions.create(model="tiny", messages=USER, **fields)
        return str(refused.value)

    assert "--chat-template" in refusal(server, tools=[WEATHER])
    assert "tools" in refusal(tooled, tools=[{"type": "function"}])
    assert "no tools" in refusal(tooled, tool_choice="required")
    other: Any = {"type": "function", "function": {"name": "other"}}
    assert "'other'" in refusal(tooled, tools=[WEATHER], tool_choice=other)
    json_object: Any = {"type": "json_object"}
    assert "do not go together" in refusal(tooled, tools=[WEATHER], response_format=json_object)
    wrong: Any = {"type": "function", "function": {"name": "f", "parameters": {"type": "strin"}}}
    assert "tools/items/anyOf/0/properties/arguments: Invalid type" in refusal(
        tooled, tools=[wrong], tool_choice="required"
    )
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{"}}
    turns: Any = [*USER, {"role": "assistant", "tool_calls": [call]}]
    with tooled.http() as http:
        response = http.post("/v1/chat/completions", json={"messages": turns})
    assert response.status_code == 400 and "are not JSON" in response.text


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--chat-template", "/no/such/file"], "--chat-template /no/such/file: No such file"),
        (["--tool-call-parser", "xml"], "need one of hermes, llama3_json, mistral"),
    ],
)
def test_options_that_name_nothing(
    words: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["serve-local", "stories260K", "--port", "0", *words])
    assert ended.value.code == 2
    assert complaint in " ".join(capsys.readouterr().err.split())
