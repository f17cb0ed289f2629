"""Check a server with Ollama's official Python client: `python ollama_python.py URL MODEL`."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import ollama
from checks import ANSWER, ASK, CITY, MODEL, PARAMETERS, QUESTION, RESULT, URL, WEATHER, tell

USER: Any = [{"role": "user", "content": QUESTION}]
GREEDY = {"temperature": 0, "num_predict": 12}


async def streamed() -> str:
    parts = await ollama.AsyncClient(URL).chat(MODEL, USER, stream=True, options=GREEDY)
    return "".join([part.message.content or "" async for part in parts])


def main() -> None:
    client = ollama.Client(URL)
    assert MODEL in [model.model for model in client.list().models]
    shown, loaded = client.show(MODEL), client.ps().models
    assert loaded[0].model == MODEL and "completion" in (shown.capabilities or ())
    details = shown.details.model_dump() if shown.details else None
    tell("list, ps, show", details=details, capabilities=shown.capabilities)

    whole = client.chat(MODEL, USER, options=GREEDY, keep_alive="5m")
    parts = list(client.chat(MODEL, USER, options=GREEDY, stream=True))
    text = "".join(part.message.content or "" for part in parts)
    assert text == whole.message.content == asyncio.run(streamed())
    last = parts[-1]
    assert last.done and last.eval_count == 12 and (last.eval_duration or 0) > 0
    tell("chat, whole, streamed, and streamed asynchronously", text=text, eval_count=12)

    prompt: Any = {"prompt": "Once upon a time", "options": GREEDY}
    generated = client.generate(MODEL, **prompt)
    text = "".join(part.response for part in client.generate(MODEL, stream=True, **prompt))
    assert text == generated.response and generated.context
    tell("generate, whole and streamed", text=text)

    asked: Any = {"tools": [WEATHER], "options": {"temperature": 0, "num_predict": 60}}
    turns: list[Any] = [{"role": "user", "content": ASK}]
    parts = list(client.chat(MODEL, turns, stream=True, **asked))
    (call,) = [call for part in parts for call in part.message.tool_calls or ()]
    assert call.function.arguments == {"city": CITY}
    turns += [
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_name": "weather", "content": RESULT},
    ]
    answer = client.chat(MODEL, turns, **asked).message.content
    assert answer == ANSWER
    tell("a tool's round trip", called=dict(call.function.arguments), answer=answer)

    formed = client.chat(MODEL, USER, format=PARAMETERS, options={"temperature": 0})
    got = json.loads(formed.message.content or "")
    assert set(got) == {"city"}
    tell("a format by schema", got=got)

    try:
        client.chat("other", USER)
    except ollama.ResponseError as error:
        assert error.status_code == 404
        tell("an error", kind=type(error).__name__, message=error.error)
    else:
        raise AssertionError("no ResponseError")


main()
