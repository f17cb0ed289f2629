"""Text of a completion: incremental detokenization by whole characters, up to a stop string."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol

from ..base.sampling_params import SamplingParams

REPLACEMENT = "\ufffd"


class TokenDecoder(Protocol):
    """The decoding part of a tokenizer."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str: ...


def text_decoder(tokenizer: Any) -> TokenDecoder:
    """The fastest decoder of a few tokens with the result of a transformers `tokenizer`.

    The tokenizer's own `decode` checks the type of every id first, which takes longer than decoding.
    """
    from transformers import PreTrainedTokenizerFast

    is_plain = getattr(type(tokenizer), "_decode", None) is PreTrainedTokenizerFast._decode
    if is_plain and not tokenizer.clean_up_tokenization_spaces:
        return tokenizer.backend_tokenizer
    return tokenizer


class IncrementalDetokenizer:
    """Text of a growing sequence.

    A token's text depends on its neighbours (leading spaces, bytes of one character), so each delta is
    the difference of two decodings that share a few tokens of context: from `_context` to `_shown`, and
    from `_context` to the end. While the end is an incomplete character, nothing is emitted.
    """

    NUM_CONTEXT_TOKENS = 6

    def __init__(
        self,
        decoder: TokenDecoder,
        prompt_token_ids: Sequence[int],
        *,
        skip_special_tokens: bool = True,
    ) -> None:
        self._decoder = decoder
        self._skip_special_tokens = skip_special_tokens
        # The end of the prompt is context: the leading space of the first word depends on it.
        self._token_ids = list(prompt_token_ids[-self.NUM_CONTEXT_TOKENS :])
        self._context = 0
        self._shown = len(self._token_ids)

    def feed(self, token_ids: Sequence[int]) -> str:
        """Add tokens; returns the text that they complete."""
        self._token_ids.extend(token_ids)
        return self._advance(complete_only=True)

    def flush(self) -> str:
        """The rest, at the end of the sequence; an incomplete character becomes U+FFFD."""
        return self._advance(complete_only=False)

    def _advance(self, *, complete_only: bool) -> str:
        before = self._decode(self._token_ids[self._context : self._shown])
        text = self._decode(self._token_ids[self._context :])
        if len(text) <= len(before) or (complete_only and text.endswith(REPLACEMENT)):
            return ""
        self._context, self._shown = self._shown, len(self._token_ids)
        return text[len(before) :]

    def _decode(self, token_ids: list[int]) -> str:
        return self._decoder.decode(token_ids, skip_special_tokens=self._skip_special_tokens)


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


class CompletionText:
    """Detokenizes one completion, up to a stop string.

    Its tokens are fed one by one; or, where no stop string can end it, added by the engine's thread and
    detokenized in the thread that reads the text.
    """

    def __init__(
        self, decoder: TokenDecoder, prompt: Sequence[int], params: SamplingParams
    ) -> None:
        self.is_deferred = not params.stop
        self._added: deque[tuple[int, Sequence[int], bool]] = deque()
        self._deltas: dict[int, str] = {}
        self._reading = threading.Lock()
        self._detokenizer = IncrementalDetokenizer(
            decoder, prompt, skip_special_tokens=params.skip_special_tokens
        )
        self._stop = StopStrings(params.stop, include=params.include_stop_str_in_output)
        self._min_tokens = params.min_tokens
        self._num_tokens = 0

    def add(self, token_ids: Sequence[int], num_tokens: int, *, is_last: bool) -> None:
        """Add the tokens of an output, which are detokenized by `delta`; `num_tokens` it has with them."""
        self._added.append((num_tokens, token_ids, is_last))

    def delta(self, num_tokens: int) -> str:
        """The new text of the output that ended with that many tokens; they may be read in any order."""
        with self._reading:
            while num_tokens not in self._deltas:
                end, token_ids, is_last = self._added.popleft()
                last = len(token_ids) - 1
                shown = [
                    self.feed(token_id, is_last=is_last and place == last)[0]
                    for place, token_id in enumerate(token_ids)
                ]
                self._deltas[end] = "".join(shown)
            return self._deltas.pop(num_tokens)

    def feed(self, token_id: int, *, is_last: bool) -> tuple[str, str | None]:
        """The text to emit after a token, and the stop string that it completes, if any."""
        self._num_tokens += 1
        delta = self._detokenizer.feed([token_id])
        if self._num_tokens < self._min_tokens:
            return delta, None
        if is_last:
            delta += self._detokenizer.flush()
        shown, met = self._stop.feed(delta)
        if met is None and is_last:
            shown += self._stop.flush()
        return shown, met
