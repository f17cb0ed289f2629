"""Output items of a response: reasoning, a message, and function calls, as they grow."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Iterator
from typing import Any, Protocol

Fields = dict[str, Any]
Make = Callable[..., bytes]


class Item(Protocol):
    """An output item. `make` encodes an event of a type with its fields."""

    def document(self, status: str) -> Fields:
        """The item with what it holds so far."""
        ...

    def opening(self, make: Make, where: Fields) -> Iterator[bytes]:
        """The events that begin the item."""
        ...

    def closing(self, make: Make, where: Fields, status: str) -> Iterator[bytes]:
        """The events that end it."""
        ...


class _PartItem(ABC):
    """An item with one content part of text."""

    part_type: str
    event: str

    def __init__(self, item_id: str) -> None:
        self.id = item_id
        self.text = ""

    def part(self) -> Fields:
        return {"type": self.part_type, "text": self.text}

    @abstractmethod
    def document(self, status: str) -> Fields:
        """The item with the text that it holds so far."""

    def opening(self, make: Make, where: Fields) -> Iterator[bytes]:
        empty = {**self.document("in_progress"), "content": []}
        yield make("response.output_item.added", output_index=where["output_index"], item=empty)
        place = {**where, "item_id": self.id, "content_index": 0}
        yield make("response.content_part.added", **place, part=self.part())

    def delta(self, make: Make, where: Fields, text: str, **more: Any) -> bytes:
        """The event of a piece of text, which is appended."""
        self.text += text
        place = {**where, "item_id": self.id, "content_index": 0}
        return make(f"response.{self.event}.delta", **place, delta=text, **more)

    def done(self) -> Fields:
        """Fields of the event that ends the text."""
        return {"text": self.text}

    def closing(self, make: Make, where: Fields, status: str) -> Iterator[bytes]:
        place = {**where, "item_id": self.id, "content_index": 0}
        yield make(f"response.{self.event}.done", **place, **self.done())
        yield make("response.content_part.done", **place, part=self.part())
        yield make(
            "response.output_item.done",
            output_index=where["output_index"],
            item=self.document(status),
        )


class MessageItem(_PartItem):
    """The answer."""

    part_type, event = "output_text", "output_text"

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


class ReasoningItem(_PartItem):
    """The reasoning before the answer, in plain text."""

    part_type, event = "reasoning_text", "reasoning_text"

    def document(self, status: str) -> Fields:
        fields = {"id": self.id, "type": "reasoning", "status": status, "summary": []}
        return {**fields, "content": [self.part()], "encrypted_content": None}


class CallItem:
    """A function call, perhaps of a function in a namespace."""

    def __init__(self, item_id: str, call_id: str, name: str, namespaces: Container[str]) -> None:
        self.id, self.call_id, self.full_name = item_id, call_id, name
        space, _, inner = name.partition(".")
        self.namespace, self.name = (space, inner) if space in namespaces else (None, name)
        self.arguments = ""

    def document(self, status: str) -> Fields:
        return {
            "id": self.id,
            "type": "function_call",
            "status": status,
            "call_id": self.call_id,
            "name": self.name,
            "arguments": self.arguments,
            **({"namespace": self.namespace} if self.namespace else {}),
        }

    def opening(self, make: Make, where: Fields) -> Iterator[bytes]:
        yield make("response.output_item.added", **where, item=self.document("in_progress"))

    def delta(self, make: Make, where: Fields, text: str) -> bytes:
        """The event of a piece of the arguments, which is appended."""
        self.arguments += text
        fields = {**where, "item_id": self.id, "delta": text}
        return make("response.function_call_arguments.delta", **fields)

    def closing(self, make: Make, where: Fields, status: str) -> Iterator[bytes]:
        fields = {"item_id": self.id, "name": self.name, "arguments": self.arguments}
        yield make("response.function_call_arguments.done", **where, **fields)
        yield make("response.output_item.done", **where, item=self.document(status))
