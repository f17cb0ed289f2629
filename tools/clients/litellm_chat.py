"""Check a server with LiteLLM, by three of its providers: `python litellm_chat.py URL MODEL`."""

from __future__ import annotations

import json
from typing import Any

import litellm
from checks import ANSWER, ASK, CITY, MODEL, QUESTION, RESULT, URL, WEATHER, tell

PROVIDERS = {"openai": f"{URL}/v1", "anthropic": URL, "ollama_chat": URL}


def main() -> None:
    for provider, base in PROVIDERS.items():
        common: Any = {"model": f"{provider}/{MODEL}", "api_base": base, "api_key": "none"}
        common |= {"temperature": 0, "num_retries": 0}
        turns: list[Any] = [{"role": "user", "content": QUESTION}]
        whole = litellm.completion(messages=turns, max_tokens=12, **common)
        parts = litellm.completion(messages=turns, max_tokens=12, stream=True, **common)
        text = "".join(part.choices[0].delta.content or "" for part in parts)
        assert text == whole.choices[0].message.content
        usage = whole.usage.model_dump(exclude_none=True)
        tell(f"{provider}: chat, whole and streamed", text=text, tokens=usage["completion_tokens"])

        turns = [{"role": "user", "content": ASK}]
        asked: Any = {"tools": [WEATHER], "max_tokens": 60, **common}
        message = litellm.completion(messages=turns, **asked).choices[0].message
        (call,) = message.tool_calls
        assert json.loads(call.function.arguments) == {"city": CITY}
        turns.append(message.model_dump(exclude_none=True))
        turns.append(
            {"role": "tool", "tool_call_id": call.id, "name": "weather", "content": RESULT}
        )
        answer = litellm.completion(messages=turns, **asked).choices[0].message.content
        assert answer == ANSWER
        tell(f"{provider}: a tool's round trip", called=call.function.arguments, answer=answer)

    try:
        litellm.completion(model="openai/other", api_base=PROVIDERS["openai"], api_key="none",
                           messages=[{"role": "user", "content": QUESTION}], num_retries=0)  # fmt: skip
    except litellm.NotFoundError as error:
        tell("an error", kind=type(error).__name__)
    else:
        raise AssertionError("no NotFoundError")


main()
