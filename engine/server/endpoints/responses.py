"""OpenAI's `/v1/responses`: reasoning, text and function calls as output items. No response is stored."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request, Response

from ...scheduling.outputs import RequestOutput
from ..parsing.formats import Arguments, CallStart, Event, Reasoning, Text, json_value
from ..parsing.parser import OutputFormat
from ..protocol.chat_protocol import without_images
from ..protocol.errors import ApiError
from ..protocol.responses_protocol import (
    REASONING,
    CustomTool,
    Namespace,
    ResponsesChat,
    ResponsesRequest,
    TextFormat,
    encoded_reasoning,
)
from .completions import chat_logprobs, json_pieces
from .conversation import ConversationResponse, converse
from .service import ResponseContext, Service, compact_json, server_sent
from .tokenization import Tokenization

Fields = dict[str, Any]
Make = Callable[..., bytes]


class Item(ABC):
    """An output item of a growing text. `make` encodes an event of a type with its fields.

    Attributes:
        event: the type of its deltas, and of the content part that it has, unless `has_part` is false.
    """

    event: str
    has_part = True

    def __init__(self, item_id: str) -> None:
        self.id, self.text = item_id, ""

    @abstractmethod
    def document(self, status: str) -> Fields:
        """The item with what it holds so far."""

    def part(self) -> Fields:
        return {"type": self.event, "text": self.text}

    def done(self) -> Fields:
        return {"text": self.text}

    def opening(self, make: Make, where: Fields) -> Iterator[bytes]:
        empty = self.document("in_progress") | ({"content": []} if self.has_part else {})
        yield make("response.output_item.added", **where, item=empty)
        if self.has_part:
            yield make("response.content_part.added", **self._place(where), part=self.part())

    def delta(self, make: Make, where: Fields, text: str, **more: Any) -> bytes:
        self.text += text
        return make(f"response.{self.event}.delta", **self._place(where), delta=text, **more)

    def closing(self, make: Make, where: Fields, status: str) -> Iterator[bytes]:
        yield make(f"response.{self.event}.done", **self._place(where), **self.done())
        if self.has_part:
            yield make("response.content_part.done", **self._place(where), part=self.part())
        yield make("response.output_item.done", **where, item=self.document(status))

    def _place(self, where: Fields) -> Fields:
        return {**where, "item_id": self.id, **({"content_index": 0} if self.has_part else {})}


class MessageItem(Item):
    """The answer."""

    event = "output_text"

    def __init__(self, item_id: str) -> None:
        super().__init__(item_id)
        self.logprobs: list[Fields] = []

    def part(self) -> Fields:
        return {**super().part(), "annotations": [], "logprobs": self.logprobs}

    def done(self) -> Fields:
        return {**super().done(), "logprobs": self.logprobs}

    def document(self, status: str) -> Fields:
        fields = {"id": self.id, "type": "message", "role": "assistant", "status": status}
        return {**fields, "content": [self.part()]}


class ReasoningItem(Item):
    """The reasoning before the answer, in plain text, and encoded too where the client asks for that."""

    event = "reasoning_text"

    def __init__(self, item_id: str, *, is_encoded: bool) -> None:
        super().__init__(item_id)
        self._is_encoded = is_encoded

    def document(self, status: str) -> Fields:
        fields = {"id": self.id, "type": "reasoning", "status": status, "summary": []}
        encoded = encoded_reasoning(self.text) if self._is_encoded else None
        return {**fields, "content": [self.part()], "encrypted_content": encoded}


class CallItem(Item):
    """A function call, perhaps of a function in a namespace; its text are the arguments."""

    event, has_part = "function_call_arguments", False

    def __init__(self, item_id: str, call_id: str, name: str, namespaces: Container[str]) -> None:
        super().__init__(item_id)
        self.call_id = call_id
        space, _, inner = name.partition(".")
        self.namespace, self.name = (space, inner) if space in namespaces else (None, name)

    def done(self) -> Fields:
        return {"name": self.name, "arguments": self.text}

    def document(self, status: str) -> Fields:
        fields = {"id": self.id, "type": "function_call", "status": status}
        fields |= {"call_id": self.call_id, **self.done()}
        return fields | ({"namespace": self.namespace} if self.namespace else {})


class CustomItem(CallItem):
    """A call of a tool of free text, which comes whole: in the arguments it is a JSON string."""

    event = "custom_tool_call_input"

    @property
    def input(self) -> str:
        try:
            return str(json_value(self.text)["input"])
        except (ValueError, TypeError, KeyError):
            return self.text

    def done(self) -> Fields:
        return {"input": self.input}

    def closing(self, make: Make, where: Fields, status: str) -> Iterator[bytes]:
        yield make(f"response.{self.event}.delta", **self._place(where), delta=self.input)
        yield from super().closing(make, where, status)

    def document(self, status: str) -> Fields:
        fields = {"id": self.id, "type": "custom_tool_call", "status": status}
        return fields | {"call_id": self.call_id, "name": self.name, "input": self.input}


class ItemResponse(ConversationResponse):
    """The output of a request as a response object, or as OpenAI's streaming events. An item is added with
    its first token, not before."""

    def __init__(
        self,
        context: ResponseContext,
        form: OutputFormat,
        body: ResponsesRequest,
        text: Tokenization,
        echo: bytes,
    ) -> None:
        """`echo`: the members of a response that repeat the request's, as JSON."""
        super().__init__(context, form)
        self._body, self._text, self._echo = body, text, echo
        self._items: list[Item] = []
        self._is_open = False
        self._logprobs: list[dict[str, Any]] = []
        self._sequence_number = self._num_reasoning_tokens = 0

    def opening(self) -> Iterator[bytes]:
        begun = self._response("in_progress", [])
        yield self._response_event("created", begun)
        yield self._response_event("in_progress", begun)

    async def document(self) -> bytes:
        async for output, events in self.read():
            deque(self.sent(output, events), 0)
        deque(self._end(), 0)
        return self._finished()

    def sent(self, output: RequestOutput, events: Sequence[Event]) -> Iterator[bytes]:
        if output.logprobs is not None:
            entries = chat_logprobs(self._text, output.logprobs)["content"]
            for entry in (*entries, *(top for token in entries for top in token["top_logprobs"])):
                entry["bytes"] = entry["bytes"] or []
            if self._items and not isinstance(self._last, MessageItem):
                self._logprobs.clear()  # of tokens of reasoning, or of a call
            self._logprobs += entries
        for event in events:
            yield from self._grown(event)

    def ending(self) -> Iterator[bytes]:
        yield from self._end()
        yield self._response_event(self._status, self._finished())

    def failed(self, error: ApiError) -> bytes:
        problem = {"code": "server_error", "message": str(error)}
        return self._response_event("failed", self._response("failed", [], error=problem))

    def _grown(self, event: Event) -> Iterator[bytes]:
        match event:
            case Text(text):
                yield from self._message_delta(text)
            case Reasoning(text):
                if not isinstance(item := self._last, ReasoningItem):
                    is_encoded = REASONING in (self._body.include or ())
                    item = ReasoningItem(self._item_id("rs"), is_encoded=is_encoded)
                    yield from self._opened(item)
                self._num_reasoning_tokens = self.usage.num_output_tokens
                yield item.delta(self._event, self._where, text)
            case CallStart(_, call_id, name):
                kind = CustomItem if name in self._body.names_of(CustomTool) else CallItem
                item = kind(self._item_id("fc"), call_id, name, self._body.names_of(Namespace))
                yield from self._opened(item)
            case Arguments(_, text):
                call = self._last
                assert isinstance(call, CallItem)
                if isinstance(call, CustomItem):
                    call.text += text
                    return
                yield call.delta(self._event, self._where, text)

    def _message_delta(self, text: str) -> Iterator[bytes]:
        item = self._last
        if not isinstance(item, MessageItem):
            item = MessageItem(self._item_id("msg"))
            yield from self._opened(item)
        scored, self._logprobs = self._logprobs, []
        item.logprobs = [*item.logprobs, *scored]
        yield item.delta(self._event, self._where, text, logprobs=scored)

    def _end(self) -> Iterator[bytes]:
        """Close the last item; an output without any is an empty message."""
        if not self._items or (self._logprobs and isinstance(self._last, MessageItem)):
            yield from self._message_delta("")
        yield from self._closed(self._status)

    def _opened(self, item: Item) -> Iterator[bytes]:
        yield from self._closed("completed")
        self._items.append(item)
        self._is_open = True
        yield from item.opening(self._event, self._where)

    def _closed(self, status: str) -> Iterator[bytes]:
        if self._is_open:
            self._is_open = False
            yield from self._items[-1].closing(self._event, self._where, status)

    @property
    def _status(self) -> str:
        return "incomplete" if self.completion.finish_reason == "length" else "completed"

    @property
    def _last(self) -> Item | None:
        return self._items[-1] if self._items else None

    @property
    def _where(self) -> dict[str, Any]:
        return {"output_index": len(self._items) - 1}

    def _item_id(self, kind: str) -> str:
        number = f"_{len(self._items)}" if self._items else ""
        return f"{kind}_{self.context.id.removeprefix('resp_')}{number}"

    def _event(self, kind: str, **fields: Any) -> bytes:
        number, self._sequence_number = self._sequence_number, self._sequence_number + 1
        return server_sent({"type": kind, "sequence_number": number, **fields}, kind)

    def _response_event(self, status: str, response: bytes) -> bytes:
        event = self._event(f"response.{status}", response=None)
        return event.removesuffix(b"null}\n\n") + response + b"}\n\n"

    def _finished(self) -> bytes:
        status, counted = self._status, self.usage.whole()
        output = [item.document("completed") for item in self._items[:-1]]
        output += [item.document(status) for item in self._items[-1:]]
        cached = {"cached_tokens": self.usage.num_cached_tokens, "cache_write_tokens": 0}
        usage = {
            "input_tokens": counted["prompt_tokens"],
            "input_tokens_details": cached,
            "output_tokens": counted["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": self._num_reasoning_tokens},
            "total_tokens": counted["total_tokens"],
            "seconds": counted["seconds"],
        }
        details = {"reason": "max_output_tokens"} if status == "incomplete" else None
        more = {"completed_at": int(time.time()), "incomplete_details": details, "usage": usage}
        return self._response(status, output, **more)

    def _response(self, status: str, output: list[dict[str, Any]], **more: Any) -> bytes:
        response = {
            "id": self.context.id,
            "object": "response",
            "created_at": self.context.created,
            "status": status,
            "model": self.context.model,
            "output": output,
            "error": None,
            "incomplete_details": None,
            "usage": None,
            **more,
        }
        return compact_json(response).removesuffix(b"}") + b"," + self._echo.removeprefix(b"{")


