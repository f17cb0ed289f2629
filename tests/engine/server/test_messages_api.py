"""`/v1/messages`, by Anthropic's own client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import anthropic
import pytest
from llmopt.engine.server.endpoints.conversation import render
from llmopt.engine.server.endpoints.messages import MessagesRequest
from llmopt.engine.server.endpoints.tokenization import Tokenization
from llmopt.engine.server.protocol.chat_protocol import ChatRequest
from llmopt.engine.server.protocol.ollama_protocol import OllamaChat
from llmopt.engine.server.protocol.server_options import ServerOptions
from llmopt.quant.source.load_processor import load_tokenizer
from llmopt.recipes import MODELS
from pydantic import ValidationError

from ...support.live_server import RunningServer, make_engine, running
from .test_tool_calls import JSON_ONE, saying

TEMPLATE = (
    "{% if tools %}Tools: {% for tool in tools %}{{ tool.function.name }} {% endfor %}as <tool_call>\n{% endif %}"
    "{% for m in messages %}{{ m.role }}: {% if m.reasoning_content %}({{ m.reasoning_content }}) {% endif %}"
    "{{ m.content }}{% for call in m.tool_calls %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "{{ '\\n' }}{% endfor %}{% if enable_thinking %}Think.</think>{% endif %}assistant:"
)
WEATHER: Any = {
    "name": "weather",
    "description": "How it is outside",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string", "maxLength": 10}}},
}
USER: Any = [{"role": "user", "content": "Is it raining?"}]
FIELDS: Any = {"model": "tiny", "max_tokens": 100, "extra_body": {"temperature": 0}}


@pytest.fixture(scope="module")
def served() -> Iterator[RunningServer]:
    options = ServerOptions(api_keys=("sesame",))
    with running(make_engine(), options, chat_template=TEMPLATE) as server:
        yield server


def client(server: RunningServer, key: str = "sesame") -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.url, api_key=key, max_retries=0)


def num_tokens(server: RunningServer, text: str) -> int:
    return len(server.engine.tokenizer(text, add_special_tokens=False).input_ids)


def contents(message: Any) -> list[tuple[str, str]]:
    return [(b.type, b.thinking if b.type == "thinking" else b.text) for b in message.content]


def test_a_message_has_a_number_of_parts(server: RunningServer) -> None:
    message = {"role": "user", "content": [{"type": "text", "text": ""}] * 5000}
    with server.http() as http:
        refused = http.post("/v1/messages/count_tokens", json={"messages": [message]})
    assert refused.status_code == 400 and "at most 4096" in refused.text


def test_a_text_whole_and_streamed(served: RunningServer) -> None:
    asked: Any = {**FIELDS, "messages": USER, "system": "Be brief.", "max_tokens": 12}
    whole = client(served).messages.create(**asked)
    assert whole.id.startswith("msg_") and whole.type == "message" and whole.role == "assistant"
    assert [block.type for block in whole.content] == ["text"]
    assert whole.stop_reason == "max_tokens" and whole.usage.output_tokens == 12
    prompt = num_tokens(served, "system: Be brief.\nuser: Is it raining?\nassistant:")
    again = client(served).messages.create(**asked)
    assert (again.usage.cache_read_input_tokens or 0) > 0
    assert again.usage.input_tokens + (again.usage.cache_read_input_tokens or 0) == prompt
    with client(served).messages.stream(**asked) as stream:
        text = "".join(stream.text_stream)
        last = stream.get_final_message()
    assert text == whole.content[0].text  # type: ignore[union-attr]
    assert contents(last) == contents(whole) and last.stop_reason == whole.stop_reason
    assert last.usage.output_tokens == 12


def test_claude_codes_billing_header_is_no_prompt(served: RunningServer) -> None:
    def system(billing: str) -> Any:
        first = f"x-anthropic-billing-header: cc_version=2.1.177; cc_entrypoint=cli; cch={billing};"
        texts = [first, "Be brief. " * 20]
        return [{"type": "text", "text": text} for text in texts if billing or text is not first]

    asked: Any = {"model": "tiny", "messages": USER}
    count = client(served).messages.count_tokens
    plain = count(system=system(""), **asked).input_tokens
    assert count(system=system("36ee5"), **asked).input_tokens == plain
    assert count(system=system("36ee5")[:1], **asked) == count(**asked)
    client(served).messages.create(system=system("36ee5"), **asked, max_tokens=1)
    usage = client(served).messages.create(system=system("0aaa9"), **asked, max_tokens=1).usage
    assert (usage.cache_read_input_tokens or 0) > plain // 2


def test_stop_sequences_are_named(served: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    saying(served, monkeypatch, "It is dry. END and more")
    answer = client(served).messages.create(messages=USER, stop_sequences=["END"], **FIELDS)
    assert answer.stop_reason == "stop_sequence" and answer.stop_sequence == "END"
    assert answer.content[0].text == "It is dry. "  # type: ignore[union-attr]


def test_tools_whole_and_streamed(served: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    saying(served, monkeypatch, f"I look.\n<tool_call>\n{JSON_ONE}\n</tool_call>")
    asked: Any = {**FIELDS, "messages": USER, "tools": [WEATHER]}
    whole = client(served).messages.create(**asked)
    assert whole.stop_reason == "tool_use"
    assert [block.type for block in whole.content] == ["text", "tool_use"]
    call: Any = whole.content[1]
    assert (call.name, call.input) == ("weather", {"city": "Köln"})
    with client(served).messages.stream(**asked) as stream:
        kinds = [event.type for event in stream]
        last = stream.get_final_message()
    assert [(b.type, getattr(b, "input", None)) for b in last.content] == [
        ("text", None),
        ("tool_use", {"city": "Köln"}),
    ]
    assert last.stop_reason == "tool_use" and kinds.count("input_json") > 2
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 2
    assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")


def test_a_tool_that_must_be_used_is(served: RunningServer) -> None:
    choices: list[Any] = [{"type": "any"}, {"type": "tool", "name": "weather"}]
    for choice in choices:
        answer = client(served).messages.create(
            messages=USER, tools=[WEATHER], tool_choice=choice, **FIELDS
        )
        assert {b.type for b in answer.content} == {"tool_use"}
        assert answer.stop_reason in ("tool_use", "max_tokens")


def test_an_answer_by_schema(served: RunningServer) -> None:
    schema = {
        "type": "object",
        "properties": {"dry": {"type": "boolean"}},
        "required": ["dry"],
        "additionalProperties": False,
    }
    config: Any = {"format": {"type": "json_schema", "schema": schema}}
    answer = client(served).messages.create(messages=USER, output_config=config, **FIELDS)
    assert set(json.loads(answer.content[0].text)) == {"dry"}  # type: ignore[union-attr]


def test_thinking_is_shown_where_it_is_asked_for(
    served: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    saying(served, monkeypatch, "<think>Rain? Hm.</think>It is dry.")
    thinking: Any = {"type": "enabled", "budget_tokens": 1024}
    whole = client(served).messages.create(messages=USER, thinking=thinking, **FIELDS)
    assert [b.type for b in whole.content] == ["thinking", "text"]
    with client(served).messages.stream(messages=USER, thinking=thinking, **FIELDS) as stream:
        last = stream.get_final_message()
    assert contents(last) == contents(whole) == [("thinking", "Rain? Hm."), ("text", "It is dry.")]
    plain = client(served).messages.create(messages=USER, **FIELDS)
    assert [b.type for b in plain.content] == ["text"]


def test_the_template_gets_the_whole_conversation(served: RunningServer) -> None:
    cached = {"cache_control": {"type": "ephemeral"}}
    turns: Any = [
        {"role": "user", "content": [{"type": "text", "text": "Is it raining?", **cached}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": "x"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "a", "name": "weather", "input": {"city": "Köln"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "a",
                    "content": [{"type": "text", "text": "dry"}],
                },
                {"type": "tool_result", "tool_use_id": "b", "content": "gone", "is_error": True},
                {"type": "text", "text": "And now?"},
            ],
        },
    ]
    text = (
        "Tools: weather as <tool_call>\nsystem: Be brief.\nuser: Is it raining?\nassistant: (Hm.) I look."
        '<tool_call>{"name": "weather", "arguments": {"city": "Köln"}}</tool_call>\n'
        "tool: dry\ntool: Error: gone\nuser: And now?\nThink.</think>assistant:"
    )
    asked: Any = {
        "model": "tiny",
        "messages": turns,
        "system": [{"type": "text", "text": "Be brief.", **cached}],
        "tools": [WEATHER],
        "thinking": {"type": "adaptive"},
    }
    counted = client(served).messages.count_tokens(**asked)
    assert counted.input_tokens == num_tokens(served, text)
    usage = client(served).messages.create(**asked, max_tokens=1).usage
    assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == counted.input_tokens


@pytest.mark.parametrize(
    ("content", "continues"),
    [
        ("It is", True),
        ([{"type": "text", "text": "It is"}], True),
        ([{"type": "tool_use", "id": "a", "name": "f", "input": {}}], False),
    ],
)
def test_a_last_turn_of_the_assistant_is_continued(content: Any, continues: bool) -> None:
    """Anthropic's prefill, which a client relies on: https://github.com/BerriAI/litellm/issues/28580."""
    turns = [*USER, {"role": "assistant", "content": content}]
    body = {"messages": turns, "max_tokens": 9}
    chat = MessagesRequest.model_validate(body).chat_request(takes_images=False)
    assert ends_as(chat, continues=continues)


