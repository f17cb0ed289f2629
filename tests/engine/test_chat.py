"""`LLM.chat`: the prompt that the server makes of the same messages, with and without images."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from llmopt.base.errors import BadInput
from llmopt.base.progress import ProgressUpdate
from llmopt.engine import LLM, SamplingParams
from llmopt.engine.base.chat_template import render_chat
from llmopt.engine.base.turns import TurnReader
from llmopt.engine.server.endpoints.tokenization import Tokenization
from llmopt.engine.server.protocol.chat_protocol import ChatRequest, FunctionCall, ToolCall

from ..support.image_models import IMAGE_FAMILIES, picture, save_image_model

GREEDY = SamplingParams(temperature=0, max_tokens=8)
MESSAGES = [
    {"role": "developer", "content": "Tell stories."},
    {"role": "user", "content": "Who was Lily?"},
]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    "{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}{{ mood }}"
)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("stories3M", dtype="float32", num_threads=1)


def served(llm: LLM, **body: Any) -> list[int]:
    """The prompt of the chat endpoint."""
    request = ChatRequest.model_validate(body)
    text = Tokenization(llm.engine.tokenizer)
    return asyncio.run(text.encode_chat(request.messages, (), request.template_options))


@pytest.mark.parametrize("template", [None, TEMPLATE])
def test_the_prompt_is_the_servers(llm: LLM, monkeypatch, template: str | None) -> None:
    monkeypatch.setattr(llm.engine.tokenizer, "chat_template", template)
    (answer,) = llm.chat(MESSAGES, GREEDY)
    assert answer.prompt_token_ids == served(llm, messages=MESSAGES)
    assert answer.prompt_token_ids.count(llm.engine.tokenizer.bos_token_id) == 1
    assert answer.text == llm.generate(answer.prompt_token_ids, GREEDY)[0].text


def test_several_conversations_and_parts(llm: LLM) -> None:
    parts = [{"type": "text", "text": "Who was"}, {"type": "text", "text": "Lily?"}]
    other = [MESSAGES[0], {"role": "user", "content": parts}]
    seen: list[ProgressUpdate] = []
    answers = llm.chat([MESSAGES, other], GREEDY, progress=seen.append)
    assert answers[0].prompt_token_ids == served(llm, messages=MESSAGES)
    assert answers[1].prompt_token_ids == served(llm, messages=other)
    assert [(one.done, one.total) for one in seen] == [(0, 2), (1, 2), (2, 2)]


def test_a_template_and_its_variables_are_given(llm: LLM) -> None:
    options = {"mood": "!", "add_generation_prompt": False}
    (answer,) = llm.chat(MESSAGES, GREEDY, chat_template=TEMPLATE, chat_template_kwargs=options)
    text = llm.engine.tokenizer.decode(answer.prompt_token_ids, skip_special_tokens=True)
    assert text.replace(" ", "") == "[system]Tellstories.[user]WhowasLily?!"


@pytest.mark.parametrize(
    ("message", "complaint"),
    [
        ({"role": "tool", "content": "x"}, "template refuses them: no tools here"),
        ({"role": "user", "content": [{"type": "audio"}]}, "a part of type 'audio': give text"),
        ({"role": "user", "content": [{"type": "text"}]}, "a part of type 'text': give text"),
        ({"role": "user", "content": 5}, "content 5: give a text, or a list of parts"),
        ({"content": "x"}, "has no role"),
    ],
)
def test_what_cannot_be_said_is_refused(llm: LLM, message: Any, complaint: str) -> None:
    with pytest.raises(BadInput, match=complaint):
        llm.chat([message], GREEDY, chat_template=TEMPLATE)
    assert not llm.engine.has_unfinished()


def test_images_are_parts(tmp_path: Path) -> None:
    save_image_model(tmp_path, IMAGE_FAMILIES["llava-1.5"])
    llm = LLM(
        tmp_path, dtype="float32", device="cpu", num_threads=1, num_blocks=200, max_model_len=200
    )
    llm.engine.tokenizer.chat_template = (
        "{{ bos_token }}{% for m in messages %}{% for p in m.content %}"
        "{{ '<image>' if p.type == 'image' else p.text }}{% endfor %}{% endfor %}"
    )
    image = picture(1)
    image.save(tmp_path / "a.png")
    said = {"type": "text", "text": "Once upon a time"}
    ways = (
        {"type": "image", "image": image},
        {"type": "image_url", "image_url": {"url": str(tmp_path / "a.png")}},
    )
    talks = [[{"role": "user", "content": [way, said]}] for way in ways]
    first, second = llm.chat(talks, GREEDY)
    assert first.prompt_token_ids == second.prompt_token_ids
    assert first.token_ids == second.token_ids
    prompt = {"prompt": "<image>Once upon a time", "images": [image]}
    assert first.token_ids == llm.generate([prompt], GREEDY)[0].token_ids
    # A text alone is a list of parts too, where the template reads nothing else.
    (answer,) = llm.chat([{"role": "user", "content": "Once"}], GREEDY)
    assert "Once" in llm.engine.tokenizer.decode(answer.prompt_token_ids)


def test_calls_may_be_objects_of_the_openai_library(llm: LLM) -> None:
    """The template gets what is no call, and refuses it."""
    call = ToolCall(id="c", function=FunctionCall(name="look", arguments='{"at": 1}'))
    template = "{% for m in messages %}{{ m.tool_calls[0].function.arguments.at }}{% endfor %}"
    reader = TurnReader(llm.engine.tokenizer, template)
    turn: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": [call]}
    assert render_chat(llm.engine.tokenizer, reader.read([turn]), template=template) == "1"
    for calls in ({"a": 1}, ["x"], "x"):
        assert reader.read([{**turn, "tool_calls": calls}]) == [{**turn, "tool_calls": calls}]
