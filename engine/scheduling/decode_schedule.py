"""Consecutive decode steps: scheduled from the step before, while the same sequences run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeGuard

from .block_pool import BlockPool, PrefixCache
from .request import Request, Token
from .step_plan import DecodeBatch, DecodeRows, ScheduledRow


class DecodeSchedule:
    """Schedules the steps after one in which every running sequence computed one token and sampled one. They
    are the same with every position one further, and a new block where the last is full: until a sequence
    reaches its limit, blocks run out, or the running sequences change."""

    def __init__(
        self,
        requests: Sequence[Request],
        rows: tuple[ScheduledRow, ...],
        pool: BlockPool,
        cache: PrefixCache,
        block_size: int,
    ) -> None:
        self._requests = requests
        self._pool, self._cache = pool, cache
        self._batch = DecodeBatch(rows, tuple(r.block_ids for r in requests), block_size)
        self.first_rows = DecodeRows(self._batch, 0, has_placeholders=rows[0].has_placeholder)
        self._index = 0
        self._last = min(r.max_tokens - r.num_tokens + r.num_prompt_tokens for r in requests)
        self._ends: tuple[frozenset[int], ...] | None = None

    def next_rows(self) -> DecodeRows | None:
        """The rows of the next step, whose blocks are allocated; None: the batch ends here."""
        index, batch = self._index + 1, self._batch
        beginning = batch.beginning(index)
        if index > self._last or len(beginning) > self._pool.num_free:
            return None
        for row in beginning:
            self._requests[row].block_ids.extend(self._pool.allocate(1))
        # Those of all sequences or of none, because at most the step before is in flight.
        has_placeholders = self._requests[0].num_output_placeholders > 0
        for request in self._requests:
            request.num_computed_tokens += 1
            request.num_output_placeholders += 1
        self._index = index
        return DecodeRows(batch, index, has_placeholders=has_placeholders)

    def has(self, rows: Sequence[ScheduledRow]) -> TypeGuard[DecodeRows]:
        return isinstance(rows, DecodeRows) and rows.batch is self._batch

    def append(
        self,
        rows: DecodeRows,
        sampled: Mapping[str, Sequence[int]],
        eos: frozenset[int],
        now: float,
    ) -> tuple[list[Token], list[Token]]:
        """Append the sampled tokens of a step; returns them, and those that may end their sequence."""
        index, batch = rows.step, self._batch
        for row in batch.beginning(index + 1):  # whose last block this step filled
            position = batch.starts[row] + index
            self._cache.insert(self._requests[row], position, position + 1)
        if self._ends is None:
            self._ends = tuple(request.end_tokens(eos) for request in self._requests)
        tokens = [
            Token(request, sampled[name][0], row, 0)
            for row, (name, request) in enumerate(zip(batch.names, self._requests, strict=True))
        ]
        for request, token_id, _, _ in tokens:
            request.token_ids.append(token_id)
            request.num_output_placeholders -= 1
            times = request.times
            times.last_token = now
            if times.first_token is None:
                times.first_token = now
        if index == self._last:
            return tokens, tokens
        ends = zip(tokens, self._ends, strict=True)
        return tokens, [token for token, end_tokens in ends if token.token_id in end_tokens]


def is_decode_batch(rows: Sequence[ScheduledRow]) -> bool:
    """True if a `DecodeSchedule` may go on from a step of these rows."""
    return all(row.is_decode for row in rows) and len({row.has_placeholder for row in rows}) == 1
