"""`POST /v1/chat/completions`: chat completions, with reasoning and tool calls."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request, Response

from ...scheduling.outputs import Completion, TokenLogprobs
from ..parsing.events import Arguments, CallStart, Event, Parsed, Reasoning, Text
from ..parsing.parser import OutputFormat, OutputParser
from ..protocol.chat_protocol import ChatRequest, NamedTool
from ..text.text import Tokenization
from .conversation import prepare
from .generation import Choices, Service
from .logprobs import chat_logprobs


class ChatShape:
    """Choices of a chat completion: whole messages, or the deltas of a stream."""

    object_name = "chat.completion"
    chunk_name = "chat.completion.chunk"

    def __init__(self, text: Tokenization, form: OutputFormat, *, tool_is_named: bool) -> None:
        self._text = text
        self._form = form
        self._parsers: dict[int, OutputParser] = {}
        self._tool_is_named = tool_is_named

    def prompt_scored(self, job: int, scores: Sequence[TokenLogprobs | None]) -> None:
        """Chat completions have no prompt log-probabilities."""

    def whole(self, choice: int, job: int, completion: Completion) -> dict[str, Any]:
        parsed = Parsed()
        parsed.add(self._read(choice, completion))
        message: dict[str, Any] = {"role": "assistant", "content": parsed.text, "refusal": None}
        if parsed.reasoning:
            message["reasoning_content"] = parsed.reasoning
        if parsed.calls:
            message["content"] = parsed.text or None
            message["tool_calls"] = [
                _call(call.id, call.name, call.arguments) for call in parsed.calls
            ]
        return self._choice(choice, completion, {"message": message})

    def part(self, choice: int, job: int, output: Completion, *, first: bool) -> dict[str, Any]:
        delta = _delta(self._read(choice, output))
        # The role comes with the first token: a separate event would count as a token in clients' TTFT.
        return self._choice(
            choice, output, {"delta": {"role": "assistant"} | delta if first else delta}
        )

    def _read(self, choice: int, output: Completion) -> list[Event]:
        if choice not in self._parsers:
            self._parsers[choice] = OutputParser(self._form, choice)
        return self._parsers[choice].feed(output.text, is_last=output.finish_reason is not None)

    def _choice(self, choice: int, output: Completion, content: dict[str, Any]) -> dict[str, Any]:
        scored, reason = output.logprobs, output.finish_reason
        if reason == "stop" and self._parsers[choice].num_calls and not self._tool_is_named:
            reason = "tool_calls"
        return {
            "index": choice,
            **content,
            "logprobs": None if scored is None else chat_logprobs(self._text, scored),
            "finish_reason": reason,
            "stop_reason": output.stop_reason,
        }


def _call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    return {
        "id": call_id,
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def _delta(events: Sequence[Event]) -> dict[str, Any]:
    """A delta with everything that came with a token; never empty, because clients count deltas."""
    delta: dict[str, Any] = {}
    calls: dict[int, dict[str, Any]] = {}
    for event in events:
        match event:
            case Text(text):
                delta["content"] = delta.get("content", "") + text
            case Reasoning(text):
                delta["reasoning_content"] = delta.get("reasoning_content", "") + text
            case CallStart(index, call_id, name):
                calls[index] = {"index": index, **_call(call_id, name, "")}
            case Arguments(index, text):
                call = calls.setdefault(index, {"index": index, "function": {"arguments": ""}})
                call["function"]["arguments"] += text
    if calls:
        delta["tool_calls"] = [*calls.values()]
    return delta or {"content": ""}


def chat_router(service: Service) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/chat/completions", response_model=None)
    async def create_chat_completion(body: ChatRequest, request: Request) -> Response:
        """Generate the next message of a conversation."""
        arrival_seconds = time.perf_counter()
        service.check(body)
        conversation = await prepare(service, request, body)
        shape = ChatShape(
            service.text,
            conversation.form,
            tool_is_named=isinstance(body.tool_choice, NamedTool),
        )
        return await service.respond(
            request,
            body,
            conversation.params,
            [conversation.token_ids],
            "chatcmpl-",
            lambda context: Choices(context, shape),
            arrival_seconds,
            images=conversation.images,
        )

    return router
