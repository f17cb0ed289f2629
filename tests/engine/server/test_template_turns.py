"""Turns as chat templates read them: arguments of calls as text or objects, one call a turn, system messages."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from llmopt.base.errors import BadInput
from llmopt.engine import LLM, SamplingParams
from llmopt.engine.server.endpoints.tokenization import Tokenization
from llmopt.engine.server.protocol.chat_protocol import ChatRequest
from llmopt.quant.source.load_processor import load_tokenizer
from llmopt.recipes import MODELS

from ...support.live_server import make_engine, running

OPENING = "{% for m in messages %}{% if m.role == 'assistant' and m.tool_calls %}"
CALLS = "{% for c in m.tool_calls %}<{{ c.function.name }}>"
ENDING = "{% endfor %}{% else %}[{{ m.role }}]{{ m.content }}{% endif %}{% endfor %}"
OBJECTS = OPENING + CALLS + "{{ c.function.arguments | tojson }}" + ENDING
# DeepSeek V3.1 adds the arguments to a text.
TEXTS = OPENING + CALLS.replace(
    "<{{ c.function.name }}>", "{{ '<' + c.function.name + '>' + c.function.arguments }}"
)
TEXTS += ENDING
PRINTED = OPENING + CALLS + "{{ c.function.arguments }}" + ENDING
# Llama 3.1's.
SINGLE = (
    OPENING + "{% if m.tool_calls | length > 1 %}"
    "{{ raise_exception('This model only supports single tool-calls at once!') }}{% endif %}"
    + CALLS
    + "{{ c.function.arguments | tojson }}"
    + ENDING
)
FIRST_SYSTEM = (
    "{% if messages[0].role == 'system' %}[system]{{ messages[0].content }}{% endif %}"
    "{% for m in messages if m.role != 'system' %}[{{ m.role }}]{{ m.content }}{% endfor %}"
)


def calls(*arguments: str) -> list[dict[str, Any]]:
    functions = [{"name": "f", "arguments": text} for text in arguments]
    made = [{"id": "a", "type": "function", "function": function} for function in functions]
    user = {"role": "user", "content": "Hi"}
    return [user, {"role": "assistant", "content": None, "tool_calls": made}, user]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(MODELS / "stories260K", dtype="float32", num_threads=1)


def prompts(llm: LLM, template: str, messages: list[dict[str, Any]]) -> tuple[str, str]:
    """The prompt of the chat endpoint, and of `LLM.chat`."""
    request = ChatRequest.model_validate({"messages": messages})
    tokenizer = load_tokenizer(MODELS / "stories260K")
    text = asyncio.run(
        Tokenization(tokenizer, chat_template=template).render_chat(request.messages, [], {})
    )
    how: Any = {"chat_template": template}
    (answer,) = llm.chat(messages, SamplingParams(temperature=0, max_tokens=1), **how)
    return text, llm.engine.tokenizer.decode(answer.prompt_token_ids)


@pytest.mark.parametrize("template", [OBJECTS, TEXTS, PRINTED])
def test_arguments_are_what_the_template_writes_as_json(llm: LLM, template: str) -> None:
    expected = '[user]Hi<f>{"city": "Köln"}<f>{}[user]Hi'
    served, offline = prompts(llm, template, calls('{"city": "Köln"}', "{}"))
    assert served == expected and offline.strip() == expected


def test_a_template_of_harmony_gets_every_call_of_a_turn(llm: LLM) -> None:
    """gpt-oss reads the first call of a turn."""
    one_call = OPENING + "{% set c = m.tool_calls[0] %}<|channel|><{{ c.function.name }}>"
    one_call += "{{ c.function.arguments | tojson }}" + ENDING.removeprefix("{% endfor %}")
    served, offline = prompts(llm, one_call, calls('{"city": "K"}', "{}"))
    assert served == '[user]Hi<|channel|><f>{"city": "K"}<|channel|><f>{}[user]Hi'
    assert offline.strip() == served


def test_several_calls_that_a_template_refuses_are_named_by_one_line(llm: LLM) -> None:
    complaint = "template refuses them: This model only supports single tool-calls at once!"
    with pytest.raises(BadInput, match=complaint):
        prompts(llm, SINGLE, calls("{}", "{}"))
    assert prompts(llm, SINGLE, calls("{}"))[0] == "[user]Hi<f>{}[user]Hi"
    with running(make_engine(), chat_template=SINGLE) as server, server.http() as http:
        body = {"messages": calls("{}", "{}"), "max_tokens": 1}
        answer = http.post("/v1/chat/completions", json=body)
        assert answer.status_code == 400
        error = answer.json()["error"]["message"]
        assert complaint in error and "\n" not in error


@pytest.mark.parametrize("order", [("user", "system"), ("system", "user", "system", "user")])
def test_later_system_messages_are_the_users(llm: LLM, order: tuple[str, ...]) -> None:
    messages = [{"role": role, "content": f"m{number}"} for number, role in enumerate(order)]
    served, offline = prompts(llm, FIRST_SYSTEM, messages)
    assert "m1" in served and offline.strip() == served