def ends_as(chat: ChatRequest, *, continues: bool) -> bool:
    """True if the prompt continues the last turn, or begins another."""
    text = Tokenization(load_tokenizer(MODELS / "stories260K"), chat_template=TEMPLATE)
    service: Any = SimpleNamespace(text=text)
    prompt = asyncio.run(render(service, chat.messages, (), chat.template_options))
    shown = text.decode(prompt.token_ids)
    assert shown.startswith("user: Is it raining?\nassistant: ")
    return shown.endswith("assistant: It is" if continues else "\nassistant:")


def test_a_turn_with_its_reasoning_begins_another() -> None:
    """Templates cut reasoning out of earlier turns, so that there is no end of it to continue."""
    turns = [*USER, {"role": "assistant", "content": "<think>Hm.</think>It is"}]
    ollama = OllamaChat.model_validate({"model": "m", "messages": turns}).chat_request(64)
    assert not ollama.continue_final_message


def test_ollama_and_vllm_continue_a_last_turn_too() -> None:
    """https://github.com/ollama/ollama/issues/6778, and vLLM's `continue_final_message`."""
    turns = [*USER, {"role": "assistant", "content": "It is"}]
    ollama = OllamaChat.model_validate({"model": "m", "messages": turns})
    assert ends_as(ollama.chat_request(64), continues=True)
    going_on = {"continue_final_message": True, "add_generation_prompt": False}
    assert ends_as(ChatRequest.model_validate({"messages": turns, **going_on}), continues=True)
    assert ends_as(ChatRequest.model_validate({"messages": turns}), continues=False)
    with pytest.raises(ValidationError, match="needs add_generation_prompt = false"):
        ChatRequest.model_validate({"messages": turns, "continue_final_message": True})


