"""Log-probabilities of tokens, as answers show them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ..base.transfer import HostCopy, packed, to_device
from ..scheduling.outputs import TokenLogprobs
from .row import SamplingRow

_ROWS = 64
"""Rows that are normalized at once: of many prompt tokens over a large vocabulary a copy takes gigabytes."""


class Logprobs:
    """Log-probability and rank of a token in each row of scores, and the row's likeliest, on their way.

    Args:
        logits: float32 [rows, vocab].
        tokens: int64 [rows], on the same device.
        num_top: how many of the likeliest.
    """

    def __init__(self, logits: torch.Tensor, tokens: torch.Tensor, num_top: int) -> None:
        self._num_top = min(num_top, logits.shape[-1])
        pieces: list[torch.Tensor] = []
        for begin in range(0, len(tokens), _ROWS):
            logprobs = logits[begin : begin + _ROWS].log_softmax(dim=-1)
            ids = tokens[begin : begin + _ROWS, None]
            own = logprobs.gather(1, ids)
            rank = (logprobs > own).sum(dim=-1, keepdim=True) + 1
            columns = [ids, rank, own]
            if self._num_top:
                columns += logprobs.topk(self._num_top)
            # Double has room for each of them as it is.
            pieces.append(torch.cat([column.double() for column in columns], dim=1))
        self._table = HostCopy(torch.cat(pieces))

    def result(self) -> list[TokenLogprobs]:
        """Row by row; the host waits for them together."""
        found: list[TokenLogprobs] = []
        for token, rank, logprob, *top in self._table.wait().tolist():
            likeliest = zip(map(int, top[self._num_top :]), top[: self._num_top], strict=True)
            found.append(TokenLogprobs(int(token), logprob, int(rank), tuple(likeliest)))
        return found


class WantedLogprobs:
    """Those of the rows that ask for them."""

    def __init__(
        self, logits: torch.Tensor, tokens: torch.Tensor, rows: Sequence[SamplingRow]
    ) -> None:
        self._count = len(rows)
        asked: dict[int, list[int]] = {}
        for index, row in enumerate(rows):
            if row.params.logprobs is not None:
                asked.setdefault(row.params.logprobs, []).append(index)
        self._found: list[tuple[list[int], Logprobs]] = []
        for num_top, indices in asked.items():
            own, ids = logits, tokens
            if len(indices) < len(rows):
                (places,) = packed([indices], logits.device)
                own, ids = logits.index_select(0, places), tokens.index_select(0, places)
            self._found.append((indices, Logprobs(own, ids, num_top)))

    def result(self) -> list[TokenLogprobs | None]:
        """Row by row; None for the others."""
        found: list[TokenLogprobs | None] = [None] * self._count
        for indices, scored in self._found:
            for index, one in zip(indices, scored.result(), strict=True):
                found[index] = one
        return found


def logprobs_of(
    logits: torch.Tensor, token_ids: Sequence[int], num_top: int
) -> list[TokenLogprobs]:
    """`Logprobs` of tokens that are known, row by row of `logits` [rows, vocab]."""
    if not token_ids:
        return []
    tokens = to_device(np.array(token_ids, dtype=np.int64), logits.device)
    return Logprobs(logits, tokens, num_top).result()


def token_logprobs(logits: torch.Tensor, token_id: int, num_top: int) -> TokenLogprobs:
    """The same of a single row [vocab]."""
    return logprobs_of(logits[None], [token_id], num_top)[0]
