"""Check a server with LlamaIndex: `python llamaindex_chat.py URL MODEL`, a JSON line each."""

from __future__ import annotations

import asyncio
from typing import Any

from checks import ANSWER, ASK, CITY, MODEL, QUESTION, RESULT, URL, tell
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.ollama import Ollama
from llama_index.llms.openai_like import OpenAILike


def weather(city: str) -> str:
    """How it is outside."""
    return f"dry in {city}"


def main() -> None:
    options: Any = {
        "model": MODEL,
        "api_base": f"{URL}/v1",
        "api_key": "none",
        "is_chat_model": True,
        "is_function_calling_model": True,
        "context_window": 512,
        "temperature": 0,
        "max_retries": 0,
    }
    turns = [ChatMessage(role="user", content=QUESTION)]
    model = OpenAILike(max_tokens=12, **options)
    whole = model.chat(turns).message.content
    text = "".join(part.delta or "" for part in model.stream_chat(turns))
    assert text == whole == asyncio.run(model.achat(turns)).message.content
    tell("OpenAILike: chat, whole, streamed, and asynchronously", text=text)

    plain = OpenAILike(max_tokens=12, **{**options, "is_chat_model": False})
    completed = plain.complete("Once upon a time").text
    assert completed == "".join(p.delta or "" for p in plain.stream_complete("Once upon a time"))
    tell("OpenAILike: completion, whole and streamed", text=completed)

    longer, tool = OpenAILike(max_tokens=60, **options), FunctionTool.from_defaults(weather)
    asked = longer.chat_with_tools([tool], user_msg=ASK)
    (call,) = longer.get_tool_calls_from_response(asked)
    assert call.tool_kwargs == {"city": CITY} and tool(**call.tool_kwargs).content == RESULT
    history = [
        ChatMessage(role="user", content=ASK),
        asked.message,
        ChatMessage(role="tool", content=RESULT, additional_kwargs={"tool_call_id": call.tool_id}),
    ]
    answer = longer.chat_with_tools([tool], chat_history=history).message.content
    assert answer == ANSWER
    tell("OpenAILike: a tool's round trip", called=call.tool_kwargs, answer=answer)

    ollama = Ollama(
        MODEL,
        base_url=URL,
        context_window=512,
        additional_kwargs={"num_predict": 12, "temperature": 0},
    )
    said = ollama.chat(turns).message.content
    assert said == "".join(part.delta or "" for part in ollama.stream_chat(turns)) == text
    tell("Ollama: chat, whole and streamed", text=said)


main()