def test_what_a_text_model_cannot_read_is_said_in_its_place(served: RunningServer) -> None:
    """An image, a PDF, a text file, and a search of the vendor's, as Claude Code sends them."""
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "x"}}
    pdf = {"type": "document", "title": "a.pdf", "source": {
        "type": "base64", "media_type": "application/pdf", "data": "x"}}  # fmt: skip
    note = {"type": "document", "source": {
        "type": "text", "media_type": "text/plain", "data": "Buy milk."}}  # fmt: skip
    found = {"type": "web_search_result", "title": "Rain", "url": "https://r.example"}
    turns: Any = [
        {"role": "user", "content": [image, note, {"type": "text", "text": "What?"}]},
        {"role": "assistant", "content": [
            {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "rain"}},
            {"type": "web_search_tool_result", "tool_use_id": "s", "content": [found]},
            {"type": "tool_use", "id": "1", "name": "weather", "input": {}},
        ]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "1", "content": [image, pdf]}]},
    ]  # fmt: skip
    body = MessagesRequest(model="tiny", max_tokens=1, messages=turns)
    texts = [message.content or "" for message in body.chat_request(takes_images=False).messages]
    assert texts[0].startswith("[an image, which this model cannot see: it reads text alone]")
    assert "[text/plain]\nBuy milk." in texts[0] and texts[0].endswith("What?")
    assert "[server_tool_use web_search, which" in texts[1]
    assert "Rain https://r.example" in texts[1]
    assert (
        "cannot see" in texts[2]
        and "[application/pdf a.pdf, which this server cannot read]" in texts[2]
    )
    asked: Any = {**FIELDS, "messages": turns, "tools": [WEATHER]}
    assert client(served).messages.create(**asked).usage.output_tokens
    seen = body.chat_request(takes_images=True).messages
    assert [len(message.image_urls) for message in seen] == [1, 0, 0, 1]


def test_refusals_are_anthropics(served: RunningServer) -> None:
    for kind, words, fields in (
        (anthropic.BadRequestError, "'video' are not supported", {"messages": [{"role": "user", "content": [{"type": "video"}]}]}),
        (anthropic.BadRequestError, "input_schema", {"tools": [{"type": "custom", "name": "w"}]}),
        (anthropic.BadRequestError, "none of the tools", {
            "tools": [WEATHER], "tool_choice": {"type": "tool", "name": "other"}}),
        (anthropic.BadRequestError, "mcp_servers", {"extra_body": {"mcp_servers": [{}]}}),
        (anthropic.NotFoundError, "no model", {"model": "other"}),
    ):  # fmt: skip
        asked: Any = {**FIELDS, "messages": USER, **fields}
        with pytest.raises(kind, match=words) as refused:
            client(served).messages.create(**asked)
        assert refused.value.body["type"] == "error"  # type: ignore[index]
    with pytest.raises(anthropic.AuthenticationError) as unknown:
        client(served, "other").messages.create(messages=USER, **FIELDS)
    assert unknown.value.body["error"]["type"] == "authentication_error"  # type: ignore[index]
    with served.http(headers={"x-api-key": "sesame"}) as http:
        missing = http.post("/v1/messages", json={"messages": USER})
    assert missing.status_code == 400 and missing.json()["error"]["type"] == "invalid_request_error"


def test_a_failure_on_the_way_is_an_event(
    served: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    execute, steps = served.engine.runner.execute, iter(range(100))

    def fails(*arguments: Any) -> Any:
        if next(steps) == 3:
            raise RuntimeError("out of luck")
        return execute(*arguments)

    monkeypatch.setattr(served.engine.runner, "execute", fails)
    with (
        pytest.raises(anthropic.APIStatusError, match="step"),
        client(served).messages.stream(messages=USER, **FIELDS) as stream,
    ):
        stream.get_final_message()
