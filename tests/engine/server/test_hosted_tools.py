"""Hosted tools among a client's own: the request goes on without them."""

from __future__ import annotations

import logging
from collections.abc import Container, Iterator
from typing import Any, get_args, get_type_hints

import anthropic.types
import openai.types.responses
import pytest
from llmopt.engine.server.endpoints.messages import MessagesPrompt
from llmopt.engine.server.protocol import generation_protocol
from llmopt.engine.server.protocol.responses_protocol import ResponsesRequest

from ...support.live_server import RunningServer, make_engine, running
from .test_messages_api import TEMPLATE, num_tokens
from .test_tool_calls import JSON_ONE, saying

PARAMETERS: Any = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 10}}}
WEATHER = {"type": "function", "name": "weather", "parameters": PARAMETERS}
ASKED = "user: Is it raining?\nassistant:"


@pytest.fixture(scope="module")
def served() -> Iterator[RunningServer]:
    with running(make_engine(), chat_template=TEMPLATE) as server:
        yield server


@pytest.fixture(autouse=True)
def unlogged() -> None:
    """Each test sees the first line of a type."""
    generation_protocol._log_skipped.cache_clear()


def posted(server: RunningServer, path: str, **body: Any) -> Any:
    with server.http() as http:
        answer = http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def kinds_of(union: Any, own: Container[str]) -> list[str]:
    """The types of the tools of an official client, but for the client's own."""
    kinds: set[Any] = set()
    for tool in get_args(union):
        kind = get_type_hints(tool)["type"]
        kinds.update(inner for outer in (kind, *get_args(kind)) for inner in get_args(outer))
    return sorted(kind for kind in kinds if isinstance(kind, str) and kind not in own)


def test_every_hosted_tool_of_the_official_clients_is_left_out() -> None:
    own = {"function", "namespace", "custom"}
    openai_kinds = kinds_of(openai.types.responses.ToolParam, own)
    assert {"web_search", "file_search", "code_interpreter", "mcp"} <= set(openai_kinds)
    hosted: list[Any] = [{"type": kind, "server_label": "x"} for kind in openai_kinds]
    body = ResponsesRequest.model_validate({"input": "Hi", "tools": [*hosted, WEATHER]})
    assert [tool.name for tool in body.functions] == ["weather"]

    anthropic_kinds = kinds_of(anthropic.types.ToolUnionParam, own)
    assert "web_search_20250305" in anthropic_kinds
    hosted = [{"type": kind, "name": "x"} for kind in anthropic_kinds]
    mine = {"name": "weather", "input_schema": PARAMETERS}
    message = {"role": "user", "content": "Hi"}
    prompt = MessagesPrompt.model_validate({"messages": [message], "tools": [mine, *hosted]})
    assert [tool.name for tool in prompt.tools or ()] == ["weather"]


