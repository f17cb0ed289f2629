"""Anthropic's `POST /v1/messages` and `/v1/messages/count_tokens`."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError

from ...scheduling.outputs import Completion, RequestOutput
from ..parsing.events import Arguments, CallStart, Event, Parsed, Reasoning, Text
from ..parsing.parser import OutputFormat, OutputParser
from ..protocol.chat_protocol import ChatRequest
from ..protocol.errors import ApiError, anthropic_error
from ..protocol.generation_protocol import StreamOptions
from ..protocol.messages_protocol import MessagesRequest, Prompt
from .conversation import prepare, render
from .service import ResponseContext, Service, Usage, server_sent

_STOP_REASONS = {"length": "max_tokens", "stop": "end_turn"}


class MessageResponse:
    """The output of a request as a message of content blocks, or as its streaming events.

    Reasoning that was not asked for is left out.
    """

    def __init__(self, context: ResponseContext, form: OutputFormat, *, thinks: bool) -> None:
        self._context = context
        self._parser = OutputParser(form)
        self._usage = Usage(context.stream.jobs)
        self._thinks = thinks
        self._num_blocks = 0
        self._open: str | None = None

    async def document(self) -> dict[str, Any]:
        parsed, completion = Parsed(), Completion(0)
        async for output in self._context.stream:
            completion.extend(output)
            parsed.add(self._read(output))
        blocks: list[dict[str, Any]] = []
        if parsed.reasoning:
            blocks.append({"type": "thinking", "thinking": parsed.reasoning, "signature": ""})
        if parsed.text or not (blocks or parsed.calls):
            blocks.append({"type": "text", "text": parsed.text})
        for call in parsed.calls:
            block = {"type": "tool_use", "id": call.id, "name": call.name}
            blocks.append({**block, "input": _object(call.arguments)})
        return {**self._message(blocks), **self._ending(completion), "usage": self._counts()}

    async def events(self, options: StreamOptions) -> AsyncIterator[bytes]:
        """Anthropic's events. The message starts with its first token, when its cached tokens are known."""
        completion, has_started = Completion(0), False
        try:
            async for output in self._context.stream:
                events = self._read(output)
                completion.extend(output)
                if not has_started:
                    has_started = True
                    started = {**self._message([]), "usage": {**self._counts(), "output_tokens": 0}}
                    yield _event("message_start", message=started)
                for event in events:
                    for sent in self._sent(event):
                        yield sent
            for sent in self._close():
                yield sent
            yield _event("message_delta", delta=self._ending(completion), usage=self._counts())
            yield _event("message_stop")
        except ApiError as error:
            yield server_sent(anthropic_error(error), "error")

    def _read(self, output: RequestOutput) -> list[Event]:
        self._usage.take(output)
        events = self._parser.feed(output.new_text, is_last=output.finish_reason is not None)
        return [event for event in events if self._thinks or not isinstance(event, Reasoning)]

    def _sent(self, event: Event) -> Iterator[bytes]:
        """A block's delta; a block opens with its first one, and the one before it closes."""
        match event:
            case Text(text):
                yield from self._opened("text", {"type": "text", "text": ""})
                yield self._delta({"type": "text_delta", "text": text})
            case Reasoning(text):
                empty = {"type": "thinking", "thinking": "", "signature": ""}
                yield from self._opened("thinking", empty)
                yield self._delta({"type": "thinking_delta", "thinking": text})
            case CallStart(index, call_id, name):
                block = {"type": "tool_use", "id": call_id, "name": name, "input": {}}
                yield from self._opened(f"call {index}", block)
            case Arguments(_, text):
                yield self._delta({"type": "input_json_delta", "partial_json": text})

    def _opened(self, kind: str, block: dict[str, Any]) -> Iterator[bytes]:
        if self._open == kind:
            return
        yield from self._close()
        self._open = kind
        yield _event("content_block_start", index=self._num_blocks, content_block=block)

    def _close(self) -> Iterator[bytes]:
        if self._open is None:
            return
        if self._open == "thinking":
            yield self._delta({"type": "signature_delta", "signature": ""})
        yield _event("content_block_stop", index=self._num_blocks)
        self._open = None
        self._num_blocks += 1

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _event("content_block_delta", index=self._num_blocks, delta=delta)

    def _message(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._context.id,
            "type": "message",
            "role": "assistant",
            "model": self._context.model,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
        }

    def _ending(self, completion: Completion) -> dict[str, Any]:
        reason: str | None = _STOP_REASONS.get(completion.finish_reason or "")
        sequence = completion.stop_reason if isinstance(completion.stop_reason, str) else None
        if self._parser.num_calls and reason == "end_turn":
            reason = "tool_use"
        elif sequence is not None:
            reason = "stop_sequence"
        return {"stop_reason": reason, "stop_sequence": sequence}

    def _counts(self) -> dict[str, Any]:
        """`input_tokens` are those that were not in the prefix cache."""
        cached = self._usage.num_cached_tokens
        return {
            "input_tokens": self._usage.num_prompt_tokens - cached,
            "cache_read_input_tokens": cached,
            "cache_creation_input_tokens": 0,
            "output_tokens": self._usage.num_output_tokens,
        }


def _object(arguments: str) -> Any:
    """The arguments of a call that may have been cut off."""
    try:
        return json.loads(arguments)
    except ValueError:
        return {}


def _event(kind: str, **fields: Any) -> bytes:
    return server_sent({"type": kind, **fields}, kind)


def _chat(body: Prompt) -> ChatRequest:
    try:
        return body.chat_request() if isinstance(body, MessagesRequest) else body.for_chat()
    except ValidationError as error:
        raise RequestValidationError(error.errors()) from error


def messages_router(service: Service) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/messages", response_model=None)
    async def create_message(body: MessagesRequest, request: Request) -> Response:
        """Generate the next message of a conversation."""
        arrival_seconds = time.perf_counter()
        chat = _chat(body)
        service.check(chat)
        conversation = await prepare(service, request, chat)
        return await service.respond(
            request,
            chat,
            conversation.params,
            [conversation.token_ids],
            "msg_",
            lambda context: MessageResponse(context, conversation.form, thinks=body.thinks),
            arrival_seconds,
            images=conversation.images,
        )

    @router.post("/v1/messages/count_tokens")
    async def count_tokens(body: Prompt) -> dict[str, int]:
        """Count the tokens of a prompt."""
        chat = _chat(body)
        service.check_model(body.model)
        prompt = await render(service, chat.messages, chat.usable_tools, chat.template_options)
        return {"input_tokens": len(prompt.token_ids)}

    return router
