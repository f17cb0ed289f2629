"""`/v1/responses` with tools and reasoning, by the official client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from llmopt.engine.server.endpoints.responses import echo_of
from llmopt.engine.server.protocol.responses_protocol import ResponsesRequest
from llmopt.engine.server.protocol.server_options import ServerOptions
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from ...support.live_server import RunningServer, make_engine, running
from .test_messages_api import TEMPLATE, num_tokens
from .test_tool_calls import JSON_ONE, saying

WEATHER: Any = {
    "type": "function",
    "name": "weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string", "maxLength": 10}}},
}
FIELDS: Any = {"model": "tiny", "temperature": 0, "max_output_tokens": 100}


@pytest.fixture(scope="module")
def served() -> Iterator[RunningServer]:
    with running(
        make_engine(), ServerOptions(api_keys=("sesame",)), chat_template=TEMPLATE
    ) as server:
        yield server


def client(server: RunningServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="sesame", max_retries=0)


def streamed(server: RunningServer, **body: Any) -> list[Any]:
    """The events of a stream, each valid by the client's own types."""
    headers = {"Authorization": "Bearer sesame"}
    with server.http(headers=headers) as http, http.stream(
        "POST", "/v1/responses", json={**FIELDS, **body, "stream": True}
    ) as stream:  # fmt: skip
        lines = [line for line in stream.iter_lines() if line.startswith("data: ")]
    payloads = [json.loads(line.removeprefix("data: ")) for line in lines]
    read = TypeAdapter(ResponseStreamEvent).validate_python
    events = [read(payload, strict=True) for payload in payloads]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    return events


@pytest.mark.parametrize("kind", ["text", "json_object", "json_schema"])
def test_a_forced_call_with_a_text_format_is_the_call(served: RunningServer, kind: str) -> None:
    """instructor's mode RESPONSES_TOOLS sends both; the format is of a text, of which there is none."""
    schema = {"name": "weather", "schema": WEATHER["parameters"]} if kind == "json_schema" else {}
    whole = client(served).responses.create(
        input="Is it raining?",
        tools=[WEATHER],
        tool_choice={"type": "function", "name": "weather"},
        text={"format": {"type": kind, **schema}},  # type: ignore[arg-type]
        **FIELDS,
    )
    assert [item.type for item in whole.output] == ["function_call"]


