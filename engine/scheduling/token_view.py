"""Immutable views of a sequence's tokens, with a placeholder for the token that an in-flight step samples."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import overload

OUTPUT_PLACEHOLDER = -1
"""Token id that stands for the token which the previous, in-flight step samples."""


class TokenView(Sequence[int]):
    """The first `length` tokens of `booked`, followed by `last`, if given, which is not appended to it yet.

    A step needs the history of its sequences, which may be long, and seldom reads it: a view copies none of
    it. `booked` is the list of a Request. The scheduler alone writes that list, and only appends to it; a
    sequence that loses tokens gets another list. So a view is constant, for any thread.

    Attributes:
        booked: the list itself; its identity identifies the sequence.
    """

    __slots__ = ("_last", "_length", "booked")

    def __init__(
        self, booked: Sequence[int], length: int | None = None, last: int | None = None
    ) -> None:
        self.booked = booked
        self._length = len(booked) if length is None else length
        self._last = last

    @property
    def has_placeholder(self) -> bool:
        """Whether the last token is an output placeholder."""
        return self._last == OUTPUT_PLACEHOLDER

    def resolved(self, token_id: int) -> TokenView:
        """The same tokens with `token_id` in place of the placeholder."""
        assert self.has_placeholder
        return TokenView(self.booked, self._length, token_id)

    def first(self, count: int) -> TokenView:
        """The first `count` of these tokens."""
        if count == len(self):
            return self
        assert count <= self._length
        return TokenView(self.booked, count)

    def __len__(self) -> int:
        return self._length if self._last is None else self._length + 1

    def __iter__(self) -> Iterator[int]:
        yield from islice(self.booked, self._length)
        if self._last is not None:
            yield self._last

    def __repr__(self) -> str:
        return f"TokenView({list(self)})"

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[int]: ...
    def __getitem__(self, index: int | slice) -> int | Sequence[int]:
        length, last = self._length, self._last
        if isinstance(index, slice):
            start, stop, stride = index.indices(len(self))
            if stride != 1:
                return list(self)[index]
            booked = self.booked[start : min(stop, length)]
            if last is None or not start <= length < stop:
                return booked
            return [*booked, last]
        position = range(len(self))[index]
        return self.booked[position] if last is None or position < length else last
