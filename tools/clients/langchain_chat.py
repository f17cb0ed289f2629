"""Check a server with LangChain's chat class: `python langchain_chat.py URL MODEL`, a JSON line each."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any, Literal

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

URL, MODEL = sys.argv[1:]


class Animal(BaseModel):
    """What the model is asked to fill in."""

    kind: Literal["cat", "dog"]


@tool
def weather(city: Literal["Köln", "Bonn"]) -> str:
    """How it is outside."""
    return f"dry in {city}"


def tell(check: str, **found: Any) -> None:
    print(json.dumps({"check": check, **found}, ensure_ascii=False), flush=True)


async def streamed(chat: ChatOpenAI) -> str:
    return "".join([chunk.text async for chunk in chat.astream("Who is Lily?")])


def main() -> None:
    options: Any = {"base_url": f"{URL}/v1", "api_key": "none", "model": MODEL, "temperature": 0}
    chat = ChatOpenAI(max_tokens=12, **options)
    whole = chat.invoke("Who is Lily?")
    text = "".join(chunk.text for chunk in chat.stream("Who is Lily?"))
    assert text == whole.text == asyncio.run(streamed(chat))
    tell(
        "chat, whole, streamed, and streamed asynchronously", text=text, usage=whole.usage_metadata
    )
    assert len(chat.batch(["Who is Lily?", "Who is Tom?"])) == 2
    tell("a batch")
    longer = ChatOpenAI(max_tokens=90, **options)
    found = longer.with_structured_output(Animal, method="json_schema").invoke("A pet?")
    assert isinstance(found, Animal)
    tell("structured output", got=found.model_dump())
    with_tools = longer.bind_tools([weather], tool_choice="required")
    asked = with_tools.invoke("Is it raining?")
    call = asked.tool_calls[0]
    tell("a tool", called={"name": call["name"], "args": call["args"]})
    answer = ToolMessage(weather.invoke(call["args"]), tool_call_id=call["id"])
    again = longer.bind_tools([weather]).invoke([HumanMessage("Is it raining?"), asked, answer])
    tell("an answer to the tool's answer", text=again.text[:60])
    responses = ChatOpenAI(max_tokens=12, use_responses_api=True, **options)
    parts = "".join(chunk.text for chunk in responses.stream("Who is Lily?"))
    assert parts == responses.invoke("Who is Lily?").text
    tell("the responses endpoint, whole and streamed", text=parts)


main()
