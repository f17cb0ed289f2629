"""Check a server with the official Python client: `python openai_python.py URL MODEL`."""

from __future__ import annotations

import json
from typing import Any, Literal

import httpx
import openai
from checks import ANSWER, ASK, CITY, MODEL, QUESTION, RESULT, URL, WEATHER, extra_fields, tell
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

USER: Any = [{"role": "user", "content": QUESTION}]
OURS = {
    "choices.stop_reason",  # vLLM's
    "choices.message.reasoning_content",
    "max_model_len",
    "response.store",  # OpenAI's servers send it, and its types do not have it
    "store",
    "response.usage.seconds",
    "usage.seconds",
}
"""Fields that the server adds to OpenAI's, as vLLM and others do."""


class Animal(BaseModel):
    """What the model is asked to fill in."""

    kind: Literal["cat", "dog"]
    legs: Literal[3, 4]


def round_trips(client: openai.OpenAI) -> None:
    """A tool that the model chooses, its result, and the answer: by chat, streamed, and by responses."""
    asked: Any = {"model": MODEL, "temperature": 0, "max_tokens": 60, "tools": [WEATHER]}
    turns: list[Any] = [{"role": "user", "content": ASK}]
    with client.chat.completions.stream(messages=turns, **asked) as stream:
        message = stream.get_final_completion().choices[0].message
    (call,) = message.tool_calls or []
    assert json.loads(call.function.arguments) == {"city": CITY}
    turns.append(message.model_dump(exclude_none=True, exclude={"parsed"}))
    turns.append({"role": "tool", "tool_call_id": call.id, "content": RESULT})
    answer = client.chat.completions.create(messages=turns, **asked)
    assert answer.choices[0].message.content == ANSWER
    tell("chat, a tool's round trip", called=call.function.arguments, answer=ANSWER)

    tool: Any = {"type": "function", **WEATHER["function"], "strict": True}
    asked = {"model": MODEL, "temperature": 0, "max_output_tokens": 60, "tools": [tool]}
    first = client.responses.create(input=ASK, **asked)
    (item,) = [item for item in first.output if item.type == "function_call"]
    result: Any = {"type": "function_call_output", "call_id": item.call_id, "output": RESULT}
    second = client.responses.create(input=[result], previous_response_id=first.id, **asked)
    assert second.output_text == ANSWER
    tell("responses, a tool's round trip", called=item.arguments, answer=second.output_text)


def main() -> None:
    client = openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
    raw = httpx.Client(base_url=URL, trust_env=False, timeout=60)
    common: Any = {"model": MODEL, "temperature": 0}

    assert MODEL in [model.id for model in client.models.list()]
    Model.model_validate(raw.get(f"/v1/models/{MODEL}").json(), strict=True)
    tell("models")

    whole = client.completions.create(prompt="Once upon a time", max_tokens=12, **common)
    parts = client.completions.create(
        prompt="Once upon a time", max_tokens=12, stream=True, **common
    )
    text = "".join(part.choices[0].text for part in parts)
    assert text == whole.choices[0].text
    tell("completions, whole and streamed", text=text)

    chat = client.chat.completions.create(messages=USER, max_tokens=12, **common)
    chunks = list(
        client.chat.completions.create(
            messages=USER,
            max_tokens=12,
            stream=True,
            stream_options={"include_usage": True},
            **common,
        )
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1])
    assert text == chat.choices[0].message.content and chunks[-1].usage is not None
    tell("chat, whole and streamed", text=text, usage=chunks[-1].usage.model_dump())

    parsed = client.chat.completions.parse(
        messages=USER, response_format=Animal, max_tokens=60, **common
    )
    assert isinstance(parsed.choices[0].message.parsed, Animal)
    tell("chat, parsed into a class", got=parsed.choices[0].message.parsed.model_dump())

    for choice in ("required", {"type": "function", "function": {"name": "weather"}}):
        called = client.chat.completions.create(
            messages=USER, tools=[WEATHER], tool_choice=choice, max_tokens=90, **common
        )
        call: Any = (called.choices[0].message.tool_calls or [])[0]
        assert json.loads(call.function.arguments)["city"] in ("Köln", "Bonn")
        tell("chat, a tool", called=call.function.model_dump())

    response = client.responses.create(input="Who is Lily?", max_output_tokens=12, **common)
    events = list(
        client.responses.create(input="Who is Lily?", max_output_tokens=12, stream=True, **common)
    )
    text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
    assert text == response.output_text
    tell("responses, whole and streamed", text=text, events=len(events))

    bodies: dict[str, tuple[Any, dict[str, Any]]] = {
        "/v1/completions": (
            Completion, {"prompt": ["a", "b"], "max_tokens": 3, "logprobs": 2, "n": 2},
        ),
        "/v1/chat/completions": (
            ChatCompletion, {"messages": USER, "max_tokens": 3, "logprobs": True, "top_logprobs": 2},
        ),
        "/v1/responses": (Response, {"input": "a", "max_output_tokens": 3}),
    }  # fmt: skip
    added: set[str] = set()
    for path, (kind, body) in bodies.items():
        answered = raw.post(path, json=body | common).raise_for_status().json()
        added |= set(extra_fields(kind.model_validate(answered, strict=True)))
    chunk_kinds = {
        "/v1/completions": TypeAdapter(Completion),
        "/v1/chat/completions": TypeAdapter(ChatCompletionChunk),
        "/v1/responses": TypeAdapter(ResponseStreamEvent),
    }
    for path, adapter in chunk_kinds.items():
        lines = raw.post(path, json={**bodies[path][1], **common, "stream": True}).text.splitlines()
        data = [line.removeprefix("data: ") for line in lines if line.startswith("data: {")]
        for one in map(json.loads, data):
            if path == "/v1/completions":
                # OpenAI's own streams say null until the end, which its type for them does not admit.
                one["choices"][0]["finish_reason"] = one["choices"][0]["finish_reason"] or "stop"
            added |= set(extra_fields(adapter.validate_python(one, strict=True)))
    assert added <= OURS, added
    tell("every body and event, strictly against the client's types", fields_added=sorted(added))
    round_trips(client)

    for call_, kind in (
        (lambda: client.completions.create(model="gpt-9", prompt="a"), openai.NotFoundError),
        (
            lambda: client.completions.create(prompt="a", top_p=7, model=MODEL),
            openai.BadRequestError,
        ),
        (lambda: client.embeddings.create(input="a", model=MODEL), openai.BadRequestError),
    ):
        try:
            call_()
        except kind as error:
            tell("an error", kind=kind.__name__, message=error.message)
        else:
            raise AssertionError(f"no {kind.__name__}")


main()
