"""`POST /v1/completions`: text completions."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request, Response

from ...scheduling.outputs import Completion, TokenLogprobs
from ..protocol.protocol import CompletionRequest
from ..text.text import Tokenization
from .generation import Choices, Service
from .logprobs import completion_logprobs, prompt_logprobs, token_id_name


class CompletionShape:
    """Choices of a completion: text, preceded by the prompt if `echo` is set."""

    object_name = chunk_name = "text_completion"

    def __init__(
        self,
        text: Tokenization,
        body: CompletionRequest,
        prompt_token_ids: Sequence[Sequence[int]],
    ) -> None:
        self._text = text
        self._body = body
        self._prompt_token_ids = prompt_token_ids
        self._name = token_id_name if body.return_tokens_as_token_ids else self._text_name
        self._echoed: Sequence[str] | None = None
        if body.echo:
            self._echoed = [
                prompt if isinstance(prompt, str) else text.decode(prompt)
                for prompt in body.prompts
            ]
        self._prompt_scores: dict[int, Sequence[TokenLogprobs | None]] = {}
        self._offsets: dict[int, int] = {}

    def prompt_scored(self, job: int, scores: Sequence[TokenLogprobs | None]) -> None:
        self._prompt_scores[job] = scores

    def whole(self, choice: int, job: int, completion: Completion) -> dict[str, Any]:
        choice_fields = self.part(choice, job, completion, first=True)
        if (num_top := self._body.prompt_logprobs) is not None:
            scores = self._prompt_scores[job]
            choice_fields["prompt_logprobs"] = prompt_logprobs(self._text, scores, num_top)
        return choice_fields

    def part(self, choice: int, job: int, output: Completion, *, first: bool) -> dict[str, Any]:
        text = output.text
        token_ids: list[int] = output.token_ids
        scores: list[TokenLogprobs | None] | None = None
        if output.logprobs is not None:
            scores = [*output.logprobs]
        if self._body.only_echoes:
            text, token_ids, scores = "", [], None if scores is None else []
        if first and self._echoed is not None:
            text = self._echoed[job] + text
            if scores is not None:
                prompt = self._prompt_token_ids[job]
                # Counted back from the end of the prompt: its first word may have been tokenized with a
                # space that its text does not have.
                self._offsets[choice] = len(self._echoed[job]) - self._length(prompt)
                token_ids = [*prompt, *token_ids]
                scores = [*self._prompt_scores[job], *scores]
        logprobs = None
        if scores is not None:
            offset = self._offsets.get(choice, 0)
            logprobs = completion_logprobs(
                self._text, token_ids, scores, offset, self._name, self._body.logprobs or 0
            )
            self._offsets[choice] = offset + self._length(token_ids)
        return {
            "index": choice,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": output.finish_reason,
            "stop_reason": output.stop_reason,
        }

    def _text_name(self, token_id: int) -> str:
        return self._text.token(token_id).name

    def _length(self, token_ids: Sequence[int]) -> int:
        return sum(self._text.token(token_id).length for token_id in token_ids)


def completions_router(service: Service) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/completions", response_model=None)
    async def create_completion(body: CompletionRequest, request: Request) -> Response:
        """Continue one or more prompts."""
        arrival_seconds = time.perf_counter()
        service.check(body)
        params = await service.params(request, body)
        token_ids = await service.text.encode(body.prompts)
        shape = CompletionShape(service.text, body, token_ids)
        return await service.respond(
            request,
            body,
            params,
            token_ids,
            "cmpl-",
            lambda context: Choices(context, shape),
            arrival_seconds,
        )

    return router
