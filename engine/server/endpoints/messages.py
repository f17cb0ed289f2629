"""Anthropic's `POST /v1/messages` and `/v1/messages/count_tokens`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from fastapi import FastAPI, Request, Response

from ...scheduling.outputs import RequestOutput
from ..parsing.events import Arguments, CallStart, Event, Reasoning, Text
from ..protocol.errors import ApiError, anthropic_error
from ..protocol.messages_protocol import MessagesPrompt, MessagesRequest
from .conversation import ConversationResponse, converse, render
from .service import Service, server_sent

_STOP_REASONS = {"length": "max_tokens", "stop": "end_turn"}


class MessageResponse(ConversationResponse):
    """The output of a request as a message of content blocks, or as Anthropic's streaming events.

    The message starts with its first token, when its cached tokens are known.
    """

    _has_started = False
    _num_blocks = 0
    _open: str | None = None

    async def document(self) -> dict[str, Any]:
        parsed = await self.parsed()
        blocks: list[dict[str, Any]] = []
        if parsed.reasoning:
            blocks.append({"type": "thinking", "thinking": parsed.reasoning, "signature": ""})
        if parsed.text or not (blocks or parsed.calls):
            blocks.append({"type": "text", "text": parsed.text})
        for call in parsed.calls:
            block = {"type": "tool_use", "id": call.id, "name": call.name}
            blocks.append({**block, "input": call.value})
        return {**self._message(blocks), **self._ending(), "usage": self._counts()}

    def sent(self, output: RequestOutput, events: Sequence[Event]) -> Iterator[bytes]:
        if not self._has_started:
            self._has_started = True
            started = {**self._message([]), "usage": {**self._counts(), "output_tokens": 0}}
            yield _event("message_start", message=started)
        for event in events:
            yield from self._sent(event)

    def ending(self) -> Iterator[bytes]:
        yield from self._close()
        yield _event("message_delta", delta=self._ending(), usage=self._counts())
        yield _event("message_stop")

    def failed(self, error: ApiError) -> bytes:
        return server_sent(anthropic_error(error), "error")

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
            "id": self.context.id,
            "type": "message",
            "role": "assistant",
            "model": self.context.model,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
        }

    def _ending(self) -> dict[str, Any]:
        completion = self.completion
        reason: str | None = _STOP_REASONS.get(completion.finish_reason or "")
        sequence = completion.stop_reason if isinstance(completion.stop_reason, str) else None
        if self.parser.num_calls and reason == "end_turn":
            reason = "tool_use"
        elif sequence is not None:
            reason = "stop_sequence"
        return {"stop_reason": reason, "stop_sequence": sequence}

    def _counts(self) -> dict[str, Any]:
        """`input_tokens` are those that were not in the prefix cache."""
        cached = self.usage.num_cached_tokens
        return {
            "input_tokens": self.usage.num_prompt_tokens - cached,
            "cache_read_input_tokens": cached,
            "cache_creation_input_tokens": 0,
            "output_tokens": self.usage.num_output_tokens,
        }


def _event(kind: str, **fields: Any) -> bytes:
    return server_sent({"type": kind, **fields}, kind)


def add_messages(app: FastAPI, service: Service) -> None:
    @app.post("/v1/messages", response_model=None)
    async def create_message(body: MessagesRequest, request: Request) -> Response:
        """Generate the next message of a conversation."""
        return await converse(
            service,
            request,
            body.chat_request(),
            "msg_",
            lambda context, form: MessageResponse(context, form, has_reasoning=body.thinks),
        )

    @app.post("/v1/messages/count_tokens")
    async def count_tokens(body: MessagesPrompt) -> dict[str, int]:
        """Count the tokens of a prompt."""
        chat = body.chat_request() if isinstance(body, MessagesRequest) else body.for_chat()
        service.check_model(body.model)
        prompt = await render(service, chat.messages, chat.usable_tools, chat.template_options)
        return {"input_tokens": len(prompt.token_ids)}
