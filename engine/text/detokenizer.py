"""From token ids to text, piece by piece, and never half a character."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

REPLACEMENT = "\ufffd"


class Decoder(Protocol):
    """The part of a tokenizer that turns ids into text."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str: ...


def text_decoder(tokenizer: Any) -> Decoder:
    """What decodes a few tokens fastest, to what `tokenizer` of transformers would.

    Its own `decode` looks at the type of every id first, which takes longer than decoding them.
    """
    from transformers import PreTrainedTokenizerFast

    is_plain = getattr(type(tokenizer), "_decode", None) is PreTrainedTokenizerFast._decode
    if is_plain and not tokenizer.clean_up_tokenization_spaces:
        return tokenizer.backend_tokenizer
    return tokenizer


class IncrementalDetokenizer:
    """Text of a growing sequence.

    A token's text depends on its neighbours (leading spaces, bytes of one character), so each piece is
    the difference of two decodings that share a few tokens of context: from `_context` to `_shown`, and
    from `_context` to the end. While the end is an incomplete character, nothing is shown.
    """

    NUM_CONTEXT_TOKENS = 6

    def __init__(
        self, decoder: Decoder, prompt_token_ids: Sequence[int], *, skip_special_tokens: bool = True
    ) -> None:
        self._decoder = decoder
        self._skip_special_tokens = skip_special_tokens
        # The end of the prompt is context: it decides whether the first word begins with a space.
        self._token_ids = list(prompt_token_ids[-self.NUM_CONTEXT_TOKENS :])
        self._context = 0
        self._shown = len(self._token_ids)

    def feed(self, token_ids: Sequence[int]) -> str:
        """Add tokens; returns the text that is complete now."""
        self._token_ids.extend(token_ids)
        return self._advance(complete_only=True)

    def flush(self) -> str:
        """The rest, once no more tokens come; an unfinished character becomes U+FFFD."""
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
