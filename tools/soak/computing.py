"""Attacks by what a request makes the server compute: templates, grammars, texts, lists and echoes."""

from __future__ import annotations

import random
from typing import Any, Protocol

from .attacks import by_schema

CHAT = {"role": "user", "content": "a"}


class Poster(Protocol):
    """Sends a request with the attacker's key, `body` as JSON."""

    async def post(self, path: str, body: Any = None, **sent: Any) -> None: ...


async def blank_template(target: Poster) -> None:
    """Two braces and blanks as Ollama's template."""
    body = {"model": "stories3M", "prompt": "a", "template": "{{" + " " * 30_000, "stream": False}
    await target.post("/api/generate", body)


async def multiples(target: Poster) -> None:
    """Schemas whose automata have ten million states."""
    await target.post("/v1/completions", by_schema({"type": "integer", "multipleOf": 9_999_991}))


async def many_multiples(target: Poster) -> None:
    """Small schemas of many states each, all different."""
    number = 2 * random.randrange(24_000, 26_000) + 1
    await target.post("/v1/completions", by_schema({"type": "integer", "multipleOf": number}))


async def ambiguous_grammar(target: Poster) -> None:
    """A grammar that matches each text in very many ways, for 128 choices."""
    letters = " | ".join(f'"{chr(97 + number % 26)}"' for number in range(200))
    grammar = f"start: s\ns: s s | s s s | {letters}"
    body = {"prompt": "a", "max_tokens": 16, "n": 128, "guided_grammar": grammar}
    await target.post("/v1/completions", body)


async def blank_lines(target: Poster) -> None:
    """A grammar of 250 kB of blank lines."""
    body = {"prompt": "a", "max_tokens": 4, "guided_grammar": 'root ::= "a"' + "\n" * 250_000}
    await target.post("/v1/completions", body)


async def backtracking_pattern(target: Poster) -> None:
    """A pattern of property names that backtracks."""
    pattern = "^" + "(a?){40}" + "a" * 40 + "$"
    schema = {"properties": {"a" * 30 + "b": {}}, "patternProperties": {pattern: {}}}
    await target.post("/v1/completions", by_schema(schema))


async def special_texts(target: Poster) -> None:
    """A message of 14 MB of the beginning of special tokens."""
    messages = [{"role": "user", "content": "<|" * 7_000_000}]
    await target.post("/v1/chat/completions", {"messages": messages, "max_tokens": 1})


async def wrong_values(target: Poster) -> None:
    """A million values of the wrong type."""
    body = {"prompt": "a", "max_tokens": 1, "stop": [1] * 1_000_000}
    await target.post("/v1/completions", body)


async def long_texts(target: Poster) -> None:
    """A text of 3 MB."""
    await target.post("/v1/completions", {"prompt": "word " * 600_000, "max_tokens": 1})


async def echoes(target: Poster) -> None:
    """Prompts that are echoed with their log-probabilities by many choices."""
    body = {"prompt": ["a b c d " * 50] * 20, "max_tokens": 1, "n": 16}
    await target.post("/v1/completions", {**body, "echo": True, "logprobs": 100})


async def large_tools(target: Poster) -> None:
    """Tools of 120,000 objects, which a response repeats."""
    inner = [{f"p{number}": {} for number in range(10_000)} for _ in range(12)]
    tools = [
        {"type": "function", "name": f"f{number}", "parameters": {"properties": properties}}
        for number, properties in enumerate(inner)
    ]
    body = {"model": "stories3M", "input": "a", "max_output_tokens": 1, "tools": tools}
    await target.post("/v1/responses", {**body, "tool_choice": "none"})


async def empty_parts(target: Poster) -> None:
    """128,000 empty parts whose tokens are to be counted."""
    message = {"role": "user", "content": [{"type": "text", "text": ""}] * 4000}
    await target.post("/v1/messages/count_tokens", {"messages": [message] * 32})
