"""Check a server with Anthropic's official Python client: `python anthropic_python.py URL MODEL`."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import httpx
from anthropic.types import Message, RawMessageStreamEvent
from checks import (
    ANSWER,
    ASK,
    CITY,
    DESCRIPTION,
    MODEL,
    PARAMETERS,
    QUESTION,
    RESULT,
    URL,
    extra_fields,
    tell,
)
from pydantic import TypeAdapter

USER: Any = [{"role": "user", "content": QUESTION}]
TOOL: Any = {"name": "weather", "description": DESCRIPTION, "input_schema": PARAMETERS}


def main() -> None:
    client = anthropic.Anthropic(base_url=URL, api_key="none", max_retries=0)
    raw = httpx.Client(base_url=URL, trust_env=False, timeout=60)
    common: Any = {"model": MODEL, "extra_body": {"temperature": 0}}

    whole = client.messages.create(messages=USER, max_tokens=12, **common)
    with client.messages.stream(messages=USER, max_tokens=12, **common) as stream:
        text = "".join(stream.text_stream)
        last = stream.get_final_message()
    assert text == whole.content[0].text == last.content[0].text
    assert last.stop_reason == whole.stop_reason == "max_tokens"
    tell("messages, whole and streamed", text=text, usage=last.usage.model_dump(exclude_none=True))

    counted = client.messages.count_tokens(model=MODEL, messages=USER)
    usage = whole.usage
    assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)
    tell("count_tokens", input_tokens=counted.input_tokens)

    turns: list[Any] = [{"role": "user", "content": ASK}]
    asked: Any = {"max_tokens": 60, "tools": [TOOL], **common}
    with client.messages.stream(messages=turns, **asked) as stream:
        called = stream.get_final_message()
    (block,) = [block for block in called.content if block.type == "tool_use"]
    assert called.stop_reason == "tool_use" and block.input == {"city": CITY}
    result = {"type": "tool_result", "tool_use_id": block.id, "content": RESULT}
    turns += [
        {"role": "assistant", "content": [b.model_dump(exclude_none=True) for b in called.content]},
        {"role": "user", "content": [result]},
    ]
    answer = client.messages.create(messages=turns, **asked)
    assert answer.content[0].text == ANSWER
    tell("a tool's round trip", called=block.input, answer=ANSWER)

    body = {"model": MODEL, "temperature": 0, "messages": USER, "max_tokens": 3}
    whole_ = raw.post("/v1/messages", json=body).raise_for_status().json()
    added = set(extra_fields(Message.model_validate(whole_, strict=True)))
    adapter = TypeAdapter(RawMessageStreamEvent)
    for asked in (body, {**body, "messages": turns, "tools": [TOOL], "max_tokens": 60}):
        for line in raw.post("/v1/messages", json={**asked, "stream": True}).text.splitlines():
            if line.startswith("data: "):
                event = json.loads(line.removeprefix("data: "))
                added |= set(extra_fields(adapter.validate_python(event, strict=True)))
    assert not added, added
    tell("every body and event, strictly against the client's types", fields_added=[])

    try:
        client.messages.create(model="other", max_tokens=1, messages=USER)
    except anthropic.NotFoundError as error:
        tell("an error", kind=type(error).__name__, message=error.message)
    else:
        raise AssertionError("no NotFoundError")


main()
