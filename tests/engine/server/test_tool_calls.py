"""Tool calls: their formats, the chat template, and forced calls."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import openai
import pytest
from llmopt.cli.main import main
from llmopt.engine.base.sampling_params import SamplingParams
from llmopt.engine.sampling.grammar import GrammarCompiler, choice
from llmopt.engine.server.endpoints.tokenization import Tokenization
from llmopt.engine.server.parsing.formats import HARMONY
from llmopt.engine.server.protocol.chat_protocol import ChatRequest

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


JSON_ONE = '{"name": "weather", "arguments": {"city": "Köln"}}'


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
    assert {part.index for part in parts} == {0} and parts[0].type == "function"
    assert parts[0].function.name == "weather" and not any(p.function.name for p in parts[1:])
    assert "".join(part.function.arguments or "" for part in parts) == call.function.arguments
    assert chunks[-1].finish_reason == "tool_calls"
    assert not "".join(chunk.delta.content or "" for chunk in chunks)


def test_an_answer_by_schema_or_a_call(tooled: RunningServer) -> None:
    schema = {
        "type": "object",
        "properties": {"dry": {"$ref": "#/$defs/yes"}},
        "required": ["dry"],
        "additionalProperties": False,
        "$defs": {"yes": {"type": "boolean"}},
    }
    form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    fields: Any = {"model": "tiny", "messages": USER, "max_tokens": 120, "n": 8, "seed": 3}
    whole = tooled.openai().chat.completions.create(
        tools=[WEATHER, CLOCK], response_format=form, temperature=2.0, **fields
    )
    kinds = set()
    for choice_ in whole.choices:
        if choice_.finish_reason == "length":
            continue
        if choice_.message.tool_calls:
            kinds.add("call")
            assert choice_.message.tool_calls[0].function.name in ("weather", "clock")
        else:
            kinds.add("answer")
            assert set(json.loads(choice_.message.content or "")) == {"dry"}
    assert kinds == {"call", "answer"}


def test_a_choice_among_some_tools(tooled: RunningServer) -> None:
    allowed = {"mode": "required", "tools": [{"type": "function", "function": {"name": "clock"}}]}
    choice_: Any = {"type": "allowed_tools", "allowed_tools": allowed}
    answer = tooled.openai().chat.completions.create(
        model="tiny", messages=USER, max_tokens=80, tools=[WEATHER, CLOCK], tool_choice=choice_
    )
    assert {call.function.name for call in calls_of(answer)} == {"clock"}
    assert answer.choices[0].finish_reason in ("tool_calls", "length")


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
    parts = [part for delta in deltas for part in delta.get("tool_calls", ())]
    assert parts[0]["index"] == 0 and parts[0]["function"]["name"] == "weather"
    arguments = "".join(part["function"]["arguments"] for part in parts)
    assert arguments == call["function"]["arguments"] and len(parts) > 3
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
    regex: Any = {"type": "regex", "regex": "a+"}
    assert "only a JSON schema" in refusal(tooled, tools=[WEATHER], response_format=regex)
    forced: Any = {"tool_choice": "required", "response_format": regex}
    assert "must be a tool call" in refusal(tooled, tools=[WEATHER], **forced)
    wrong: Any = {"type": "function", "function": {"name": "f", "parameters": {"type": "strin"}}}
    assert "tools/items/anyOf/0/properties/arguments: Invalid type" in refusal(
        tooled, tools=[wrong], tool_choice="required"
    )


@pytest.mark.parametrize("template", [TEMPLATE, TEMPLATE.replace(
    "call.function | tojson", "call.function.arguments.items() | list | tojson")])  # fmt: skip
def test_arguments_that_were_cut_off_are_text(tooled: RunningServer, template: str) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"city": "K'}}
    turns: Any = [*USER, {"role": "assistant", "tool_calls": [call]}]
    request = ChatRequest.model_validate({"messages": turns})
    text = Tokenization(tooled.engine.tokenizer, chat_template=template)
    shown = text.decode(asyncio.run(text.encode_chat(request.messages)))
    assert json.dumps('{"city": "K') in shown
    with tooled.http() as http:
        body = {"messages": turns, "max_tokens": 1}
        assert http.post("/v1/chat/completions", json=body).status_code == 200


def test_a_call_that_has_begun_is_of_a_declared_tool(
    tooled: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, masks = tooled.engine, []
    add_request = engine.add_request

    def add(request_id: str, prompt: Any, params: SamplingParams, **options: Any) -> None:
        masks.append(params.token_mask)
        add_request(request_id, prompt, params, **options)

    monkeypatch.setattr(engine, "add_request", add)
    wrong: Any = {"type": "function", "function": {"name": "odd", "parameters": {"type": "strin"}}}
    with tooled.http() as http:
        for fields in (
            {"tools": [WEATHER, CLOCK]},
            {"tools": [WEATHER], "tool_choice": "none"},
            {"tools": [WEATHER, wrong]},
        ):
            body = {"messages": USER, "max_tokens": 2, **fields}
            assert http.post("/v1/chat/completions", json=body).status_code == 200
    mask = masks[0]
    assert mask is not None and masks[1] is None and masks[2] is None

    def is_allowed(text: str) -> bool:
        ids = engine.tokenizer(text, add_special_tokens=False).input_ids
        for count, token in enumerate(ids):
            words = mask.allowed([], ids[:count])
            if not int(words[token // 32]) >> (token % 32) & 1:
                return False
        return True

    assert is_allowed('I look: {"name": 3}.\n<tool_call>\n' + JSON_ONE + "\n</tool_call> So")
    assert is_allowed('<tool_call>{"name": "clock", "arguments": {}}</tool_call>')
    for name, arguments in (("other", "{}"), ("weather", "{}"), ("weather", '{"city": 3}')):
        text = f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'
        assert not is_allowed(text)


@pytest.mark.parametrize(
    ("keywords", "ignored"),
    [
        ({"propertyNames": {"type": "string"}}, None),
        ({"uniqueItems": True, "not": {"type": "null"}}, "tools.not, tools.uniqueItems"),
        ({"enum": [{"uniqueItems": True}]}, None),
    ],
)
def test_a_keyword_that_is_not_enforced_leaves_the_others(
    tooled: RunningServer,
    monkeypatch: pytest.MonkeyPatch,
    keywords: dict[str, Any],
    ignored: str | None,
) -> None:
    engine, masks = tooled.engine, []
    add_request = engine.add_request

    def add(request_id: str, prompt: Any, params: SamplingParams, **options: Any) -> None:
        masks.append(params.token_mask)
        add_request(request_id, prompt, params, **options)

    monkeypatch.setattr(engine, "add_request", add)
    parameters = {"type": "object", "properties": {"a": keywords}}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    with tooled.http() as http:
        body = {"messages": USER, "tools": [tool], "max_tokens": 1}
        answer = http.post("/v1/chat/completions", json=body)
    assert answer.headers.get("x-ignored-fields") == ignored
    assert masks != [None]
    assert parameters == {"type": "object", "properties": {"a": keywords}}


@pytest.mark.parametrize(
    ("keywords", "complaint"),
    [
        ({"uniqueItems": True, "type": "array"}, "a: Unimplemented keys"),
        ({"not": {"type": "null"}}, "a: Unimplemented keys"),
        ({"uniqueItems": False, "const": 1}, None),
        ({"const": {"not": 1, "uniqueItems": True}}, None),
    ],
)
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "f"}}])
def test_a_forced_call_keeps_every_keyword_or_is_refused(
    tooled: RunningServer, keywords: dict[str, Any], complaint: str | None, choice: Any
) -> None:
    parameters = {"type": "object", "properties": {"a": keywords}, "required": ["a"]}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    with tooled.http() as http:
        body = {"messages": USER, "tools": [tool], "tool_choice": choice, "max_tokens": 200}
        answer = http.post("/v1/chat/completions", json=body)
    if complaint is None:
        (call, *_) = answer.json()["choices"][0]["message"]["tool_calls"]
        assert json.loads(call["function"]["arguments"]) == {"a": keywords["const"]}
    else:
        assert answer.status_code == 400 and complaint in answer.json()["error"]["message"]


def test_definitions_of_two_forced_tools_stay_their_own(tooled: RunningServer) -> None:
    def status(*values: int, **fields: Any) -> tuple[int, str]:
        parameters = [
            {"properties": {"a": {"$ref": "#/$defs/d"}}, "$defs": {"d": {"const": value}}}
            for value in values
        ]
        tools = [
            {"type": "function", "function": {"name": f"f{number}", "parameters": part}}
            for number, part in enumerate(parameters)
        ]
        body = {"messages": USER, "tools": tools, "max_tokens": 1, **fields}
        with tooled.http() as http:
            answer = http.post("/v1/chat/completions", json=body)
        return answer.status_code, answer.text

    assert status(1, 1, tool_choice="required")[0] == status(1, 2)[0] == 200
    code, text = status(1, 2, tool_choice="required")
    assert code == 400 and "$defs/d has two meanings" in text
    shape = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
    shape["json_schema"]["schema"]["$defs"] = [1]
    assert status(1, response_format=shape)[0] in (200, 400)


@pytest.mark.parametrize("marker", ["<tool_call><function=", "<|tool_call_start|>"])
@pytest.mark.parametrize("part", [{"properties": [1]}, {"required": 5, "properties": {"a": {}}}])
def test_a_schema_that_is_none_leaves_calls_free(marker: str, part: dict[str, Any]) -> None:
    template = f"{{% if tools %}}{marker}{{% endif %}}assistant:"
    tool = {"type": "function", "function": {"name": "f", "parameters": part}}
    with running(make_engine(), chat_template=template) as server, server.http() as http:
        body = {"messages": USER, "tools": [tool], "max_tokens": 1}
        assert http.post("/v1/chat/completions", json=body).status_code == 200


def test_functions_are_tools(tooled: RunningServer) -> None:
    client = tooled.openai()
    turns: Any = [
        *USER,
        {
            "role": "assistant",
            "content": None,
            "function_call": {"name": "clock", "arguments": "{}"},
        },
        {"role": "function", "name": "clock", "content": "noon"},
    ]
    fields: Any = {"model": "tiny", "messages": turns, "temperature": 0, "max_tokens": 150}
    fields |= {"functions": [WEATHER["function"]], "function_call": {"name": "weather"}}
    whole = client.chat.completions.create(**fields).choices[0]
    assert whole.message.function_call is not None
    assert whole.message.function_call.name == "weather"
    assert whole.message.function_call.arguments == whole.message.tool_calls[0].function.arguments
    chunks = [chunk.choices[0] for chunk in client.chat.completions.create(stream=True, **fields)]
    parts = [chunk.delta.function_call for chunk in chunks if chunk.delta.function_call]
    assert "".join(part.arguments or "" for part in parts) == whole.message.function_call.arguments
    assert parts[0].name == "weather"


HARMONY_TURNS = (
    "{# functions #}{% for m in messages %}{% if m.tool_calls %}"
    "{% if m.content and m.thinking %}{{ raise_exception('not both') }}{% endif %}"
    "<|channel|>{{ m.content or m.thinking }}"
    "{% set call = m.tool_calls[0].function %}<{{ call.name }} {{ call.arguments | tojson }}>"
    "{% else %}{{ m.role }}: {{ m.content }};{% endif %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        (["b", "a"], "<clock {}>tool: A;<|channel|><weather {}>tool: B;tool: C;"),
        ([None, None], "<clock {}>tool: B;<|channel|><weather {}>tool: A;tool: C;"),
    ],
)
def test_harmonys_template_gets_every_call(
    tooled: RunningServer, ids: list[str | None], expected: str
) -> None:
    calls = [
        {"id": call_id, "type": "function", "function": {"name": name, "arguments": "{}"}}
        for call_id, name in (("a", "clock"), ("b", "weather"))
    ]
    results = [
        {"role": "tool", "content": text, "tool_call_id": call_id}
        for text, call_id in zip("BAC", [*ids, "c"], strict=True)
    ]
    turn = {"role": "assistant", "content": "I look.", "reasoning": "Hm.", "tool_calls": calls}
    text = Tokenization(tooled.engine.tokenizer, chat_template=HARMONY_TURNS)
    assert text.tool_format is HARMONY
    request = ChatRequest.model_validate({"messages": [*USER, turn, *results, *USER]})
    rendered = asyncio.run(text.render_chat(request.messages, [], {}))
    user = "user: Is it raining?;"
    assert rendered == f"{user}<|channel|>Hm.{expected}{user}"
    turn["reasoning"] = None
    request = ChatRequest.model_validate({"messages": [turn]})
    rendered = asyncio.run(text.render_chat(request.messages, [], {}))
    assert rendered == "<|channel|>I look.<clock {}><|channel|><weather {}>"


def test_fields_without_an_effect_are_named(tooled: RunningServer) -> None:
    body = {"max_tokens": 1, "verbosity": "low", "truncation": "auto", "x\ny": 1, "store": True}
    paths: Any = {
        "/v1/chat/completions": {"messages": USER},
        "/v1/responses": {"input": "hi", "max_tokens": None, "max_output_tokens": 1},
        "/v1/completions": {"prompt": "hi"},
        "/v1/messages": {"messages": USER, "model": "tiny"},
        "/api/chat": {"messages": USER, "model": "tiny", "options": {"typical_p": 0.5}},
    }
    named = {}
    with tooled.http() as http:
        for path, fields in paths.items():
            answer = http.post(path, json={**body, **fields, "stream": False})
            assert answer.status_code == 200, answer.text
            named[path] = answer.headers["x-ignored-fields"]
        plain = http.post("/v1/completions", json={"prompt": "hi", "max_tokens": 1})
        assert "x-ignored-fields" not in plain.headers
    assert named["/v1/chat/completions"] == "store, truncation, verbosity"
    assert named["/v1/responses"] == "truncation, verbosity"
    assert named["/v1/completions"] == "store, truncation, verbosity"
    assert "verbosity" in named["/v1/messages"]
    assert "options.typical_p" in named["/api/chat"]


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--chat-template", "/no/such/file"], "--chat-template /no/such/file: No such file"),
        (["--tool-call-parser", "xml"], "need one of hermes, llama3_json"),
    ],
)
def test_options_that_name_nothing(
    words: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["serve-local", "stories260K", "--port", "0", *words])
    assert ended.value.code == 2
    assert complaint in " ".join(capsys.readouterr().err.split())
