"""Log-probabilities of tokens, as answers show them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..outputs import TokenLogprobs

_ROWS = 64
"""Rows that are normalized at once: of many prompt tokens over a large vocabulary a copy takes gigabytes."""


def logprobs_of(
    logits: torch.Tensor, token_ids: Sequence[int], num_top: int
) -> list[TokenLogprobs]:
    """Log-probability and rank of a token in each row of float32 `logits` [rows, vocab], and the row's
    `num_top` likeliest. The host waits for the device once for some rows."""
    found: list[TokenLogprobs] = []
    ids = torch.tensor(token_ids, device=logits.device)[:, None]
    num_top = min(num_top, logits.shape[-1])
    for begin in range(0, len(token_ids), _ROWS):
        logprobs = logits[begin : begin + _ROWS].log_softmax(dim=-1)
        own = logprobs.gather(1, ids[begin : begin + _ROWS])
        rank = (logprobs > own).sum(dim=-1, keepdim=True) + 1
        # Double has room for each of them as it is.
        columns = [own.double(), rank.double()]
        if num_top:
            columns += [part.double() for part in logprobs.topk(num_top)]
        for token, (logprob, place, *top) in zip(
            token_ids[begin : begin + _ROWS], torch.cat(columns, dim=1).tolist(), strict=True
        ):
            likeliest = zip(map(int, top[num_top:]), top[:num_top], strict=True)
            found.append(TokenLogprobs(token, logprob, int(place), tuple(likeliest)))
    return found


def token_logprobs(logits: torch.Tensor, token_id: int, num_top: int) -> TokenLogprobs:
    """The same of a single row [vocab]."""
    return logprobs_of(logits[None], [token_id], num_top)[0]
