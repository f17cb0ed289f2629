"""Ollama's `/api/chat`, `/api/generate`, `/api/tags`, `/api/ps`, `/api/show` and `/api/version`."""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from pydantic import ValidationError

from ...engine import Engine
from ..endpoints.conversation import Conversation, prepare
from ..endpoints.generation import Service
from ..parsing.parser import OutputFormat
from ..protocol.errors import ApiError
from ..protocol.protocol import GenerationRequest
from .answers import MEDIA_TYPE, Contents, OllamaAnswer, message_of, now, response_of
from .facts import ModelFacts
from .protocol import OllamaChat, OllamaGenerate, OllamaRequest, ShowRequest

API_VERSION = "0.12.0"
"""The release of Ollama whose API this is: clients ask for it to find out what they may send."""


class JsonRoute(APIRoute):
    """Reads a body as JSON whatever its Content-Type says, as Ollama does: many clients say nothing.

    Not from a browser's page: it may send other types than JSON to any address without asking.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def read_as_json(request: Request) -> Response:
            if "origin" in request.headers:
                return await handle(request)
            others = [pair for pair in request.scope["headers"] if pair[0] != b"content-type"]
            headers = [*others, (b"content-type", b"application/json")]
            return await handle(Request({**request.scope, "headers": headers}, request.receive))

        return read_as_json


class OllamaService:
    """Ollama's requests over the endpoints' `Service`."""

    def __init__(self, service: Service, max_model_len: int) -> None:
        self._service = service
        self._max_model_len = max_model_len

    def check(self, body: OllamaRequest) -> None:
        """Check model and fields; a tag of `:latest` is dropped from the name."""
        body.model = self.known(body.model)
        body.refuse_unsupported()
        if body.think and self._service.text.reasoning_format is None:
            raise ApiError(400, f"{body.model!r} does not support thinking", param="think")

    def known(self, name: str | None) -> str:
        """The name of a served model, with or without a tag."""
        name = (name or "").removesuffix(":latest")
        self._service.check_model(name)
        return name

    async def chat(self, body: OllamaChat, request: Request, arrival_seconds: float) -> Response:
        try:
            chat = body.chat_request(self._max_model_len)
        except ValidationError as error:
            raise RequestValidationError(error.errors()) from error
        self._service.check(chat)
        conversation = await prepare(self._service, request, chat)
        return await self._answered(body, chat, request, conversation, message_of, arrival_seconds)

    async def generate(
        self, body: OllamaGenerate, request: Request, arrival_seconds: float
    ) -> Response:
        """Through the chat template as a user's message, or as it is: raw, or without a template."""
        text = self._service.text
        try:
            is_plain = text.template_source == "plain" and not (body.system or body.images)
            if body.raw or is_plain:
                asked = body.raw_request(self._max_model_len)
                self._service.check(asked)
                params = await self._service.params(request, asked)
                (token_ids,) = await text.encode([body.prompt])
                conversation = Conversation(params, token_ids, OutputFormat())
            else:
                asked = body.chat_request(self._max_model_len)
                self._service.check(asked)
                conversation = await prepare(self._service, request, asked)
        except ValidationError as error:
            raise RequestValidationError(error.errors()) from error
        if body.context:
            conversation.token_ids[:0] = body.context
        return await self._answered(
            body, asked, request, conversation, response_of, arrival_seconds
        )

    async def _answered(
        self,
        body: OllamaRequest,
        asked: GenerationRequest,
        request: Request,
        conversation: Conversation,
        contents: Contents,
        arrival_seconds: float,
    ) -> Response:
        return await self._service.respond(
            request,
            asked,
            conversation.params,
            [conversation.token_ids],
            "ollama-",
            lambda context: OllamaAnswer(
                context,
                conversation.form,
                contents,
                arrival_seconds,
                hides_thinking=body.think is False,
                gives_context=isinstance(body, OllamaGenerate) and not body.raw,
            ),
            arrival_seconds,
            MEDIA_TYPE,
            conversation.images,
        )


def ollama_router(service: Service, engine: Engine) -> APIRouter:
    router = APIRouter(route_class=JsonRoute)
    ollama = OllamaService(service, engine.max_model_len)
    facts = ModelFacts(service, engine)

    @router.post("/api/chat", response_model=None)
    async def ollama_chat(body: OllamaChat, request: Request) -> Response:
        """Generate the next message of a conversation."""
        arrival_seconds = time.perf_counter()
        ollama.check(body)
        if not body.messages:
            message = {"role": "assistant", "content": ""}
            return _loaded(body, {"message": message})
        return await ollama.chat(body, request, arrival_seconds)

    @router.post("/api/generate", response_model=None)
    async def ollama_generate(body: OllamaGenerate, request: Request) -> Response:
        """Answer a prompt."""
        arrival_seconds = time.perf_counter()
        ollama.check(body)
        if not (body.prompt or body.context or body.images):
            return _loaded(body, {"response": ""})
        return await ollama.generate(body, request, arrival_seconds)

    @router.get("/api/tags")
    async def ollama_tags() -> dict[str, Any]:
        """The served model and its adapters."""
        return {"models": facts.listed()}

    @router.get("/api/ps")
    async def ollama_running() -> dict[str, Any]:
        """The same: all are loaded."""
        return {"models": facts.listed()}

    @router.post("/api/show")
    async def ollama_show(body: ShowRequest) -> dict[str, Any]:
        """Facts of a model."""
        ollama.known(body.model or body.name)
        return facts.shown()

    @router.get("/api/version")
    async def ollama_version() -> dict[str, str]:
        return {"version": API_VERSION}

    return router


def _loaded(body: OllamaRequest, empty: dict[str, Any]) -> Response:
    """The answer to a request without a prompt, which asks for the model to be loaded, as it is."""
    fields = {"model": body.model, "created_at": now(), **empty, "done": True}
    return JSONResponse({**fields, "done_reason": "load"})
