"""Log-probabilities in the formats of OpenAI's chat and completions endpoints."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ...scheduling.outputs import TokenLogprobs
from ..text.text import Tokenization

LOWEST = -9999.0
"""Replaces minus infinity, which JSON cannot represent."""


def chat_logprobs(text: Tokenization, scored: Iterable[TokenLogprobs]) -> dict[str, Any]:
    """`choices[].logprobs` of a chat completion."""
    return {
        "content": [
            {
                **_chat_entry(text, token.token_id, token.logprob),
                "top_logprobs": [_chat_entry(text, *candidate) for candidate in token.top],
            }
            for token in scored
        ]
    }


def _chat_entry(text: Tokenization, token_id: int, logprob: float) -> dict[str, Any]:
    token = text.token(token_id)
    return {
        "token": token.name,
        "logprob": max(logprob, LOWEST),
        "bytes": None if token.raw is None else list(token.raw),
    }


def completion_logprobs(
    text: Tokenization,
    token_ids: Sequence[int],
    scored: Sequence[TokenLogprobs | None],
    offset: int,
) -> dict[str, Any]:
    """`choices[].logprobs` of a completion; `offset` is the text offset of the first token.

    The first token of a prompt has no log-probability: its entries are null. The sampled token is always
    among the candidates, so there may be one more of them than requested.
    """
    tokens = [text.token(token_id) for token_id in token_ids]
    offsets: list[int] = []
    for token in tokens:
        offsets.append(max(offset, 0))
        offset += token.length
    return {
        "tokens": [token.name for token in tokens],
        "token_logprobs": [None if s is None else max(s.logprob, LOWEST) for s in scored],
        "top_logprobs": [None if s is None else _candidates(text, s) for s in scored],
        "text_offset": offsets,
    }


def _candidates(text: Tokenization, scored: TokenLogprobs) -> dict[str, float]:
    named: dict[str, float] = {}
    for token_id, logprob in (*scored.top, (scored.token_id, scored.logprob)):
        # Different tokens may decode to the same text; the most likely one keeps the name.
        named.setdefault(text.token(token_id).name, max(logprob, LOWEST))
    return named
