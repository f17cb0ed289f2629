"""OpenAI's `/v1/responses`: reasoning, text and function calls as output items, and the stored responses."""

from __future__ import annotations

import json
import time
import uuid
from abc import ABC, abstractmethod
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Request, Response

from ...scheduling.outputs import RequestOutput
from ..parsing.events import Arguments, CallStart, Event, Reasoning, Text
from ..parsing.parser import OutputFormat
from ..protocol.chat_protocol import chat_call, without_images
from ..protocol.errors import ApiError
from ..protocol.responses_protocol import ResponsesRequest, TextFormat
from ..requests.request_record import record_of
from .completions import chat_logprobs
from .conversation import ConversationResponse, converse
from .service import ResponseContext, Service, server_sent
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
        """Fields of the event that ends the text."""
        return {"text": self.text}

    def opening(self, make: Make, where: Fields) -> Iterator[bytes]:
        """The events that begin the item."""
        empty = self.document("in_progress") | ({"content": []} if self.has_part else {})
        yield make("response.output_item.added", **where, item=empty)
        if self.has_part:
            yield make("response.content_part.added", **self._place(where), part=self.part())

    def delta(self, make: Make, where: Fields, text: str, **more: Any) -> bytes:
        """The event of a piece of text, which is appended."""
        self.text += text
        return make(f"response.{self.event}.delta", **self._place(where), delta=text, **more)

    def closing(self, make: Make, where: Fields, status: str) -> Iterator[bytes]:
        """The events that end it."""
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
    """The reasoning before the answer, in plain text."""

    event = "reasoning_text"

    def document(self, status: str) -> Fields:
        fields = {"id": self.id, "type": "reasoning", "status": status, "summary": []}
        return {**fields, "content": [self.part()], "encrypted_content": None}


class CallItem(Item):
    """A function call, perhaps of a function in a namespace; its text are the arguments."""

    event, has_part = "function_call_arguments", False

    def __init__(self, item_id: str, call_id: str, name: str, namespaces: Container[str]) -> None:
        super().__init__(item_id)
        self.call_id, self.full_name = call_id, name
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
            return str(json.loads(self.text)["input"])
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


MAX_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response, and the conversation up to it without instructions."""

    turns: Sequence[dict[str, Any]]
    document: dict[str, Any]
    num_bytes: int


class ResponseStore:
    """Responses by tenant and id, which a client may choose. Where the store is full, the tenant that has
    most loses its oldest: what another stores costs nobody who has less."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._responses: OrderedDict[tuple[int, str], StoredResponse] = OrderedDict()
        self._max_bytes = max_bytes
        self._num_bytes: Counter[int] = Counter()

    def put(self, tenant: int, turns: Sequence[dict[str, Any]], document: dict[str, Any]) -> None:
        """Store a response; one that is larger than the store, as turns with many images may be, is dropped
        in place of all others."""
        size = len(json.dumps([turns, document]))
        place = (tenant, document["id"])
        self._drop(place)
        if size > self._max_bytes:
            return
        self._responses[place] = StoredResponse(turns, document, size)
        self._num_bytes[tenant] += size
        while self._num_bytes.total() > self._max_bytes:
            ((most, _),) = self._num_bytes.most_common(1)
            self._drop(next(place for place in self._responses if place[0] == most))

    def prefix(self, tenant: int, request_id: str) -> str:
        """Prefix of a response's id before the request's: more than `resp_` where that id is taken, for a
        client may send one `X-Request-Id` with several turns."""
        if (tenant, f"resp_{request_id}") not in self._responses:
            return "resp_"
        return f"resp_{uuid.uuid4().hex[:16]}_"

    def get(self, tenant: int, response_id: str) -> StoredResponse:
        """A response; ApiError 404 where there is none of that id, or no longer."""
        stored = self._responses.get((tenant, response_id))
        if stored is None:
            raise ApiError(
                404,
                f"no response {response_id!r}: it was not stored, or is no longer",
                param="previous_response_id",
                code="previous_response_not_found",
            )
        return stored

    def delete(self, tenant: int, response_id: str) -> None:
        """Drop a response; raises as `get`."""
        self.get(tenant, response_id)
        self._drop((tenant, response_id))

    def _drop(self, place: tuple[int, str]) -> None:
        if (stored := self._responses.pop(place, None)) is not None:
            self._num_bytes[place[0]] -= stored.num_bytes


Stored = Callable[[list[Fields], Fields], None]


