"""Token counts of penalized sequences, in a table on the device."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ..base.transfer import to_device
from ..scheduling.token_view import TokenView
from .row import SamplingRow

IN_PROMPT, IN_OUTPUT = 1, 2
"""Added to a count by a prompt token (once), and by each occurrence in the output."""


@dataclass(slots=True)
class _Counted:
    """A sequence in the table: its list of tokens, its table row, how many of its tokens are counted."""

    tokens: Sequence[int]
    table_row: int
    num_prompt_tokens: int
    length: int = 0


class TokenCounts:
    """A table row of counts for each penalized sequence; each step adds the sequence's new tokens.

    A sequence is identified by its list of tokens, which only grows. Table rows are reused, least recently
    used first.
    """

    def __init__(self) -> None:
        self._table = torch.empty(0, 0, dtype=torch.int32)
        self._held: OrderedDict[int, _Counted] = OrderedDict()

    def of(
        self, rows: Sequence[SamplingRow], vocab_size: int, device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Counts, int32 [table rows, vocab], and the table row of each sampling row, int64 [rows]."""
        self._ensure_capacity(len({id(_tokens_of(row)) for row in rows}), vocab_size, device)
        table_rows = [self._counted(row).table_row for row in rows]
        fresh: dict[int, None] = {}
        of_prompt: list[int] = []
        of_output: list[int] = []
        for row, table_row in zip(rows, table_rows, strict=True):
            held = self._held[id(_tokens_of(row))]
            if not held.length:
                fresh[table_row] = None
                prompt = row.known[: row.num_prompt_tokens]
                of_prompt += [table_row * vocab_size + token for token in prompt]
                held.length = len(prompt)
            new = row.known[held.length :]
            of_output += [table_row * vocab_size + token for token in new]
            held.length += len(new)
        if fresh:
            self._table.index_fill_(0, _indices(list(fresh), device), 0)
        flat = self._table.view(-1)
        if of_prompt:
            flat.index_fill_(0, _indices(of_prompt, device), IN_PROMPT)
        _add(flat, of_output, device)
        if not any(row.draft_ids for row in rows):
            return self._table, _indices(table_rows, device)
        counts = self._table.index_select(0, _indices(table_rows, device))
        drafts = [i * vocab_size + token for i, row in enumerate(rows) for token in row.draft_ids]
        _add(counts.view(-1), drafts, device)
        return counts, torch.arange(len(rows), device=device)

    def _ensure_capacity(self, count: int, vocab_size: int, device: torch.device) -> None:
        """Grow the table to at least `count` rows."""
        table = self._table
        if table.device != device or table.shape[1] != vocab_size:
            self._held.clear()
            table = torch.empty(0, vocab_size, dtype=torch.int32, device=device)
        if len(table) < count:
            wider = table.new_zeros(1 << (count - 1).bit_length(), vocab_size)
            wider[: len(table)] = table
            table = wider
        self._table = table

    def _counted(self, row: SamplingRow) -> _Counted:
        """The entry of the row's sequence; assigns a table row to a new one."""
        tokens = _tokens_of(row)
        held = self._held.get(id(tokens))
        if held is None:
            table_row = len(self._held)
            if table_row == len(self._table):
                table_row = self._held.popitem(last=False)[1].table_row
            held = self._held[id(tokens)] = _Counted(tokens, table_row, row.num_prompt_tokens)
        elif held.length > len(row.known) or held.num_prompt_tokens != row.num_prompt_tokens:
            held.length, held.num_prompt_tokens = 0, row.num_prompt_tokens
        self._held.move_to_end(id(tokens))
        return held


def _tokens_of(row: SamplingRow) -> Sequence[int]:
    return row.known.booked if isinstance(row.known, TokenView) else row.known


def _indices(values: Sequence[int], device: torch.device) -> torch.Tensor:
    return to_device(np.array(values, dtype=np.int64), device)


def _add(flat: torch.Tensor, indices: Sequence[int], device: torch.device) -> None:
    if indices:
        twos = torch.full((len(indices),), IN_OUTPUT, dtype=torch.int32, device=device)
        flat.index_add_(0, _indices(indices, device), twos)
