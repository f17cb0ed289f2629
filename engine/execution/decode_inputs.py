"""Static input tensors of decode steps, which graphs are captured on, and their two fillers.

`fill_host` writes values of decode rows, `fill_device` those made on the device. A step that follows another
of its batch changes them in place: positions, slots and lengths grow by one, and a new block is one more
entry.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

import numpy as np
import torch

from ..base.device import packed, to_device
from ..kernels.attention.batch import AttentionBatch, DecodeConstants, DecodeGroup
from ..kernels.attention.flashinfer_plans import CapturedPlans
from ..kernels.common.graphs import addresses
from ..kernels.elementwise.native_rows import AdvanceCall
from ..model.layers.attention import StepInputs
from ..model.layers.projection import NO_SLOT
from ..model.layers.state import NO_STATES, StateBatch
from ..scheduling.block_pool import NULL_BLOCK
from ..scheduling.request import NULL_SLOT
from ..scheduling.step_plan import DecodeBatch, DecodeRows


class DecodeInputs:
    """Static inputs of up to `rows` sequences; padding sees one token of the null block."""

    def __init__(
        self, rows: int, max_blocks: int, block_size: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        self._block_size, self._dtype, self._device = block_size, dtype, device
        # Rows of whole cache lines: each column is aligned, as Triton's kernels specialize for.
        self._columns = torch.zeros(7, -(-rows // 8) * 8, dtype=torch.int64, device=device)
        columns = self._columns[:, :rows]
        self._token_ids, self._positions, self._slots, self._lengths = columns[:4]
        self._evicted_spans, self.state_slots, self.adapter_slots = columns[4:]
        self._lengths.fill_(1)
        self.most_rows, self._rows = rows, torch.arange(rows, device=device)
        self._tables = torch.full((rows, max_blocks), NULL_BLOCK, device=device)
        self._constants = DecodeConstants.of(self._rows, max_blocks)
        # The batch that was written last, if it is still in place, and its step.
        self._batch: DecodeBatch | None = None
        self._index = 0
        self._advances = False  # a captured step computed it, and can go on from it
        # Tokens in the blocks of the sequences that were written last, and steps since.
        self._known: Sequence[int] = ()
        self._since = 0
        self._mirror = BlockTables(rows, max_blocks)
        # Values that the other tensor-parallel ranks lack: rows, and width of their tables.
        self._new_rows = self._new_width = 0
        self._arrays = None
        self.on_host = device.type == "cpu"  # the host writes to the tensors themselves
        if self.on_host:
            self._arrays = [tensor.numpy() for tensor in (*columns, self._tables)]
            self._counters = self._columns.numpy()[1:4]
            self._mirror.tables = self._arrays[-1]

    def num_held(self, size: int) -> list[int]:
        counts = [count + self._since for count in self._known]
        return counts + [1] * (size - len(counts))

    def step(
        self,
        size: int,
        sink_length: int,
        aux_hidden_state_layers: tuple[int, ...],
        plans: CapturedPlans | None = None,
        states: Sequence[torch.Tensor] = (),
    ) -> StepInputs:
        """The inputs of a step of `size` rows, on these tensors; `states` are those of the state cache."""
        constants = DecodeConstants(*(tensor[:size] for tensor in self._constants))
        group = DecodeGroup(
            self._rows[:size],
            self._tables[:size].view(-1),
            self._lengths[:size],
            self._evicted_spans[:size],
            sink_length,
            constants=None if sink_length else constants,
        )
        batch = AttentionBatch([], group, self._block_size, self._dtype, plans=plans)
        rows = self._token_ids[:size], self._positions[:size], self._slots[:size]
        kept = StateBatch(tuple(states), self.state_slots[:size]) if states else NO_STATES
        return StepInputs(
            *rows, batch, aux_hidden_state_layers=aux_hidden_state_layers, states=kept
        )

    def clear(self) -> None:
        """Make every row padding; the tables stay."""
        self._forget_batch()
        self._columns.zero_()
        self._columns[2].fill_(NULL_BLOCK * self._block_size)
        self._columns[3].fill_(1)
        self.adapter_slots.fill_(NO_SLOT)

    def take_unshared(self) -> tuple[int, ...]:
        """Rows, and width of the part of their tables that changed; see `StaticInputs`."""
        unshared = self._new_rows, self._new_width
        self._new_width = 0
        return unshared

    def share(self, unshared: tuple[int, ...], broadcast: Callable[[torch.Tensor], None]) -> None:
        rows, width = unshared
        broadcast(self._columns)
        if width:
            tables = self._tables[:rows, :width]
            packed_tables = tables.contiguous()
            broadcast(packed_tables)
            tables.copy_(packed_tables)

    def fill_device(
        self,
        inputs: StepInputs,
        group: DecodeGroup,
        rows: int,
        size: int,
        adapter_slots: Sequence[int] = (),
    ) -> None:
        """Copy the values of a step whose input tensors exist already."""
        self._forget_batch()
        self._token_ids[:rows] = inputs.token_ids
        self._positions[:rows] = inputs.positions
        self._slots[:rows] = inputs.slots
        self._lengths[:rows] = group.lengths
        self._evicted_spans[:rows] = group.evicted_spans
        if inputs.states.tensors:
            assert inputs.states.slots is not None
            self.state_slots[:rows] = inputs.states.slots
        if adapter_slots:
            self.adapter_slots[:rows] = packed([adapter_slots], self._device)[0]
        tables = group.block_ids.view(rows, -1)
        self._tables[:rows, : tables.shape[1]] = tables
        assert group.counts is not None
        self._known, self._since = group.counts.num_held, 0
        self._pad(rows, size, tables.shape[1])

    def fill_host(
        self,
        rows: DecodeRows,
        size: int,
        sampled: torch.Tensor | None = None,
        adapter_slots: Sequence[int] = (),
        *,
        advances: bool = False,
    ) -> bool:
        """Write a decode step; in place, if the step before it in its batch was written last.

        `sampled` are the tokens [rows] of rows with placeholders, on the device. With `advances` the captured
        step begins with `advance_step`. Returns True if that goes on from the step before, which began so
        too: the host then writes nothing but new blocks.
        """
        follows = rows.batch is self._batch and rows.step == self._index + 1
        by_itself = follows and advances and self._advances
        if by_itself:
            self._begin_blocks(rows)
        elif follows:
            self._advance(rows)
        else:
            self._begin_batch(rows, size, adapter_slots)
        self._batch, self._index, self._advances = rows.batch, rows.step, advances
        self._known, self._since = rows.batch.starts, rows.step + 1
        if by_itself:
            return True
        if sampled is not None:
            self._token_ids[: len(rows)].copy_(sampled)
        elif self._arrays is not None:
            self._arrays[0][: len(rows)] = rows.token_ids
        else:
            (token_ids,) = packed([rows.token_ids], self._device)
            self._token_ids[: len(rows)].copy_(token_ids)
        return False

    def advance_call(self, rows: int, sampled: torch.Tensor) -> ctypes.Structure:
        """Argument of `advance_step` for a step of so many rows, which leaves its tokens in `sampled`."""
        columns = self._token_ids, self._positions, self._slots, self._lengths
        pointers = addresses(*columns, self._tables, sampled)
        return AdvanceCall(*pointers, rows, self._tables.shape[1], self._block_size, 0)

    def _begin_batch(self, rows: DecodeRows, size: int, adapter_slots: Sequence[int]) -> None:
        """Write all but the tokens; of the tables only what the batch before did not have."""
        batch, count, block_size = rows.batch, len(rows), self._block_size
        values = np.zeros((6, count), np.int64)
        positions, slots, lengths = values[:3]
        values[-2:] = [row.state_slot for row in batch.rows], adapter_slots or [NO_SLOT] * count
        positions[:] = batch.starts
        positions += rows.step
        np.add(positions, 1, out=lengths)
        self._mirror.take(batch.tables)
        places = positions // block_size
        width = int(places.max()) + 1
        slots[:] = self._mirror.tables[np.arange(count), places]
        slots *= block_size
        slots += positions % block_size
        if self._arrays is not None:
            self._columns.numpy()[1:, :count] = values
        else:
            self._columns[1:, :count].copy_(to_device(values, self._device))
            tables = np.ascontiguousarray(self._mirror.tables[:count, :width])
            self._tables[:count, :width].copy_(to_device(tables, self._device))
        self._pad(count, size, width)

    def _advance(self, rows: DecodeRows) -> None:
        """Move every row to its next position; on a GPU in stream order, after the steps in flight."""
        begun = self._begin_blocks(rows)
        if self._arrays is not None:
            self._counters[:, : len(rows)] += 1
            slots = self._arrays[2]
            for row, _, block_id in begun:
                slots[row] = block_id * self._block_size
            return
        self._columns[1:4, : len(rows)] += 1
        if begun:
            width = self._tables.shape[1]
            places, columns, blocks = zip(*begun, strict=True)
            at = [row * width + column for row, column in zip(places, columns, strict=True)]
            new_slots = [block * self._block_size for block in blocks]
            at, block_ids, of_rows, slots = packed([at, blocks, places, new_slots], self._device)
            self._tables.view(-1).index_copy_(0, at, block_ids)
            self._slots.index_copy_(0, of_rows, slots)

    def _begin_blocks(self, rows: DecodeRows) -> list[tuple[int, int, int]]:
        """Blocks that begin with this token: (row, place in its table, block); the mirror takes them too."""
        begun: list[tuple[int, int, int]] = []
        batch = rows.batch
        for row in batch.beginning(rows.step):
            column = (batch.starts[row] + rows.step) // self._block_size
            block_id = batch.tables[row][column]
            self._mirror.append(row, column, block_id)
            begun.append((row, column, block_id))
            self._new_width = max(self._new_width, column + 1)
        return begun

    def _forget_batch(self) -> None:
        if self._batch is not None:
            self._batch = None
            self._mirror.forget()

    def _pad(self, rows: int, size: int, width: int) -> None:
        self._new_rows, self._new_width = size, max(self._new_width, width)
        if rows == size:
            return
        self._token_ids[rows:size] = 0
        self._positions[rows:size] = 0
        self._slots[rows:size] = NULL_BLOCK * self._block_size
        self._lengths[rows:size] = 1
        self._evicted_spans[rows:size] = 0
        self.state_slots[rows:size] = NULL_SLOT
        self.adapter_slots[rows:size] = NO_SLOT
        self._tables[rows:size, 0] = NULL_BLOCK


class BlockTables:
    """Block tables [rows, blocks] of a decode batch in NumPy; entries that were written before stay. A table
    is identified by its list, which a sequence only appends to; shared ones are not read again, though rows
    moved up. Another list of the same entries is compared, not written."""

    def __init__(self, rows: int, max_blocks: int) -> None:
        self.tables = np.full((rows, max_blocks), NULL_BLOCK, np.int64)
        self._lists: list[Sequence[int]] = []
        self._written: list[int] = []

    def take(self, lists: Sequence[Sequence[int]]) -> None:
        """Write the tables of a batch."""
        places = {id(entries): row for row, entries in enumerate(self._lists)}
        sources = [places.get(id(entries), -1) for entries in lists]
        for row, entries in enumerate(lists[: len(self._lists)]):
            if sources[row] < 0 and entries == self._lists[row]:
                sources[row] = row
        written = [self._written[source] if source >= 0 else 0 for source in sources]
        moved = [row for row, source in enumerate(sources) if source not in (-1, row)]
        if moved:
            self.tables[moved] = self.tables[[sources[row] for row in moved]]
        for row, entries in enumerate(lists):
            new = entries[written[row] :]  # once: another thread may append to it meanwhile
            self.tables[row, written[row] : written[row] + len(new)] = new
            written[row] += len(new)
        self._lists, self._written = list(lists), written

    def append(self, row: int, column: int, block_id: int) -> None:
        self.tables[row, column] = block_id
        self._written[row] = column + 1

    def forget(self) -> None:
        self._lists, self._written = [], []
