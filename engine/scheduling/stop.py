"""When a sequence has said enough."""

from __future__ import annotations

from collections.abc import Sequence

from .request import Request


def stop_token_reason(request: Request, token_id: int, eos: frozenset[int]) -> int | None:
    """The token that ends `request`, if `token_id` does; `token_id` is already part of it.

    Before `min_tokens` the sampler keeps such tokens out, so they need no second check here.
    """
    if token_id in request.params.stop_token_ids:
        return token_id
    if token_id in eos and not request.params.ignore_eos:
        return token_id
    return None


class StopStrings:
    """Looks for stop strings in text that arrives in pieces.

    Text that may turn out to be the beginning of a stop string is held back until that is decided, so a
    stream never shows a part of it.
    """

    def __init__(self, stop: Sequence[str], *, include: bool) -> None:
        self._stop = tuple(stop)
        self._include = include
        self._held = ""

    def feed(self, text: str) -> tuple[str, str | None]:
        """Add a piece; returns what may be shown now, and the stop string that was met."""
        if not self._stop:
            return text, None
        self._held += text
        begin, found = min(
            ((self._held.find(s), s) for s in self._stop if s in self._held),
            default=(-1, None),
        )
        if found is not None:
            shown = self._held[: begin + len(found) if self._include else begin]
            self._held = ""
            return shown, found
        keep = max(overlap(self._held, s) for s in self._stop)
        shown, self._held = (
            self._held[: len(self._held) - keep],
            self._held[len(self._held) - keep :],
        )
        return shown, None

    def flush(self) -> str:
        """What was held back, once no more text comes."""
        shown, self._held = self._held, ""
        return shown


def overlap(text: str, marker: str) -> int:
    """Length of the longest end of `text` that begins `marker`, and is not all of it."""
    for length in range(min(len(marker) - 1, len(text)), 0, -1):
        if text.endswith(marker[:length]):
            return length
    return 0
