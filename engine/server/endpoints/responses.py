"""`POST /v1/responses`: OpenAI's Responses API, for text input and output."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, ConfigDict, Field, model_validator

from ...base.sampling_params import SamplingParams
from ...scheduling.outputs import Completion
from ..protocol.chat_protocol import MAX_MESSAGES, Message
from ..protocol.errors import ApiError
from ..protocol.protocol import GenerationRequest, StreamOptions, unsupported
from ..protocol.structure import ANY_OBJECT, Constraint, JsonSchemaFormat
from ..text.text import Tokenization
from .generation import ResponseContext, Service, server_sent
from .logprobs import chat_logprobs
from .usage import Usage

LOGPROBS = "message.output_text.logprobs"


class TextFormat(JsonSchemaFormat):
    """`text.format`: plain text or a JSON schema."""

    type: Literal["text", "json_object", "json_schema"] = "text"


class TextOptions(BaseModel):
    """`text`: options of the output text."""

    model_config = ConfigDict(extra="allow")

    format: TextFormat = TextFormat()


class InputMessage(Message):
    """An item of `input`: a message with `input_text` and `output_text` content parts."""

    @model_validator(mode="before")
    @classmethod
    def _is_a_message(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            raise ValueError("need an object with role and content")
        kind = value.get("type", "message")
        if kind != "message":
            raise ValueError(f"items of type {kind!r} are not supported: messages only")
        content = value.get("content")
        if isinstance(content, list):
            content = [_as_text_part(part) for part in content]
        return {"role": value.get("role"), "content": content}


def _as_text_part(part: Any) -> Any:
    if isinstance(part, dict) and part.get("type") in ("input_text", "output_text"):
        return {"type": "text", "text": part.get("text")}
    return part


class ResponsesRequest(GenerationRequest):
    """Body of `/v1/responses`."""

    input: str | Annotated[list[InputMessage], Field(min_length=1, max_length=MAX_MESSAGES)]
    instructions: str | None = None
    max_output_tokens: int | None = None
    text: TextOptions | None = None
    include: list[str] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    metadata: dict[str, str] | None = None

    @property
    def messages(self) -> list[Message]:
        messages: list[Message] = []
        if self.instructions is not None:
            messages.append(Message(role="system", content=self.instructions))
        if isinstance(self.input, str):
            return [*messages, Message(role="user", content=self.input)]
        return [*messages, *self.input]

    def refuse_unsupported(self) -> None:
        super().refuse_unsupported()
        for name in ("max_tokens", "response_format"):
            if getattr(self, name) is not None:
                raise unsupported(name)
        if self.num_completions > 1:
            raise unsupported("n")
        for field in self.include or ():
            if field != LOGPROBS:
                raise unsupported(f"include {field!r}")

    def constraint(self) -> Constraint | None:
        form = TextFormat() if self.text is None else self.text.format
        if form.type == "text":
            return super().constraint()
        schema = ANY_OBJECT if form.schema_ is None else form.schema_
        return Constraint("json_schema", schema, "text.format.schema")

    def sampling_params(self) -> SamplingParams:
        wanted = LOGPROBS in (self.include or ())
        return self._sampling_params(
            self.max_output_tokens, (self.top_logprobs or 0) if wanted else None
        )


class TextResponse:
    """The outputs of one HTTP request as a response object, or as its streaming events."""

    def __init__(
        self, context: ResponseContext, body: ResponsesRequest, text: Tokenization
    ) -> None:
        self._context = context
        self._body = body
        self._text = text
        self._usage = Usage(context.stream.jobs)
        self._item_id = "msg_" + context.id.removeprefix("resp_")
        self._sequence_number = 0

    async def document(self) -> dict[str, Any]:
        completion = Completion(0)
        async for output in self._context.stream:
            self._usage.take(output)
            completion.extend(output)
        return self._finished(completion)

    async def events(self, options: StreamOptions) -> AsyncIterator[bytes]:
        """OpenAI's events: created, item and content part added, text deltas, and all of them done.

        The content part is added with its first token, not before.
        """
        completion = Completion(0)
        where = {"output_index": 0, "item_id": self._item_id, "content_index": 0}
        begun = self._response("in_progress", [])
        yield self._event("response.created", {"response": begun})
        yield self._event("response.in_progress", {"response": begun})
        is_open = False
        try:
            async for output in self._context.stream:
                self._usage.take(output)
                if not is_open:
                    is_open = True
                    for event in self._opening(where):
                        yield event
                completion.extend(output)
                part = Completion(0)
                part.extend(output)
                if part.text or part.logprobs:
                    delta = {"delta": part.text, "logprobs": self._logprobs(part)}
                    yield self._event("response.output_text.delta", {**where, **delta})
        except ApiError as error:
            failed = self._response("failed", [])
            failed["error"] = {"code": "server_error", "message": str(error)}
            yield self._event("response.failed", {"response": failed})
            return
        for event in self._closing(where, completion):
            yield event
        whole = self._finished(completion)
        yield self._event(f"response.{whole['status']}", {"response": whole})

    def _opening(self, where: Mapping[str, Any]) -> list[bytes]:
        item = self._item("in_progress", [])
        part = self._part(Completion(0))
        return [
            self._event("response.output_item.added", {"output_index": 0, "item": item}),
            self._event("response.content_part.added", {**where, "part": part}),
        ]

    def _closing(self, where: Mapping[str, Any], completion: Completion) -> list[bytes]:
        part = self._part(completion)
        done = {"text": completion.text, "logprobs": part["logprobs"]}
        item = self._item(_status(completion), [part])
        return [
            self._event("response.output_text.done", {**where, **done}),
            self._event("response.content_part.done", {**where, "part": part}),
            self._event("response.output_item.done", {"output_index": 0, "item": item}),
        ]

    def _event(self, kind: str, fields: Mapping[str, Any]) -> bytes:
        number, self._sequence_number = self._sequence_number, self._sequence_number + 1
        return server_sent({"type": kind, "sequence_number": number, **fields}, kind)

    def _finished(self, completion: Completion) -> dict[str, Any]:
        status = _status(completion)
        response = self._response(status, [self._item(status, [self._part(completion)])])
        response["completed_at"] = int(time.time())
        if status == "incomplete":
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        counted = self._usage.whole()
        response["usage"] = {
            "input_tokens": counted["prompt_tokens"],
            "input_tokens_details": {
                "cached_tokens": self._usage.num_cached_tokens,
                "cache_write_tokens": 0,
            },
            "output_tokens": counted["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": counted["total_tokens"],
            "seconds": counted["seconds"],
        }
        return response

    def _item(self, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._item_id,
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": content,
        }

    def _part(self, completion: Completion) -> dict[str, Any]:
        return {
            "type": "output_text",
            "text": completion.text,
            "annotations": [],
            "logprobs": self._logprobs(completion),
        }

    def _logprobs(self, completion: Completion) -> list[dict[str, Any]]:
        if completion.logprobs is None:
            return []
        entries = chat_logprobs(self._text, completion.logprobs)["content"]
        for entry in (*entries, *(top for token in entries for top in token["top_logprobs"])):
            entry["bytes"] = entry["bytes"] or []
        return entries

    def _response(self, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
        body = self._body
        form = TextFormat() if body.text is None else body.text.format
        return {
            "id": self._context.id,
            "object": "response",
            "created_at": self._context.created,
            "status": status,
            "model": self._context.model,
            "output": output,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "store": False,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "text": {"format": form.model_dump(by_alias=True, exclude_none=True)},
            "tool_choice": "auto",
            "tools": [],
            "top_logprobs": body.top_logprobs,
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "truncation": "disabled",
            "usage": None,
        }


def _status(completion: Completion) -> str:
    return "incomplete" if completion.finish_reason == "length" else "completed"


def responses_router(service: Service) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/responses", response_model=None)
    async def create_response(body: ResponsesRequest, request: Request) -> Response:
        """Generate a response to a text or a conversation."""
        arrival_seconds = time.perf_counter()
        service.check(body)
        params = await service.params(request, body)
        token_ids = await service.text.encode_chat(body.messages)
        return await service.respond(
            request,
            body,
            params,
            [token_ids],
            "resp_",
            lambda context: TextResponse(context, body, service.text),
            arrival_seconds,
        )

    return router
