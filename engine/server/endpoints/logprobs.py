"""Log-probabilities in the formats of OpenAI's chat and completions endpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
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
    name: Callable[[int], str],
    num_top: int,
) -> dict[str, Any]:
    """`choices[].logprobs` of a completion; `offset` is the text offset of the first token.

    The first token of a prompt has no log-probability: its entries are null. The sampled token is always
    among the candidates, so there may be one more of them than the `num_top` requested.
    """
    offsets: list[int] = []
    for token_id in token_ids:
        offsets.append(max(offset, 0))
        offset += text.token(token_id).length
    return {
        "tokens": [name(token_id) for token_id in token_ids],
        "token_logprobs": [None if s is None else max(s.logprob, LOWEST) for s in scored],
        "top_logprobs": [None if s is None else _candidates(s, name, num_top) for s in scored],
        "text_offset": offsets,
    }


def token_id_name(token_id: int) -> str:
    """The name of a token under vLLM's `return_tokens_as_token_ids`."""
    return f"token_id:{token_id}"


def prompt_logprobs(
    text: Tokenization, scored: Sequence[TokenLogprobs | None], num_top: int
) -> list[dict[str, Any] | None]:
    """`choices[].prompt_logprobs` in vLLM's form: for each position the top tokens and the prompt's own, by
    token id; null at the first position, which nothing predicts."""
    return [None if token is None else _by_id(text, token, num_top) for token in scored]


def _by_id(text: Tokenization, scored: TokenLogprobs, num_top: int) -> dict[str, Any]:
    ranked = [(token, logprob, rank) for rank, (token, logprob) in enumerate(scored.top, start=1)]
    given = (scored.token_id, scored.logprob, scored.rank)
    return {
        str(token_id): {
            "logprob": max(logprob, LOWEST),
            "rank": rank,
            "decoded_token": text.token(token_id).name,
        }
        for token_id, logprob, rank in (*ranked[:num_top], given)
    }


def _candidates(
    scored: TokenLogprobs, name: Callable[[int], str], num_top: int
) -> dict[str, float]:
    named: dict[str, float] = {}
    for token_id, logprob in (*scored.top[:num_top], (scored.token_id, scored.logprob)):
        # Different tokens may decode to the same text; the most likely one keeps the name.
        named.setdefault(name(token_id), max(logprob, LOWEST))
    return named