class ItemResponse(ConversationResponse):
    """The output of a request as a response object, or as OpenAI's streaming events.

    An item is added with its first token, not before. `on_done` receives the assistant's messages and the
    whole response.
    """

    def __init__(
        self,
        context: ResponseContext,
        form: OutputFormat,
        body: ResponsesRequest,
        text: Tokenization,
        on_done: Stored,
    ) -> None:
        super().__init__(context, form)
        self._body, self._text, self._on_done = body, text, on_done
        self._items: list[Item] = []
        self._is_open = False
        self._logprobs: list[dict[str, Any]] = []
        self._sequence_number = 0

    def opening(self) -> Iterator[bytes]:
        begun = self._response("in_progress", [])
        yield self._event("response.created", response=begun)
        yield self._event("response.in_progress", response=begun)

    async def document(self) -> dict[str, Any]:
        async for output, events in self.read():
            deque(self.sent(output, events), 0)
        deque(self._end(), 0)
        return self._finished()

    def sent(self, output: RequestOutput, events: Sequence[Event]) -> Iterator[bytes]:
        self._logprobs += self._scored(output)
        for event in events:
            yield from self._grown(event)

    def ending(self) -> Iterator[bytes]:
        yield from self._end()
        whole = self._finished()
        yield self._event(f"response.{whole['status']}", response=whole)

    def failed(self, error: ApiError) -> bytes:
        response = self._response("failed", [])
        response["error"] = {"code": "server_error", "message": str(error)}
        return self._event("response.failed", response=response)

    def _grown(self, event: Event) -> Iterator[bytes]:
        match event:
            case Text(text):
                yield from self._message_delta(text)
            case Reasoning(text):
                if not isinstance(item := self._last, ReasoningItem):
                    item = ReasoningItem(self._item_id("rs"))
                    yield from self._opened(item)
                yield item.delta(self._event, self._where, text)
            case CallStart(_, call_id, name):
                kind = CustomItem if name in self._body.customs else CallItem
                item = kind(self._item_id("fc"), call_id, name, self._body.namespaces)
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

    def _finished(self) -> dict[str, Any]:
        status = self._status
        last = len(self._items) - 1
        output = [
            item.document(status if index == last else "completed")
            for index, item in enumerate(self._items)
        ]
        response = self._response(status, output)
        response["completed_at"] = int(time.time())
        if status == "incomplete":
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        response["usage"] = self._counts()
        self._on_done([_turn(self._items)], response)
        return response

    def _counts(self) -> dict[str, Any]:
        counted = self.usage.whole()
        return {
            "input_tokens": counted["prompt_tokens"],
            "input_tokens_details": {
                "cached_tokens": self.usage.num_cached_tokens,
                "cache_write_tokens": 0,
            },
            "output_tokens": counted["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": counted["total_tokens"],
            "seconds": counted["seconds"],
        }

    def _scored(self, output: RequestOutput) -> list[dict[str, Any]]:
        if output.logprobs is None:
            return []
        entries = chat_logprobs(self._text, output.logprobs)["content"]
        for entry in (*entries, *(top for token in entries for top in token["top_logprobs"])):
            entry["bytes"] = entry["bytes"] or []
        return entries

    def _response(self, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
        body = self._body
        form = TextFormat() if body.text is None else body.text.format
        choice = body.tool_choice or "auto"
        return {
            "id": self.context.id,
            "object": "response",
            "created_at": self.context.created,
            "status": status,
            "model": self.context.model,
            "output": output,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "reasoning": None if body.reasoning is None else body.reasoning.model_dump(),
            "store": body.store is not False,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "text": {"format": form.model_dump(by_alias=True, exclude_none=True)},
            "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
            "tools": [tool.model_dump() for tool in body.tools or ()],
            "top_logprobs": body.top_logprobs,
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "truncation": "disabled",
            "usage": None,
        }


def _turn(items: list[Item]) -> dict[str, Any]:
    """The output as the assistant's message of a later request."""
    turn: dict[str, Any] = {"role": "assistant", "content": ""}
    for item in items:
        match item:
            case MessageItem():
                turn["content"] += item.text
            case ReasoningItem():
                turn["reasoning_content"] = item.text
            case CallItem():
                call = chat_call(item.call_id, item.full_name, item.text)
                turn.setdefault("tool_calls", []).append(call)
    return turn


def add_responses(app: FastAPI, service: Service) -> None:
    store = ResponseStore()

    @app.post("/v1/responses", response_model=None)
    async def create_response(body: ResponsesRequest, request: Request) -> Response:
        """Generate a response to a text or a conversation."""
        service.check(body, request)
        tenant, turns = record_of(request).tenant, body.turns
        if not service.images.are_taken:  # an agent sends what it has once seen with every turn
            turns = without_images(turns)
        if body.previous_response_id is not None:
            turns = [*store.get(tenant, body.previous_response_id).turns, *turns]
        chat = body.chat_request(turns)

        def keep(answer: list[dict[str, Any]], document: dict[str, Any]) -> None:
            if body.store is not False:
                store.put(tenant, [*turns, *answer], document)

        return await converse(
            service,
            request,
            chat,
            store.prefix(tenant, chat.request_id or record_of(request).request_id),
            lambda context, form: ItemResponse(context, form, body, service.text, keep),
        )

    @app.get("/v1/responses/{response_id}")
    async def show_response(response_id: str, request: Request) -> dict[str, Any]:
        """A stored response."""
        return store.get(record_of(request).tenant, response_id).document

    @app.delete("/v1/responses/{response_id}")
    async def delete_response(response_id: str, request: Request) -> dict[str, Any]:
        """Forget a stored response."""
        store.delete(record_of(request).tenant, response_id)
        return {"id": response_id, "object": "response", "deleted": True}
