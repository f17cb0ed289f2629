"""`POST /v1/chat/completions`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request, Response

from ..outputs import Completion, TokenLogprobs
from .generation import Service
from .logprobs import chat_logprobs
from .protocol import ChatRequest
from .text import Tokenization


class ChatShape:
    """Choices of a chat completion: a message, or what an event adds to it."""

    id_prefix = "chatcmpl"
    object_name = "chat.completion"
    chunk_name = "chat.completion.chunk"

    def __init__(self, text: Tokenization) -> None:
        self._text = text

    def prompt_scored(self, job: int, scores: Sequence[TokenLogprobs | None]) -> None:
        """Chat completions do not show the prompt."""

    def whole(self, choice: int, job: int, completion: Completion) -> dict[str, Any]:
        message = {"role": "assistant", "content": completion.text, "refusal": None}
        return self._choice(choice, completion, {"message": message})

    def part(self, choice: int, job: int, piece: Completion, *, first: bool) -> dict[str, Any]:
        delta = {"content": piece.text}
        # The role comes with the first token: an event of its own would look like one to a stopwatch.
        return self._choice(
            choice, piece, {"delta": {"role": "assistant"} | delta if first else delta}
        )

    def _choice(self, choice: int, piece: Completion, content: dict[str, Any]) -> dict[str, Any]:
        scored = piece.logprobs
        return {
            "index": choice,
            **content,
            "logprobs": None if scored is None else chat_logprobs(self._text, scored),
            "finish_reason": piece.finish_reason,
            "stop_reason": piece.stop_reason,
        }


def chat_router(service: Service) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/chat/completions", response_model=None)
    async def create_chat_completion(body: ChatRequest, request: Request) -> Response:
        """Answer a conversation."""
        arrival_seconds = time.perf_counter()
        service.check(body)
        params = body.sampling_params()
        token_ids = await service.text.encode_chat(body.messages)
        shape = ChatShape(service.text)
        return await service.respond(request, body, params, [token_ids], shape, arrival_seconds)

    return router
