"""Anthropic's `POST /v1/messages` and `/v1/messages/count_tokens`: request models, their translation into a
chat request, and the endpoints.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import FastAPI, Request, Response
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator

from ...scheduling.outputs import RequestOutput
from ..parsing.formats import Arguments, CallStart, Event, Reasoning, Text
from ..protocol.chat_protocol import (
    IMAGE_NOTE,
    MAX_MESSAGES,
    ChatRequest,
    ToolName,
    bounded_parts,
    chat_call,
    continued,
    image_part,
)
from ..protocol.errors import ApiError, anthropic_error, bad_field
from ..protocol.generation_protocol import client_tools
from .conversation import ConversationResponse, converse, render, with_effort
from .service import Service, note_ignored, server_sent

Content = Annotated[str | list[dict[str, Any]], BeforeValidator(bounded_parts)]
BILLING = "x-anthropic-billing-header:"
"""Beginning of Claude Code's first system block, which changes with every request: nothing after it would be
in the prefix cache (https://github.com/anthropics/claude-code/issues/68900)."""


class AnthropicMessage(BaseModel):
    """A message of the conversation: a text, or content blocks."""

    role: Literal["user", "assistant", "system"]
    content: Content


class MessagesTool(BaseModel):
    """A tool of the client."""

    type: Literal["custom"] | None = None
    name: ToolName
    description: str | None = None
    input_schema: dict[str, Any]

    def for_chat(self) -> dict[str, Any]:
        function = {"name": self.name, "description": self.description}
        return {"type": "function", "function": {**function, "parameters": self.input_schema}}


class ToolChoice(BaseModel):
    """Which tools may or must be used."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    def for_chat(self) -> Any:
        if self.type == "tool":
            return {"type": "function", "function": {"name": self.name}}
        return "required" if self.type == "any" else self.type


class Thinking(BaseModel):
    """True if reasoning is asked for; its budget has no effect here."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None


class AnswerFormat(BaseModel):
    """A schema of the answer."""

    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(BaseModel):
    """Effort and format of the answer."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: AnswerFormat | None = None


class MessagesPrompt(BaseModel):
    """The prompt's parts; the whole body of `/v1/messages/count_tokens`.

    `cache_control` is accepted anywhere and has no effect: every prefix is cached.
    """

    model: str | None = None
    messages: Annotated[list[AnthropicMessage], Field(min_length=1, max_length=MAX_MESSAGES)]
    system: Content | None = None
    tools: (
        Annotated[list[MessagesTool], Field(max_length=128), client_tools(None, "custom")] | None
    ) = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None

    model_config = ConfigDict(extra="allow")

    @field_validator("system")
    @classmethod
    def _without_billing(cls, system: Content | None) -> Content | None:
        if not isinstance(system, list):
            return system
        return [block for block in system if not str(block.get("text")).startswith(BILLING)] or None

    @property
    def thinks(self) -> bool:
        return self.thinking is not None and self.thinking.type != "disabled"

    def for_chat(self, *, takes_images: bool, **fields: Any) -> ChatRequest:
        """Translate into a chat request; of an image for a model of text alone only that it is there. Raises
        `ApiError`: content that is not supported; `ValidationError`: what a chat request refuses too."""
        config = self.output_config or OutputConfig()
        turns = [part for turn in self.messages for part in _turn(turn, takes_images)]
        system = [] if self.system is None else [{"role": "system", "content": _text(self.system)}]
        effort = {"max": "xhigh"}.get(config.effort or "", config.effort)
        options = {"enable_thinking": self.thinks, "thinking": self.thinks}
        chosen: dict[str, Any] = {
            "model": self.model,
            "messages": [*system, *turns],
            "chat_template_kwargs": options,
            "reasoning_effort": effort if self.thinks else None,
            **continued(turns),
        }
        if self.tools:
            chosen["tools"] = [tool.for_chat() for tool in self.tools]
        if self.tool_choice is not None:
            chosen["tool_choice"] = self.tool_choice.for_chat()
            if self.tool_choice.disable_parallel_tool_use:
                chosen["parallel_tool_calls"] = False
        if config.format is not None:
            schema = {"name": "answer", "schema": config.format.schema_}
            chosen["response_format"] = {"type": "json_schema", "json_schema": schema}
        return ChatRequest.model_validate({**chosen, **fields})


class MessagesRequest(MessagesPrompt):
    """Body of `/v1/messages`. Fields without an effect on the text are accepted."""

    max_tokens: Annotated[int, Field(ge=1)]
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    mcp_servers: list[Any] | None = None
    container: Any = None

    def chat_request(self, *, takes_images: bool) -> ChatRequest:
        """Translate into a chat request; raises as `for_chat`."""
        for name in ("mcp_servers", "container"):
            if getattr(self, name):
                raise ApiError(400, f"{name} is not supported", param=name)
        same = ("max_tokens", "stream", "temperature", "top_p", "top_k")
        fields = {name: getattr(self, name) for name in same}
        return self.for_chat(takes_images=takes_images, stop=self.stop_sequences, **fields)


_FOREIGN = ("document", "search_result", "server_tool_use", "container_upload", "mcp_tool_use")


def _readable(block: Any, takes_images: bool) -> Any:
    """A content block that the model can read: in place of a document, or of what the vendor's own tools have
    found, its text where there is one, and a note that it is there."""
    kind = block.get("type") if isinstance(block, dict) else None
    if kind == "image" and not takes_images:
        return {"type": "text", "text": IMAGE_NOTE}
    if not isinstance(kind, str) or kind == "tool_result":
        return block
    if kind not in _FOREIGN and not kind.endswith("_tool_result"):
        return block
    source = block.get("source")
    inner: Any = block.get("content")
    if isinstance(source, dict):
        inner = source.get("data") if source.get("type") == "text" else source.get("content", inner)
        kind = str(source.get("media_type") or kind)
    shown = [inner] if isinstance(inner, str) else []
    for part in inner if isinstance(inner, list) else []:
        fields = part if isinstance(part, dict) else {}
        # Search results have a title and an address.
        parts = (str(fields[name]) for name in ("title", "url", "text") if fields.get(name))
        shown.append(part if isinstance(part, str) else " ".join(parts))
    named = block.get("title") or block.get("name") or ""
    label = f"{kind} {named}".strip()
    if not any(shown):
        return {"type": "text", "text": f"[{label}, which this server cannot read]"}
    return {"type": "text", "text": "\n".join([f"[{label}]", *filter(None, shown)])}


def _turn(turn: AnthropicMessage, takes_images: bool) -> list[dict[str, Any]]:
    """A turn as chat messages: results of tools are messages of their own, before the user's text, and the
    images of results are the user's."""
    if isinstance(turn.content, str):
        return [{"role": turn.role, "content": turn.content}]
    messages: list[dict[str, Any]] = []
    message: dict[str, Any] = {"role": turn.role}
    parts: list[dict[str, Any]] = []
    for block in (_readable(block, takes_images) for block in turn.content):
        kind = block.get("type")
        if kind == "text" and isinstance(block.get("text"), str):
            parts.append({"type": "text", "text": block["text"]})
        elif kind == "image" and turn.role == "user":
            parts.append(_image(block))
        elif kind == "tool_use" and turn.role == "assistant":
            arguments = json.dumps(block.get("input") or {}, ensure_ascii=False)
            call = chat_call(block.get("id"), block.get("name"), arguments)
            message.setdefault("tool_calls", []).append(call)
        elif kind == "tool_result" and turn.role == "user":
            content = block.get("content") or ""
            is_list = isinstance(content, list)
            inner = [_readable(p, takes_images) for p in content] if is_list else [content]
            texts = [part for part in inner if not _is_image(part)]
            text = content if isinstance(content, str) else _text(texts)
            text = f"Error: {text}" if block.get("is_error") else text
            result = {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": text}
            messages.append(result)
            parts += [_image(part) for part in inner if _is_image(part)]
        elif kind == "thinking" and turn.role == "assistant":
            before = message.get("reasoning_content") or ""
            message["reasoning_content"] = before + str(block.get("thinking", ""))
        elif kind != "redacted_thinking":
            problem = f"content blocks of type {kind!r} are not supported from the {turn.role}"
            raise bad_field("messages", problem)
    if parts or len(message) > 1 or not messages:
        messages.append({**message, "content": parts})
    return messages


def _is_image(block: Any) -> bool:
    return isinstance(block, dict) and block.get("type") == "image"


def _image(block: Any) -> dict[str, Any]:
    """An image block as a content part. Raises `ApiError`: a source of another type."""
    match block.get("source"):
        case {"type": "base64", "media_type": str(kind), "data": str(data)}:
            return image_part(f"data:{kind};base64,{data}")
        case {"type": "url", "url": str(url)}:
            return image_part(url)
    raise bad_field("messages", "the source of an image is of type base64 or url")


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    texts: list[str] = []
    for block in content if isinstance(content, list) else [content]:
        kind = block.get("type") if isinstance(block, dict) else type(block).__name__
        if kind != "text" or not isinstance(block.get("text"), str):
            problem = f"content blocks of type {kind!r} are not supported here: text only"
            raise ApiError(400, problem)
        texts.append(block["text"])
    return "\n".join(texts)


_STOP_REASONS = {"length": "max_tokens", "stop": "end_turn"}


class MessageResponse(ConversationResponse):
    """The output of a request as a message of content blocks, or as Anthropic's streaming events. The message
    starts with its first token, when its cached tokens are known."""

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
        head = {"id": self.context.id, "type": "message", "role": "assistant"}
        ending = {"stop_reason": None, "stop_sequence": None}
        return {**head, "model": self.context.model, "content": content, **ending}

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
        note_ignored(request, body.model_extra or ())
        translate = partial(body.chat_request, takes_images=service.images.are_taken)
        return await converse(
            service,
            request,
            await service.off_loop(request, translate),
            "msg_",
            lambda context, form: MessageResponse(context, form, has_reasoning=body.thinks),
        )

    @app.post("/v1/messages/count_tokens")
    async def count_tokens(body: MessagesPrompt, request: Request) -> dict[str, int]:
        """Count the tokens of a prompt."""
        translate = partial(body.for_chat, takes_images=service.images.are_taken)
        chat = with_effort(await service.off_loop(request, translate), service.text)
        service.check_model(body.model)
        prompt = await render(service, chat.messages, chat.usable_tools, chat.template_options)
        return {"input_tokens": len(prompt.token_ids)}
