"""One turn of a Python client, in that client's environment: `python python_clients.py CLIENT KIND URL`.

Prints the last answer. Settings are the client's defaults but for the address, the key and the model's name.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import base64
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

PICTURE, DOCUMENT = Path("picture.png"), Path("paper.pdf")
TOOL = {
    "name": "lookup",
    "description": "Look a key up",
    "parameters": {
        "type": "object",
        "properties": {"key": {"type": "string"}},
        "required": ["key"],
    },
}
CUT = '{"key": "a'
FILLER = "The quick brown fox jumps over the lazy dog, number {}. "


def encoded(path: Path) -> str:
    return base64.b64encode(path.read_bytes()).decode()


def task(client: str, kind: str) -> str:
    """The prompt, which the script knows by its words."""
    filler = "".join(FILLER.format(number) for number in range(1_000)) if kind == "long" else ""
    return f"{filler}Do {client}-{kind} now."


def lookup(key: str) -> str:
    """Look a key up."""
    return f"RESULT-{7000 + 731}"


def chat_messages(client: str, kind: str) -> list[dict[str, Any]]:
    """The conversation in OpenAI's form; `cut`: a call in it broke off, as models break off at a limit."""
    content: Any = task(client, kind)
    if kind == "image":
        url = f"data:image/png;base64,{encoded(PICTURE)}"
        content = [
            {"type": "text", "text": content},
            {"type": "image_url", "image_url": {"url": url}},
        ]
    if kind == "pdf":
        data = f"data:application/pdf;base64,{encoded(DOCUMENT)}"
        file = {"filename": DOCUMENT.name, "file_data": data}
        content = [{"type": "text", "text": content}, {"type": "file", "file": file}]
    messages: list[dict[str, Any]] = [{"role": "user", "content": content}]
    if kind == "cut":
        call = {"id": "c1", "type": "function", "function": {"name": "lookup", "arguments": CUT}}
        cut = [
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": "Error: the arguments are no JSON"},
        ]
        messages = [{"role": "user", "content": "Look it up."}, *cut, *messages]
    return messages


def chat(create: Callable[..., Any], client: str, kind: str) -> str:
    """A turn of a client whose calls are chat completions; a tool's result goes back once."""
    messages = chat_messages(client, kind)
    options: dict[str, Any] = {"tools": [{"type": "function", "function": TOOL}]}
    if kind == "search":
        options = {"web_search_options": {}}
    message = create(messages=messages, **options).choices[0].message
    for call in message.tool_calls or ():
        result = lookup(call.function.arguments)
        messages += [
            message.model_dump(exclude_none=True),
            {"role": "tool", "tool_call_id": call.id, "content": result},
        ]
        message = create(messages=messages, **options).choices[0].message
    return message.content or ""


def openai_chat(client: str, kind: str, url: str) -> str:
    import openai

    made = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
    return chat(
        lambda **fields: made.chat.completions.create(model="agent", **fields), client, kind
    )


def openai_responses(client: str, kind: str, url: str) -> str:
    import openai

    made = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
    content: list[dict[str, Any]] = [{"type": "input_text", "text": task(client, kind)}]
    if kind == "image":
        image_url = f"data:image/png;base64,{encoded(PICTURE)}"
        content.append({"type": "input_image", "image_url": image_url, "detail": "auto"})
    if kind == "pdf":
        data = f"data:application/pdf;base64,{encoded(DOCUMENT)}"
        content.append({"type": "input_file", "filename": DOCUMENT.name, "file_data": data})
    items: list[dict[str, Any]] = [{"role": "user", "content": content}]
    if kind == "cut":
        call = {"type": "function_call", "call_id": "c1", "name": "lookup", "arguments": CUT}
        items = [call, {"type": "function_call_output", "call_id": "c1", "output": "Error"}, *items]
    tools: Any = [{"type": "function", **TOOL}, *([{"type": "web_search"}] * (kind == "search"))]
    response = made.responses.create(model="agent", input=items, tools=tools)  # type: ignore[call-overload]
    for item in response.output:
        if item.type == "function_call":
            output = {"type": "function_call_output", "call_id": item.call_id, "output": lookup("")}
            items = [*items, item.model_dump(), output]
            response = made.responses.create(model="agent", input=items, tools=tools)  # type: ignore[call-overload]
    return response.output_text


