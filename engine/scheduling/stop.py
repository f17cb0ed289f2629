"""Stop conditions: EOS and stop token ids, stop strings."""

from __future__ import annotations

from collections.abc import Sequence

from .request import Request


def stop_token_reason(request: Request, token_id: int, eos: frozenset[int]) -> int | None:
    """`token_id` if it ends `request`, to which it has been appended; else None.

    The sampler suppresses such ids before `min_tokens`, so that is not checked again here.
    """
    if token_id in request.params.stop_token_ids:
        return token_id
    if token_id in eos and not request.params.ignore_eos:
        return token_id
    return None


class StopStrings:
    """Incremental search for stop strings in text deltas.

    A suffix that may be the beginning of a stop string is held back until that is decided, so that a stream
    never emits a part of one.
    """

    def __init__(self, stop: Sequence[str], *, include: bool) -> None:
        self._stop = tuple(stop)
        self._include = include
        self._held = ""

    def feed(self, text: str) -> tuple[str, str | None]:
        """Add a delta; returns the text to emit, and the stop string that it completes, if any."""
        if not self._stop:
            return text, None
        self._held += text
        begin, match = min(
            ((self._held.find(s), s) for s in self._stop if s in self._held),
            default=(-1, None),
        )
        if match is not None:
            shown = self._held[: begin + len(match) if self._include else begin]
            self._held = ""
            return shown, match
        keep = max(overlap(self._held, s) for s in self._stop)
        shown, self._held = (
            self._held[: len(self._held) - keep],
            self._held[len(self._held) - keep :],
        )
        return shown, None

    def flush(self) -> str:
        """The text that is held back, at the end of the sequence."""
        shown, self._held = self._held, ""
        return shown


def overlap(text: str, marker: str) -> int:
    """Length of the longest suffix of `text` that is a proper prefix of `marker`."""
    for length in range(min(len(marker) - 1, len(text)), 0, -1):
        if text.endswith(marker[:length]):
            return length
    return 0
