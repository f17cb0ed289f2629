"""Check a server with LangChain's chat class: `python langchain_chat.py URL MODEL`, a JSON line each."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

from checks import ANSWER, ASK, CITY, MODEL, QUESTION, RESULT, URL, tell
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_ollama import ChatOllama
from langchain_openai import ChatOpenAI
from pydantic import BaseModel


class Animal(BaseModel):
    """What the model is asked to fill in."""

    kind: Literal["cat", "dog"]


@tool
def weather(city: Literal["Köln", "Bonn"]) -> str:
    """How it is outside."""
    return f"dry in {city}"


async def streamed(chat: ChatOpenAI) -> str:
    return "".join([chunk.text async for chunk in chat.astream(QUESTION)])


def round_trip(name: str, chat: Any) -> None:
    """A tool that the model chooses, streamed, its result, and the answer."""
    bound, question = chat.bind_tools([weather]), HumanMessage(ASK)
    parts = list(bound.stream([question]))
    called = parts[0]
    for part in parts[1:]:
        called += part
    (call,) = called.tool_calls
    assert call["args"] == {"city": CITY} and weather.invoke(call["args"]) == RESULT
    answer = bound.invoke([question, called, ToolMessage(RESULT, tool_call_id=call["id"])]).text
    assert answer == ANSWER
    tell(f"{name}: a tool's round trip", called=call["args"], answer=answer)


def main() -> None:
    options: Any = {"base_url": f"{URL}/v1", "api_key": "none", "model": MODEL, "temperature": 0}
    chat = ChatOpenAI(max_tokens=12, **options)
    whole = chat.invoke(QUESTION)
    text = "".join(chunk.text for chunk in chat.stream(QUESTION))
    assert text == whole.text == asyncio.run(streamed(chat))
    tell(
        "chat, whole, streamed, and streamed asynchronously", text=text, usage=whole.usage_metadata
    )
    assert len(chat.batch([QUESTION, "Who is Tom?"])) == 2
    tell("a batch")
    longer = ChatOpenAI(max_tokens=90, **options)
    found = longer.with_structured_output(Animal, method="json_schema").invoke("A pet?")
    assert isinstance(found, Animal)
    tell("structured output", got=found.model_dump())
    with_tools = longer.bind_tools([weather], tool_choice="required", parallel_tool_calls=False)
    asked = with_tools.invoke("Is it raining?")
    call = asked.tool_calls[0]
    tell("a tool", called={"name": call["name"], "args": call["args"]})
    answer = ToolMessage(weather.invoke(call["args"]), tool_call_id=call["id"])
    again = longer.bind_tools([weather]).invoke([HumanMessage("Is it raining?"), asked, answer])
    tell("an answer to the tool's answer", text=again.text[:60])
    responses = ChatOpenAI(max_tokens=12, use_responses_api=True, **options)
    parts = "".join(chunk.text for chunk in responses.stream(QUESTION))
    assert parts == responses.invoke(QUESTION).text
    tell("the responses endpoint, whole and streamed", text=parts)
    anthropic: Any = {"anthropic_api_url": URL, "anthropic_api_key": "none", "max_tokens": 60}
    round_trip("ChatOpenAI", longer)
    round_trip("ChatAnthropic", ChatAnthropic(model=MODEL, temperature=0, **anthropic))
    round_trip("ChatOllama", ChatOllama(model=MODEL, base_url=URL, temperature=0, num_predict=60))


main()