def anthropic_messages(client: str, kind: str, url: str) -> str:
    import anthropic

    made = anthropic.Anthropic(base_url=url, api_key="none")
    content: list[dict[str, Any]] = [{"type": "text", "text": task(client, kind)}]
    for wanted, block, path, media in (
        ("image", "image", PICTURE, "image/png"),
        ("pdf", "document", DOCUMENT, "application/pdf"),
    ):
        if kind == wanted:
            source = {"type": "base64", "media_type": media, "data": encoded(path)}
            content.append({"type": block, "source": source})
    tools: Any = [{"name": "lookup", "input_schema": TOOL["parameters"]}]
    if kind == "search":
        tools.append({"type": "web_search_20250305", "name": "web_search"})
    messages: list[Any] = [{"role": "user", "content": content}]
    if kind == "cut":
        use = {"type": "tool_use", "id": "c1", "name": "lookup", "input": {}}
        result = {"type": "tool_result", "tool_use_id": "c1", "content": "Error", "is_error": True}
        messages = [
            {"role": "user", "content": "Look it up."},
            {"role": "assistant", "content": [use]},
            {"role": "user", "content": [result, *content]},
        ]
    fields: Any = {"model": "agent", "max_tokens": 1000, "tools": tools}
    answer = made.messages.create(messages=messages, **fields)
    for block in answer.content:
        if block.type == "tool_use":
            result = {"type": "tool_result", "tool_use_id": block.id, "content": lookup("")}
            messages += [
                {"role": "assistant", "content": answer.content},
                {"role": "user", "content": [result]},
            ]
            answer = made.messages.create(messages=messages, **fields)
    return "".join(block.text for block in answer.content if block.type == "text")


def langchain(client: str, kind: str, url: str) -> str:
    from langchain_core.messages import ToolMessage
    from langchain_openai import ChatOpenAI

    made = ChatOpenAI(model="agent", base_url=f"{url}/v1", api_key="none")  # type: ignore[arg-type]
    bound = made.bind_tools([lookup])
    messages: list[Any] = list(chat_messages(client, kind))
    if kind == "search":
        bound = made.bind_tools([{"type": "web_search"}])
    answer = bound.invoke(messages)
    for call in answer.tool_calls:
        messages += [answer, ToolMessage(lookup(""), tool_call_id=call["id"])]
        answer = bound.invoke(messages)
    return answer.text if isinstance(answer.text, str) else answer.text()


def litellm(client: str, kind: str, url: str) -> str:
    import litellm as library

    def create(**fields: Any) -> Any:
        return library.completion(
            model="openai/agent", api_base=f"{url}/v1", api_key="none", **fields
        )

    return chat(create, client, kind)


def pydantic_ai(client: str, kind: str, url: str) -> str:
    from pydantic_ai import Agent, BinaryContent
    from pydantic_ai.messages import ModelRequest, ModelResponse, ToolCallPart, UserPromptPart
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model = OpenAIChatModel("agent", provider=OpenAIProvider(base_url=f"{url}/v1", api_key="none"))
    agent = Agent(model, tools=[lookup])
    prompt: list[Any] = [task(client, kind)]
    if kind == "image":
        prompt.append(BinaryContent(PICTURE.read_bytes(), media_type="image/png"))
    if kind == "pdf":
        prompt.append(BinaryContent(DOCUMENT.read_bytes(), media_type="application/pdf"))
    history: list[Any] = []
    if kind == "cut":
        part = ToolCallPart("lookup", CUT, tool_call_id="c1")
        history = [ModelRequest([UserPromptPart("Look it up.")]), ModelResponse([part])]
        from pydantic_ai.messages import ToolReturnPart

        history.append(ModelRequest([ToolReturnPart("lookup", "Error", tool_call_id="c1")]))
    return agent.run_sync(prompt, message_history=history).output


def instructor(client: str, kind: str, url: str) -> str:
    """Every turn is a forced call: the answer is an object of a class."""
    import instructor as library
    import openai
    from pydantic import BaseModel

    class Verdict(BaseModel):
        is_dry: bool

    client_of_openai = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
    if kind == "tool":
        by_responses = library.from_openai(client_of_openai, mode=library.Mode.RESPONSES_TOOLS)
        by_responses.responses.create(
            model="agent", input=task("free", kind), response_model=Verdict, max_retries=0
        )
    made = library.from_openai(client_of_openai)
    messages: Any = chat_messages("free", kind)
    verdict = made.chat.completions.create(
        model="agent", messages=messages, response_model=Verdict, max_retries=0
    )
    return f"FINAL-{kind} {verdict}"


def ollama(client: str, kind: str, url: str) -> str:
    import ollama as library

    made = library.Client(host=url)
    message: dict[str, Any] = {"role": "user", "content": task(client, kind)}
    if kind == "image":
        message["images"] = [encoded(PICTURE)]
    messages: list[Any] = [message]
    answer = made.chat("agent", messages, tools=[lookup]).message
    for call in answer.tool_calls or ():
        messages += [
            answer,
            {"role": "tool", "tool_name": call.function.name, "content": lookup("")},
        ]
        answer = made.chat("agent", messages, tools=[lookup]).message
    return answer.content or ""


CLIENTS = {
    "openai": openai_chat,
    "openai-responses": openai_responses,
    "anthropic": anthropic_messages,
    "langchain-openai": langchain,
    "litellm": litellm,
    "pydantic-ai": pydantic_ai,
    "instructor": instructor,
    "ollama": ollama,
}

if __name__ == "__main__":
    name, kind, url = sys.argv[1:]
    os.environ |= {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "NO_PROXY": "127.0.0.1"}
    try:
        print(CLIENTS[name](name, kind, url))
    except Exception as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(1)
