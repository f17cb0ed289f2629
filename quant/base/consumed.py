"""`Consumed`: a section of a config that ticks off its keys, so that a reader consumes or refuses each.

A key that another tool wrote, that nobody read, and that is not known to leave the values alone may change
their meaning. It is an error that names the key, never a wrong number.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from typing import Any

from ...base.errors import BadInput


class Consumed(Mapping[str, Any]):
    """A JSON object at path `at` that records which keys were read, of inner objects too. Asking whether a
    key is there, or iterating over the keys, does not tick it off."""

    def __init__(self, raw: Mapping[str, Any], at: str = "") -> None:
        self._raw, self._at = raw, at
        self._read: dict[str, Any] = {}

    def __getitem__(self, key: str) -> Any:
        if key not in self._read:
            value = self._raw[key]
            is_object = isinstance(value, Mapping)
            self._read[key] = Consumed(value, f"{self._at}{key}.") if is_object else value
        return self._read[key]

    def __contains__(self, key: object) -> bool:
        return key in self._raw

    def __iter__(self) -> Iterator[str]:
        return iter(self._raw)

    def __len__(self) -> int:
        return len(self._raw)

    def unread(self, irrelevant: Container[str]) -> Iterator[str]:
        """Paths of unread keys, but for `irrelevant` names and values that turn nothing on."""
        for key, value in self._raw.items():
            if key in irrelevant or not value:
                continue
            if key not in self._read:
                yield f"{self._at}{key}"
            elif isinstance(inner := self._read[key], Consumed):
                yield from inner.unread(irrelevant)

    def refuse_unread(self, irrelevant: Container[str], what: str) -> None:
        """Raises BadInput naming the keys that `unread` finds in the section `what`."""
        if keys := list(self.unread(irrelevant)):
            shown = ", ".join(keys[:3]) + (f" and {len(keys) - 3} more" if keys[3:] else "")
            raise BadInput(
                f"{what} has {shown}, which may change what the weights mean and is not supported"
            )