def test_calls_and_reasoning_are_items_of_their_own(
    served: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = f"<think>Rain? Hm.</think>I look.<tool_call>\n{JSON_ONE}\n</tool_call>"
    saying(served, monkeypatch, said)
    whole = client(served).responses.create(input="Is it raining?", tools=[WEATHER], **FIELDS)
    Response.model_validate(whole.model_dump(mode="json"), strict=True)
    assert [item.type for item in whole.output] == ["reasoning", "message", "function_call"]
    reasoning, message, call = (item.model_dump() for item in whole.output)
    assert reasoning["content"][0]["text"] == "Rain? Hm."
    assert message["content"][0]["text"] == whole.output_text == "I look."
    assert (call["name"], json.loads(call["arguments"])) == ("weather", {"city": "Köln"})

    events = streamed(served, input="Is it raining?", tools=[WEATHER])
    kinds = [event.type for event in events]
    assert kinds.count("response.output_item.added") == 3
    assert kinds.count("response.output_item.done") == 3
    assert kinds.count("response.function_call_arguments.delta") > 2
    for kind, text in (
        ("response.reasoning_text.delta", "Rain? Hm."),
        ("response.output_text.delta", "I look."),
        ("response.function_call_arguments.delta", call["arguments"]),
    ):
        assert "".join(event.delta for event in events if event.type == kind) == text
    assert events[-1].type == "response.completed"
    assert [item.type for item in events[-1].response.output] == [i.type for i in whole.output]
    assert whole.usage is not None
    details = whole.usage.output_tokens_details
    assert 0 < details.reasoning_tokens < whole.usage.output_tokens
    assert events[-1].response.usage.output_tokens_details == details


def test_logprobs_of_a_message_are_those_of_its_text(
    served: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    saying(served, monkeypatch, f"<think>Hm.</think>I look.<tool_call>{JSON_ONE}</tool_call>")
    body: Any = {"input": "Is it raining?", "tools": [WEATHER]}
    body["include"] = ["message.output_text.logprobs"]
    whole = client(served).responses.create(**body, **FIELDS)
    message: Any = whole.output[1]
    assert "".join(token.token for token in message.content[0].logprobs).strip() == "I look."
    deltas = [e for e in streamed(served, **body) if e.type == "response.output_text.delta"]
    tokens = [token.token for delta in deltas for token in delta.logprobs]
    assert tokens == [token.token for token in message.content[0].logprobs]


def test_the_answer_names_the_sampling_that_made_it() -> None:
    """A model's own defaults, where the request has none."""
    body = ResponsesRequest.model_validate({"input": "Hi", "top_p": 0.5})
    echo = json.loads(echo_of(body, {"temperature": 0.6, "top_p": 0.95}))
    assert (echo["temperature"], echo["top_p"]) == (0.6, 0.5)
    assert json.loads(echo_of(body, {}))["temperature"] == 1.0


def test_a_conversation_goes_on_with_its_items(
    served: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        saying(served, patch, f"<tool_call>{JSON_ONE}</tool_call>")
        first = client(served).responses.create(input="Is it raining?", tools=[WEATHER], **FIELDS)
    call: Any = first.output[0]
    items: Any = [
        {"role": "user", "content": "Is it raining?"},
        call.model_dump(),
        {
            "type": "function_call_output",
            "call_id": call.call_id,
            "output": [{"type": "input_text", "text": "dry"}],
        },
    ]
    second = client(served).responses.create(input=items, tools=[WEATHER], **FIELDS)
    text = (
        "Tools: weather as <tool_call>\nuser: Is it raining?\nassistant: "
        '<tool_call>{"name": "weather", "arguments": {"city": "Köln"}}</tool_call>\ntool: dry\nassistant:'
    )
    assert second.usage is not None and second.usage.input_tokens == num_tokens(served, text)


@pytest.mark.parametrize("store", [None, True, False])
def test_no_response_is_stored(served: RunningServer, store: bool | None) -> None:
    fields = {**FIELDS, "max_output_tokens": 3}
    made = client(served).responses.create(input="Hi", store=store, **fields)
    assert made.model_dump()["store"] is False
    with pytest.raises(openai.NotFoundError):
        client(served).responses.retrieve(made.id)
    with pytest.raises(openai.BadRequestError, match="responses are not stored") as refused:
        client(served).responses.create(input="Hi", previous_response_id=made.id, **fields)
    assert refused.value.param == "previous_response_id"


def test_a_named_tool_and_some_of_the_tools(served: RunningServer) -> None:
    clock: Any = {"type": "function", "name": "clock"}
    chosen: list[Any] = [
        {"type": "function", "name": "clock"},
        {
            "type": "allowed_tools",
            "mode": "required",
            "tools": [{"type": "function", "name": "clock"}],
        },
    ]
    for choice in chosen:
        answer = client(served).responses.create(
            input="Hi", tools=[WEATHER, clock], tool_choice=choice, **FIELDS
        )
        assert {getattr(item, "name", None) for item in answer.output} == {"clock"}


def test_functions_in_a_namespace(served: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    tools: Any = [{"type": "namespace", "name": "sky", "description": "x", "tools": [WEATHER]}]
    saying(served, monkeypatch, '<tool_call>{"name": "sky.weather", "arguments": {}}</tool_call>')
    answer = client(served).responses.create(input="Hi", tools=tools, **FIELDS)
    (call,) = (item.model_dump() for item in answer.output)
    assert (call["namespace"], call["name"]) == ("sky", "weather")
    again = client(served).responses.create(
        input=[call, {"type": "function_call_output", "call_id": call["call_id"], "output": "dry"}],  # type: ignore[list-item]
        tools=tools,
        **FIELDS,
    )
    text = (
        'Tools: sky.weather as <tool_call>\nassistant: <tool_call>{"name": "sky.weather", "arguments": {}}'
        "</tool_call>\ntool: dry\nassistant:"
    )
    assert again.usage is not None and again.usage.input_tokens == num_tokens(served, text)


def test_tools_of_free_text(served: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Codex' `apply_patch`: a function of one text for the model, a custom call for the client."""
    form = {"type": "grammar", "syntax": "lark", "definition": "start: /x/"}
    tools: Any = [{"type": "custom", "name": "apply_patch", "description": "Edit.", "format": form}]
    said = '<tool_call>{"name": "apply_patch", "arguments": {"input": "*** a\\n+b"}}</tool_call>'
    saying(served, monkeypatch, said)
    answer = client(served).responses.create(input="Hi", tools=tools, **FIELDS)
    (call,) = answer.output
    assert call.type == "custom_tool_call"
    assert (call.name, call.input) == ("apply_patch", "*** a\n+b")
    events = streamed(served, input="Hi", tools=tools)
    deltas = [e.delta for e in events if e.type == "response.custom_tool_call_input.delta"]
    done = [e.input for e in events if e.type == "response.custom_tool_call_input.done"]
    assert deltas == done == ["*** a\n+b"]
    again = client(served).responses.create(
        input=[
            call.model_dump(),  # type: ignore[list-item]
            {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "done"},
        ],
        tools=tools,
        **FIELDS,
    )
    text = (
        'Tools: apply_patch as <tool_call>\nassistant: <tool_call>{"name": "apply_patch", "arguments": '
        '{"input": "*** a\\n+b"}}</tool_call>\ntool: done\nassistant:'
    )
    assert again.usage is not None and again.usage.input_tokens == num_tokens(served, text)


def test_earlier_reasoning_and_what_agents_ask_for(served: RunningServer) -> None:
    """An agent's request: it asks for encrypted reasoning, and sends its items back."""
    items: Any = [
        {"role": "developer", "content": [{"type": "input_text", "text": "Be brief."}]},
        {"type": "reasoning", "id": "rs_1", "summary": [],
         "content": [{"type": "reasoning_text", "text": "Hm."}], "encrypted_content": None},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "No."}]},
    ]  # fmt: skip
    answer = client(served).responses.create(
        input=items,
        include=["reasoning.encrypted_content"],
        reasoning={"effort": "low", "summary": "auto"},
        store=False,
        parallel_tool_calls=False,
        prompt_cache_key="x",
        **FIELDS,
    )
    text = "system: Be brief.\nassistant: (Hm.) No.\nThink.</think>assistant:"
    assert answer.usage is not None and answer.usage.input_tokens == num_tokens(served, text)


def test_reasoning_of_one_turn_is_joined() -> None:
    def thought(text: str) -> Any:
        return {"type": "reasoning", "summary": [{"type": "summary_text", "text": text}]}

    call = {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"}
    message = {"type": "message", "role": "assistant", "content": "I look."}
    items = [thought("Hm."), message, thought("So."), call]
    (turn,) = ResponsesRequest.model_validate({"input": items}).turns
    assert (turn["reasoning_content"], turn["content"]) == ("Hm.\nSo.", "I look.")
    assert len(turn["tool_calls"]) == 1


def test_reasoning_comes_back_as_encrypted_content_alone(
    served: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Codex sends nothing else of a reasoning item back."""
    said = f"<think>Köln? Hm.</think><tool_call>\n{JSON_ONE}\n</tool_call>"
    saying(served, monkeypatch, said)
    body: Any = {"input": "Is it raining?", "tools": [WEATHER]}
    plain = client(served).responses.create(**body, **FIELDS).output[0]
    assert plain.type == "reasoning" and plain.encrypted_content is None
    body["include"] = ["reasoning.encrypted_content"]
    whole = client(served).responses.create(**body, **FIELDS)
    item: Any = whole.output[0]
    sent = {"type": "reasoning", "summary": [], "encrypted_content": item.encrypted_content}
    (turn,) = ResponsesRequest.model_validate({"input": [sent]}).turns
    assert turn["reasoning_content"] == "Köln? Hm."
    done = [e.item for e in streamed(served, **body) if e.type == "response.output_item.done"]
    assert done[0].encrypted_content == item.encrypted_content
    (turn,) = ResponsesRequest.model_validate(
        {"input": [{**sent, "encrypted_content": "gAAAA"}]}
    ).turns
    assert not turn["reasoning_content"]
    broken = {**sent, "encrypted_content": item.encrypted_content[:-2] + "?"}
    with pytest.raises(openai.BadRequestError, match="encrypted_content of a reasoning item"):
        client(served).responses.create(**{**body, "input": [broken]}, **FIELDS)
