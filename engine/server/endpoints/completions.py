"""`POST /v1/completions` and `POST /v1/chat/completions`, the latter with reasoning and tool calls."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI, Request, Response

from ...scheduling.outputs import Completion, TokenLogprobs
from ..parsing.events import Arguments, CallStart, Event, Parsed, Reasoning, Text
from ..parsing.parser import OutputFormat, OutputParser
from ..protocol.chat_protocol import ChatRequest, NamedTool, chat_call
from ..protocol.generation_protocol import CompletionRequest
from .choices import (
    ChoicesResponse,
    chat_logprobs,
    completion_logprobs,
    prompt_logprobs,
    token_id_name,
)
from .conversation import converse
from .service import Asked, ResponseContext, Service
from .tokenization import Tokenization


class CompletionResponse(ChoicesResponse):
    """Choices of a completion: text, preceded by the prompt if `echo` is set."""

    object_name = chunk_name = "text_completion"

    def __init__(
        self, context: ResponseContext, text: Tokenization, body: CompletionRequest
    ) -> None:
        super().__init__(context, text)
        self._body = body
        self._name = token_id_name if body.return_tokens_as_token_ids else self._text_name
        self._echoed: Sequence[str] | None = None
        if body.echo:
            self._echoed = [
                prompt if isinstance(prompt, str) else text.decode(prompt)
                for prompt in body.prompts
            ]
        self._offsets: dict[int, int] = {}

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
                prompt = self._context.stream.jobs[job].token_ids
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


class ChatResponse(ChoicesResponse):
    """Choices of a chat completion: whole messages, or the deltas of a stream."""

    object_name = "chat.completion"
    chunk_name = "chat.completion.chunk"

    def __init__(
        self,
        context: ResponseContext,
        text: Tokenization,
        form: OutputFormat,
        *,
        tool_is_named: bool,
    ) -> None:
        super().__init__(context, text)
        self._form = form
        self._parsers: dict[int, OutputParser] = {}
        self._tool_is_named = tool_is_named

    def whole(self, choice: int, job: int, completion: Completion) -> dict[str, Any]:
        parsed = Parsed()
        parsed.add(self._read(choice, completion))
        message: dict[str, Any] = {"role": "assistant", "content": parsed.text, "refusal": None}
        if parsed.reasoning:
            message["reasoning_content"] = parsed.reasoning
        if parsed.calls:
            message["content"] = parsed.text or None
            message["tool_calls"] = [
                chat_call(call.id, call.name, call.arguments) for call in parsed.calls
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
                calls[index] = {"index": index, **chat_call(call_id, name, "")}
            case Arguments(index, text):
                call = calls.setdefault(index, {"index": index, "function": {"arguments": ""}})
                call["function"]["arguments"] += text
    if calls:
        delta["tool_calls"] = [*calls.values()]
    return delta or {"content": ""}


def add_completions(app: FastAPI, service: Service) -> None:
    @app.post("/v1/completions", response_model=None)
    async def create_completion(body: CompletionRequest, request: Request) -> Response:
        """Continue one or more prompts."""
        arrival_seconds = time.perf_counter()
        service.check(body)
        params = await service.params(request, body)
        token_ids = await service.text.encode(body.prompts)
        return await service.respond(
            Asked(request, body, params, token_ids, "cmpl-", arrival_seconds),
            lambda context: CompletionResponse(context, service.text, body),
        )

    @app.post("/v1/chat/completions", response_model=None)
    async def create_chat_completion(body: ChatRequest, request: Request) -> Response:
        """Generate the next message of a conversation."""
        is_named = isinstance(body.tool_choice, NamedTool)
        return await converse(
            service,
            request,
            body,
            "chatcmpl-",
            lambda context, form: ChatResponse(context, service.text, form, tool_is_named=is_named),
        )