def echo_of(body: ResponsesRequest, defaults: Mapping[str, float]) -> bytes:
    """The members of a response that repeat the request's, or the model's defaults, as a JSON object."""

    def sampled(name: str) -> float:
        given = getattr(body, name)
        return defaults.get(name, 1.0) if given is None else given

    form = TextFormat() if body.text is None else body.text.format
    choice = body.tool_choice or "auto"
    repeated = {
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "reasoning": None if body.reasoning is None else body.reasoning.model_dump(),
        "store": False,
        "temperature": sampled("temperature"),
        "text": {"format": form.model_dump(by_alias=True, exclude_none=True)},
        "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
        "tools": [tool.model_dump() for tool in body.tools or ()],
        "top_logprobs": body.top_logprobs,
        "top_p": sampled("top_p"),
        "truncation": "disabled",
    }
    return b"".join(json_pieces(repeated))


def add_responses(app: FastAPI, service: Service) -> None:
    @app.post("/v1/responses", response_model=None)
    async def create_response(body: ResponsesRequest, request: Request) -> Response:
        """Generate a response to a text or a conversation."""
        service.check(body, request)

        def translated() -> tuple[ResponsesChat, bytes]:
            turns = body.turns
            if not service.images.are_taken:  # an agent sends what it has once seen with every turn
                turns = without_images(turns)
            return body.chat_request(turns), echo_of(body, service.default_sampling)

        chat, echo = await service.off_loop(request, translated)
        return await converse(
            service,
            request,
            chat,
            "resp_",
            lambda context, form: ItemResponse(context, form, body, service.text, echo),
        )
