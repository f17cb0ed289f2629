"""Ollama's answers: one JSON object, or a stream of them, a line each."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

from ...scheduling.outputs import Completion, RequestOutput
from ..endpoints.generation import ResponseContext
from ..endpoints.usage import Usage
from ..parsing.events import Arguments, Call, CallStart, Event, Parsed, Reasoning
from ..parsing.parser import OutputFormat, OutputParser
from ..protocol.errors import ApiError, ollama_error
from ..protocol.protocol import StreamOptions

MEDIA_TYPE = "application/x-ndjson"
Contents = Callable[[Parsed], dict[str, Any]]
"""The fields of an object that hold a piece of the output."""


def message_of(parsed: Parsed) -> dict[str, Any]:
    """A piece of a chat."""
    message: dict[str, Any] = {"role": "assistant", "content": parsed.text}
    if parsed.reasoning:
        message["thinking"] = parsed.reasoning
    if parsed.calls:
        message["tool_calls"] = [
            {"id": call.id, "function": {"name": call.name, "arguments": _object(call.arguments)}}
            for call in parsed.calls
        ]
    return {"message": message}


def response_of(parsed: Parsed) -> dict[str, Any]:
    """A piece of a generation."""
    thinking = {"thinking": parsed.reasoning} if parsed.reasoning else {}
    return {"response": parsed.text, **thinking}


class OllamaAnswer:
    """The output of a request as Ollama's objects. Calls come whole, and durations in nanoseconds."""

    def __init__(
        self,
        context: ResponseContext,
        form: OutputFormat,
        contents: Contents,
        arrival_seconds: float,
        *,
        hides_thinking: bool,
        gives_context: bool = False,
    ) -> None:
        """`gives_context`: whether the last object has the tokens of prompt and output."""
        self._context = context
        self._contents = contents
        self._arrival_seconds = arrival_seconds
        self._parser = OutputParser(form)
        self._usage = Usage(context.stream.jobs)
        self._hides_thinking = hides_thinking
        self._gives_context = gives_context
        self._call: Call | None = None

    async def document(self) -> dict[str, Any]:
        parsed, completion = Parsed(), Completion(0)
        async for output in self._context.stream:
            completion.extend(output)
            parsed.add(self._read(output))
        return {**self._object(parsed), **self._ending(completion)}

    async def events(self, options: StreamOptions) -> AsyncIterator[bytes]:
        """One object per piece of text; the last, of an empty one, has the counts and durations."""
        completion = Completion(0)
        try:
            async for output in self._context.stream:
                completion.extend(output)
                for piece in self._pieces(self._read(output)):
                    yield _line(self._object(piece))
            for piece in self._whole_call():
                yield _line(self._object(piece))
            yield _line({**self._object(Parsed()), **self._ending(completion)})
        except ApiError as error:
            yield _line(ollama_error(error))

    def _read(self, output: RequestOutput) -> list[Event]:
        self._usage.take(output)
        events = self._parser.feed(output.new_text, is_last=output.finish_reason is not None)
        return [e for e in events if not (self._hides_thinking and isinstance(e, Reasoning))]

    def _pieces(self, events: Sequence[Event]) -> Iterator[Parsed]:
        """What can be sent: text and reasoning, and a call once the next one begins."""
        for event in events:
            match event:
                case CallStart(_, call_id, name):
                    yield from self._whole_call()
                    self._call = Call(call_id, name)
                case Arguments(_, text):
                    assert self._call is not None
                    self._call.arguments += text
                case _:
                    piece = Parsed()
                    piece.add([event])
                    yield piece

    def _whole_call(self) -> Iterator[Parsed]:
        if self._call is not None:
            piece = Parsed()
            piece.calls, self._call = [self._call], None
            yield piece

    def _object(self, parsed: Parsed) -> dict[str, Any]:
        return {
            "model": self._context.model,
            "created_at": now(),
            **self._contents(parsed),
            "done": False,
        }

    def _ending(self, completion: Completion) -> dict[str, Any]:
        """Why it ended, and Ollama's counts and durations; `load_duration` is the time in the queue."""
        seconds = self._usage.whole()["seconds"]
        prompt = self._context.stream.jobs[0].token_ids
        tokens = {"context": [*prompt, *completion.token_ids]} if self._gives_context else {}
        return {
            "done": True,
            "done_reason": completion.finish_reason,
            **tokens,
            "total_duration": nanoseconds(time.perf_counter() - self._arrival_seconds),
            "load_duration": nanoseconds(seconds["queue"]),
            "prompt_eval_count": self._usage.num_prompt_tokens,
            "prompt_eval_duration": nanoseconds(seconds["prefill"]),
            "eval_count": self._usage.num_output_tokens,
            "eval_duration": nanoseconds(seconds["decode"]),
        }


def now() -> str:
    """The time, as Ollama writes it."""
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


def nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)


def _object(arguments: str) -> Any:
    """The arguments of a call that may have been cut off."""
    try:
        return json.loads(arguments)
    except ValueError:
        return {}


def _line(fields: dict[str, Any]) -> bytes:
    return json.dumps(fields, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"
