"""Incremental detokenization, which never emits a part of a character."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

REPLACEMENT = "\ufffd"


class Decoder(Protocol):
    """The decoding part of a tokenizer."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str: ...


def text_decoder(tokenizer: Any) -> Decoder:
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
        self, decoder: Decoder, prompt_token_ids: Sequence[int], *, skip_special_tokens: bool = True
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
