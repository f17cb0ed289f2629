"""Logprobs of sampled and prompt tokens, with ranks and top-k alternatives."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from ..base.transfer import HostCopy, packed, to_device
from ..scheduling.outputs import TokenLogprobs
from .row import SamplingRow

SLICE_BYTES = 64 << 20
"""Bytes of the logits, in float32, of a slice of prompt positions: whatever vocabulary and prompt."""
SLICE_ROWS = 256
"""Most rows of a slice: enough for an efficient GEMM of the LM head."""
_ROWS = 64
"""Rows per log-softmax: for a long prompt and a large vocabulary one copy would take gigabytes."""


def rows_per_slice(vocab_size: int) -> int:
    """Prompt positions whose logits are in memory at once."""
    return max(1, min(SLICE_ROWS, SLICE_BYTES // (4 * vocab_size)))


class Logprobs:
    """Logprob and rank of a token in each row of logits, and the row's top tokens; copied asynchronously.

    Args:
        logits: float32 [rows, vocab].
        tokens: int64 [rows], on the same device.
        num_top: number of top tokens per row.
    """

    def __init__(self, logits: torch.Tensor, tokens: torch.Tensor, num_top: int) -> None:
        self._num_top = min(num_top, logits.shape[-1])
        chunks: list[torch.Tensor] = []
        for begin in range(0, len(tokens), _ROWS):
            logprobs = logits[begin : begin + _ROWS].log_softmax(dim=-1)
            ids = tokens[begin : begin + _ROWS, None]
            of_token = logprobs.gather(1, ids)
            rank = (logprobs > of_token).sum(dim=-1, keepdim=True) + 1
            columns = [ids, rank, of_token]
            if self._num_top:
                columns += logprobs.topk(self._num_top)
            # Float32 represents ids and ranks below 2^24 exactly; an Apple GPU has no float64.
            chunks.append(torch.cat([column.float() for column in columns], dim=1))
        self._table = HostCopy(torch.cat(chunks))

    def result(self) -> list[TokenLogprobs]:
        """One entry per row; synchronises with the device once."""
        results: list[TokenLogprobs] = []
        for token, rank, logprob, *top in self._table.wait().tolist():
            top_tokens = zip(map(int, top[self._num_top :]), top[: self._num_top], strict=True)
            results.append(TokenLogprobs(int(token), logprob, int(rank), tuple(top_tokens)))
        return results


class WantedLogprobs:
    """Logprobs of the rows whose sampling parameters request them."""

    def __init__(
        self, logits: torch.Tensor, tokens: torch.Tensor, rows: Sequence[SamplingRow]
    ) -> None:
        self._count = len(rows)
        rows_by_num_top: dict[int, list[int]] = {}
        for index, row in enumerate(rows):
            if row.params.logprobs is not None:
                rows_by_num_top.setdefault(row.params.logprobs, []).append(index)
        self._parts: list[tuple[list[int], Logprobs]] = []
        for num_top, indices in rows_by_num_top.items():
            selected, ids = logits, tokens
            if len(indices) < len(rows):
                (row_ids,) = packed([indices], logits.device)
                selected, ids = logits.index_select(0, row_ids), tokens.index_select(0, row_ids)
            self._parts.append((indices, Logprobs(selected, ids, num_top)))

    def result(self) -> list[TokenLogprobs | None]:
        """One entry per row; None for rows that request none."""
        results: list[TokenLogprobs | None] = [None] * self._count
        for indices, logprobs in self._parts:
            for index, result in zip(indices, logprobs.result(), strict=True):
                results[index] = result
        return results


def logprobs_of(
    logits: torch.Tensor, token_ids: Sequence[int], num_top: int
) -> list[TokenLogprobs]:
    """Logprobs of given tokens, one per row of `logits` [rows, vocab]."""
    if not token_ids:
        return []
    tokens = to_device(np.array(token_ids, dtype=np.int64), logits.device)
    return Logprobs(logits, tokens, num_top).result()


def sliced_logprobs(
    logits: Callable[[torch.Tensor], torch.Tensor],
    hidden: torch.Tensor,
    token_ids: Sequence[int],
    num_top: int,
    num_rows: int,
) -> list[TokenLogprobs]:
    """Logprobs of given tokens, one per row of `hidden` [rows, hidden], with logits of `num_rows` at once."""
    tokens = to_device(np.array(token_ids, dtype=np.int64), hidden.device)
    parts = [
        Logprobs(
            logits(hidden[begin : begin + num_rows]), tokens[begin : begin + num_rows], num_top
        )
        for begin in range(0, len(token_ids), num_rows)
    ]
    return [each for part in parts for each in part.result()]


def token_logprobs(logits: torch.Tensor, token_id: int, num_top: int) -> TokenLogprobs:
    """`logprobs_of` a single row [vocab]."""
    return logprobs_of(logits[None], [token_id], num_top)[0]