def test_codex_default_request(
    served: RunningServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Codex CLI 0.169.0 without a setting for web search, its texts shortened."""

    def function(name: str, **properties: Any) -> dict[str, Any]:
        schema = {
            "type": "object",
            "properties": properties,
            "required": [*properties],
            "additionalProperties": False,
        }
        return {
            "type": "function",
            "name": name,
            "description": name,
            "strict": False,
            "parameters": schema,
        }

    def message(role: str, text: str) -> dict[str, Any]:
        content = [{"type": "input_text", "text": text}]
        return {"type": "message", "id": f"msg_{text}", "role": role, "content": content}

    agents = [function("close_agent", target={"type": "string"})]
    body: dict[str, Any] = {
        "model": "tiny",
        "input": [message("developer", "Be brief."), message("user", "Is it raining?")],
        "tools": [
            function("weather", city={"type": "string"}),
            {"type": "namespace", "name": "multi_agent_v1", "description": "x", "tools": agents},
            function("get_goal"),
            {"type": "web_search", "external_web_access": True},
        ],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"summary": "auto"},
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "01a209e1-6617-7202-84c8-96fd0e7d10a5",
        "client_metadata": {"x-codex-installation-id": "0"},
    }
    saying(served, monkeypatch, f"<tool_call>{JSON_ONE}</tool_call>")
    with caplog.at_level(logging.WARNING):
        answers = [posted(served, "/v1/responses", **body) for _ in range(2)]
    for answer in answers:
        assert [item["name"] for item in answer["output"]] == ["weather"]
        assert [tool["type"] for tool in answer["tools"]] == ["function", "namespace", "function"]
    text = "Tools: weather multi_agent_v1.close_agent get_goal as <tool_call>\nsystem: Be brief.\n"
    assert answers[0]["usage"]["input_tokens"] == num_tokens(served, text + ASKED)
    assert [line for line in caplog.messages if "hosted" in line] == [
        "tools of type 'web_search' are hosted by their vendor: requests go on without them"
    ]
    body["stream"] = True
    with served.http() as http:
        assert "event: response.completed" in http.post("/v1/responses", json=body).text


def test_hosted_tools_alone_leave_a_plain_request(served: RunningServer) -> None:
    bare = num_tokens(served, ASKED)
    message = {"role": "user", "content": "Is it raining?"}
    response = posted(
        served,
        "/v1/responses",
        input="Is it raining?",
        tools=[{"type": "web_search"}],
        max_output_tokens=2,
    )
    assert response["usage"]["input_tokens"] == bare and response["tools"] == []
    for path in ("/v1/messages", "/v1/chat/completions"):
        tools = [{"type": "web_search_20250305", "name": "web_search", "max_uses": 5}]
        answer = posted(served, path, messages=[message], tools=tools, max_tokens=2)
        usage = answer["usage"]
        cached = usage.get("cache_read_input_tokens", 0)
        assert usage.get("prompt_tokens", usage.get("input_tokens", 0) + cached) == bare


@pytest.mark.parametrize(
    ("path", "choice", "complaint"),
    [
        ("/v1/responses", {"type": "file_search"}, "tool_choice: 'file_search' is hosted"),
        ("/v1/responses", "required", "there are no tools (hosted ones are left out)"),
        (
            "/v1/messages",
            {"type": "tool", "name": "web_search"},
            "names 'web_search', which is none of the tools (hosted ones are left out)",
        ),
        ("/v1/messages", {"type": "any"}, "there are no tools (hosted ones are left out)"),
    ],
)
def test_a_choice_of_a_hosted_tool_is_refused_by_name(
    served: RunningServer, path: str, choice: Any, complaint: str
) -> None:
    body: dict[str, Any] = {"max_tokens": 2, "messages": [{"role": "user", "content": "Hi"}]}
    if path == "/v1/responses":
        body = {"input": "Hi"}
    tools: list[Any] = [
        {"type": "web_search_20250305", "name": "web_search"},
        {"type": "file_search"},
    ]
    if "names" in complaint:
        tools.append({"name": "weather", "input_schema": PARAMETERS})
    with served.http() as http:
        refused = http.post(path, json={**body, "tools": tools, "tool_choice": choice})
    assert refused.status_code == 400 and complaint in refused.json()["error"]["message"]


def test_allowed_tools_go_on_without_hosted_ones(served: RunningServer) -> None:
    clock = {"type": "function", "name": "clock", "parameters": PARAMETERS}
    hosted = {"type": "image_generation"}
    choice = {"type": "allowed_tools", "mode": "required"}
    named = {"type": "function", "name": "clock"}
    answer = posted(
        served,
        "/v1/responses",
        input="Hi",
        tools=[WEATHER, clock, hosted],
        tool_choice={**choice, "tools": [hosted, named]},
        max_output_tokens=100,
    )
    assert {item["name"] for item in answer["output"]} == {"clock"}
    function = {"type": "function", "function": {"name": "clock", "parameters": PARAMETERS}}
    allowed = {"mode": "required", "tools": [hosted, {"function": {"name": "clock"}}]}
    answer = posted(
        served,
        "/v1/chat/completions",
        messages=[{"role": "user", "content": "Hi"}],
        tools=[function, hosted],
        tool_choice={"type": "allowed_tools", "allowed_tools": allowed},
        max_tokens=100,
    )
    calls = answer["choices"][0]["message"]["tool_calls"]
    assert {call["function"]["name"] for call in calls} == {"clock"}
