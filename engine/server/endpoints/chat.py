"""`POST /v1/chat/completions`: chat completions, with tool calls."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from fastapi import APIRouter, Request, Response

from ...scheduling.outputs import Completion, TokenLogprobs
from ..protocol.chat_protocol import ChatRequest, NamedTool
from ..protocol.errors import ApiError
from ..text.text import Tokenization
from ..text.tool_calls import FORCED, Call, ToolFormat, ToolReader
from .generation import Choices, Service
from .logprobs import chat_logprobs


class ChatShape:
    """Choices of a chat completion: whole messages, or the deltas of a stream.

    `reader` creates the tool-call parser of a choice; None for a request without tools.
    """

    object_name = "chat.completion"
    chunk_name = "chat.completion.chunk"

    def __init__(
        self, text: Tokenization, reader: Callable[[], ToolReader] | None, *, tool_is_named: bool
    ) -> None:
        self._text = text
        self._reader = reader
        self._readers: dict[int, ToolReader] = {}
        self._tool_is_named = tool_is_named

    def prompt_scored(self, job: int, scores: Sequence[TokenLogprobs | None]) -> None:
        """Chat completions have no prompt log-probabilities."""

    def whole(self, choice: int, job: int, completion: Completion) -> dict[str, Any]:
        content, calls, _ = self._read(choice, completion)
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if calls:
            message["content"] = content or None
            message["tool_calls"] = [call.as_json() for call in calls]
        return self._choice(choice, completion, {"message": message})

    def part(self, choice: int, job: int, output: Completion, *, first: bool) -> dict[str, Any]:
        content, calls, num_before = self._read(choice, output)
        delta: dict[str, Any] = {"content": content}
        if calls:
            delta = {"content": content} if content else {}
            delta["tool_calls"] = [
                {"index": index, **call.as_json()} for index, call in enumerate(calls, num_before)
            ]
        # The role comes with the first token: a separate event would count as a token in clients' TTFT.
        return self._choice(
            choice, output, {"delta": {"role": "assistant"} | delta if first else delta}
        )

    def _read(self, choice: int, output: Completion) -> tuple[str, list[Call], int]:
        """Text and tool calls of a delta, and the number of calls before it."""
        if self._reader is None:
            return output.text, [], 0
        reader = self._readers.setdefault(choice, self._reader())
        before = reader.num_calls
        text, calls = reader.feed(output.text, is_last=output.finish_reason is not None)
        return text, calls, before

    def _choice(self, choice: int, output: Completion, content: dict[str, Any]) -> dict[str, Any]:
        scored, reason = output.logprobs, output.finish_reason
        called = choice in self._readers and self._readers[choice].num_calls > 0
        if reason == "stop" and called and not self._tool_is_named:
            reason = "tool_calls"
        return {
            "index": choice,
            **content,
            "logprobs": None if scored is None else chat_logprobs(self._text, scored),
            "finish_reason": reason,
            "stop_reason": output.stop_reason,
        }


def chat_router(service: Service) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/chat/completions", response_model=None)
    async def create_chat_completion(body: ChatRequest, request: Request) -> Response:
        """Generate the next message of a conversation."""
        arrival_seconds = time.perf_counter()
        service.check(body)
        form = _tool_format(body, service.text)
        params = await service.params(request, body)
        if form is not None and form.special:
            params = replace(params, skip_special_tokens=False)
        token_ids = await service.text.encode_chat(
            body.messages, body.usable_tools, body.chat_template_kwargs
        )

        def reader() -> ToolReader:
            assert form is not None
            max_calls = 1 if body.parallel_tool_calls is False else None
            return ToolReader(form, max_calls=max_calls, stop_texts=service.text.stop_texts)

        shape = ChatShape(
            service.text,
            None if form is None else reader,
            tool_is_named=isinstance(body.tool_choice, NamedTool),
        )
        return await service.respond(
            request,
            body,
            params,
            [token_ids],
            "chatcmpl-",
            lambda context: Choices(context, shape),
            arrival_seconds,
        )

    return router


def _tool_format(body: ChatRequest, text: Tokenization) -> ToolFormat | None:
    """Format of the tool calls in the output; None for a request without usable tools."""
    if not body.usable_tools:
        return None
    if not text.takes_tools:
        raise ApiError(
            400,
            "tools: the model's chat template does not support them; give one with --chat-template",
            param="tools",
            code="unsupported_parameter",
        )
    if body.must_call:
        return FORCED
    if text.tool_format is None:
        raise ApiError(
            400,
            "tools: the tool-call format of the chat template is unknown; give --tool-call-parser, or a "
            "tool_choice that forces one",
            param="tools",
            code="unsupported_parameter",
        )
    return text.tool_format
