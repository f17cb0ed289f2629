"""Reasoning apart from the answer, and the effort that a request asks for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from llmopt.engine.server.protocol.chat_protocol import ChatMessage

from ...support.live_server import RunningServer, events, make_engine, running
from .test_tool_calls import USER, saying

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {% if m.reasoning_content %}({{ m.reasoning_content }}) {% endif %}"
    "{{ m.content }}\n{% endfor %}assistant:{% if begun %}<think>\n{% endif %}"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
    "{% if reasoning_effort %}[{{ reasoning_effort }}]{% endif %}"
)


@pytest.fixture(scope="module")
def thinking() -> Iterator[RunningServer]:
    with running(make_engine(), chat_template=TEMPLATE) as server:
        yield server


@pytest.mark.parametrize("begun", [False, True])
def test_reasoning_is_apart_whole_and_streamed(
    thinking: RunningServer, monkeypatch: pytest.MonkeyPatch, begun: bool
) -> None:
    saying(
        thinking, monkeypatch, ("" if begun else "<think>") + "Rain? Hm.\n</think>\n\nIt is dry."
    )
    body: Any = {
        "messages": USER,
        "max_tokens": 100,
        "temperature": 0,
        "chat_template_kwargs": {"begun": begun},
    }
    with thinking.http() as http:
        message = http.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("Rain? Hm.", "It is dry.")
    assert message["reasoning"] == "Rain? Hm."
    deltas = [e["choices"][0]["delta"] for e in events(thinking, "/v1/chat/completions", body)]
    for name in ("reasoning_content", "reasoning"):
        assert "".join(delta.get(name, "") for delta in deltas) == "Rain? Hm."
    assert "".join(delta.get("content", "") for delta in deltas) == "It is dry."


def test_reasoning_that_the_client_began_goes_on(
    thinking: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    saying(thinking, monkeypatch, " Hm.</think>It is dry.")
    begun = {"role": "assistant", "content": "<think>Rain?"}
    body: Any = {"messages": [*USER, begun], "max_tokens": 100, "temperature": 0}
    body |= {"continue_final_message": True, "add_generation_prompt": False}
    with thinking.http() as http:
        message = http.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == ("Hm.", "It is dry.")


@pytest.mark.parametrize(
    ("fields", "end"),
    [
        ({}, ""),
        ({"reasoning_effort": "low"}, "[low]"),
        ({"reasoning_effort": "none"}, "<think></think>"),
        ({"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "x"}}, "[x]"),
    ],
)
def test_the_template_gets_the_effort_and_earlier_reasoning(
    thinking: RunningServer, fields: dict[str, Any], end: str
) -> None:
    turns = [*USER, {"role": "assistant", "reasoning_content": "Hm.", "content": "No."}]
    text = f"user: Is it raining?\nassistant: (Hm.) No.\nassistant:{end}"
    expected = thinking.engine.tokenizer(text, add_special_tokens=False).input_ids
    body = {"messages": turns, "max_tokens": 1, **fields}
    with thinking.http() as http:
        usage = http.post("/v1/chat/completions", json=body).json()["usage"]
    assert usage["prompt_tokens"] == len(expected)


@pytest.mark.parametrize("other", [{}, {"reasoning_content": None}, {"reasoning_content": "Hm."}])
def test_earlier_reasoning_has_vllm_s_name_too(other: dict[str, Any]) -> None:
    reasoning = "other" if any(other.values()) else "Hm."
    turn = {"role": "assistant", "content": "No.", "reasoning": reasoning, **other}
    message = ChatMessage.model_validate(turn)
    assert message.for_template()["reasoning_content"] == "Hm."
