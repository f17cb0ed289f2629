"""Reasoning apart from the answer, and the effort that a request asks for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from llmopt.engine.server.parsing.formats import (
    GEMMA4_THINK,
    HERMES,
    THINK,
    Parsed,
    reasoning_of_template,
)
from llmopt.engine.server.parsing.parser import OutputFormat, OutputParser
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


SHAPED: dict[str, Any] = {"structured_outputs": {"choice": ["dry", "wet"]}}


@pytest.mark.parametrize(
    ("options", "first"),
    [
        ({}, "<dw"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "dw"),
        ({"reasoning_effort": "none"}, "dw"),
        ({"chat_template_kwargs": {"begun": True}}, "any"),
    ],
)
def test_a_shaped_answer_may_have_reasoning_before_it(
    thinking: RunningServer, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], first: str
) -> None:
    """Reasoning is free in vLLM and Ollama too. Without thinking the first token is the answer's."""
    masks: list[Any] = []
    add_request = thinking.engine.add_request

    def add(request_id: str, prompt: Any, params: Any, **others: Any) -> None:
        masks.append(params.token_mask)
        add_request(request_id, prompt, params, **others)

    monkeypatch.setattr(thinking.engine, "add_request", add)
    body = {"messages": USER, "max_tokens": 1, "temperature": 0, **SHAPED, **options}
    with thinking.http() as http:
        assert http.post("/v1/chat/completions", json=body).status_code == 200
    bitmask = masks[0].allowed([], []).tolist()
    tokenizer = thinking.engine.tokenizer
    allowed = {
        tokenizer.decode([i])
        for i in range(thinking.engine.vocab_size)
        if bitmask[i // 32] >> (i % 32) & 1
    }
    begins = {text.strip()[:1] for text in allowed} - {"", "\ufffd"}  # white space and its bytes
    assert begins >= {"a", "Z"} if first == "any" else begins == {*first}


def test_a_wrong_schema_of_a_thinking_model_is_named_by_its_place(thinking: RunningServer) -> None:
    body = {"messages": USER, "guided_json": {"properties": {"a": {"type": "strin"}}}}
    with thinking.http() as http:
        answer = http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400
    assert "guided_json/properties/a: Invalid type" in answer.json()["error"]["message"]


def test_gemma_4_thinks_in_a_channel() -> None:
    template = "{{ '<|channel>thought\n<channel|>' if not enable_thinking else '' }}"
    form = reasoning_of_template(template)
    assert form is GEMMA4_THINK and reasoning_of_template("<|channel|>analysis") is None
    whole = Parsed()
    parser = OutputParser(OutputFormat(reasoning=form))
    for piece in ("<|chan", "nel>thought\nA gree", "ting.\n<channel|>", "Hello!"):
        whole.add(parser.feed(piece))
    whole.add(parser.feed("", is_last=True))
    assert (whole.reasoning, whole.text) == ("A greeting.", "Hello!")


def test_a_marker_that_the_tokenizer_has_as_a_special_token_is_decoded() -> None:
    """Granite 4 has Hermes' markers so, and its calls came as text."""
    form = OutputFormat(HERMES)
    assert form.needs_special_tokens(["<s>", "<tool_call>"])
    assert not form.needs_special_tokens(["<s>"])
    assert OutputFormat(reasoning=THINK).needs_special_tokens(["</think>"])


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


FEW_EFFORTS = (
    "{% if reasoning_effort is defined and reasoning_effort not in ('xhigh', 'medium', 'low') %}"
    "{{ raise_exception('Unexpected reasoning effort') }}{% endif %}assistant:[{{ reasoning_effort }}]"
)
ANY_EFFORT = "<|channel|>analysis functions[{{ reasoning_effort }}]"


@pytest.mark.parametrize(
    ("template", "efforts"),
    [
        (
            FEW_EFFORTS,
            {"minimal": "low", "low": "low", "high": "xhigh", "xhigh": "xhigh", "none": ""},
        ),
        (ANY_EFFORT, {"none": "low", "minimal": "low", "medium": "medium", "xhigh": "high"}),
    ],
)
def test_an_effort_that_the_template_lacks_is_the_nearest(
    template: str, efforts: dict[str, str]
) -> None:
    prompts: list[str] = []
    with running(make_engine(), chat_template=template) as server, server.http() as http:
        add_request = server.engine.add_request

        def add(request_id: str, prompt: Any, *others: Any, **more: Any) -> None:
            prompts.append(server.engine.tokenizer.decode(prompt))
            add_request(request_id, prompt, *others, **more)

        server.engine.add_request = add  # type: ignore[method-assign]
        for effort in efforts:
            body = {"messages": USER, "max_tokens": 1, "reasoning_effort": effort}
            answer = http.post("/v1/chat/completions", json=body)
            is_ignored = effort == "none" and efforts[effort] == "low"
            ignored = answer.headers.get("x-ignored-fields")
            assert ignored == ("reasoning_effort" if is_ignored else None)
    assert [prompt.split("[")[-1] for prompt in prompts] == [f"{e}]" for e in efforts.values()]


@pytest.mark.parametrize("other", [{}, {"reasoning_content": None}, {"reasoning_content": "Hm."}])
def test_earlier_reasoning_has_vllm_s_name_too(other: dict[str, Any]) -> None:
    reasoning = "other" if any(other.values()) else "Hm."
    turn = {"role": "assistant", "content": "No.", "reasoning": reasoning, **other}
    message = ChatMessage.model_validate(turn)
    assert message.for_template()["reasoning_content"] == "Hm."
