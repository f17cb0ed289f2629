"""Static input tensors of decode steps, which graphs are captured on.

A step that follows another of its batch changes them in place: every position, slot and length grows by one,
and where a sequence takes a block, its table has one more entry. So nothing is rebuilt, and nothing but those
entries and tokens that only the host knows is copied to a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from ..base.device import packed, to_device
from ..cache.step_inputs import Run
from ..kernels.attention.paged_attention import AttentionBatch, DecodeGroup
from ..kernels.attention.step_plans import StepPlans
from ..kernels.graphs.advance_step import AdvanceCall
from ..model.layers.attention import StepInputs
from ..model.layers.projection import NO_SLOT
from ..scheduling.block_pool import NULL_BLOCK
from ..scheduling.step_plan import DecodeBatch, DecodeRows


def is_plain_decode(runs: Sequence[Run]) -> bool:
    """Whether every run is one token of text, at its plain position, of a sequence with all its blocks."""
    return all(
        len(run.token_ids) == 1
        and run.tree is None
        and not run.num_evicted
        and NULL_BLOCK not in run.block_ids
        and run.rope_positions is None
        and all(image.offset + image.num_tokens <= run.start for image in run.images)
        for run in runs
    )


class DecodeInputs:
    """Token ids, positions, slots, lengths, adapters and block tables of up to `rows` sequences.

    Rows of padding see one token, of the null block. On a CPU NumPy arrays share the tensors' memory.
    """

    def __init__(
        self, rows: int, max_blocks: int, block_size: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        self._block_size, self._dtype, self._device = block_size, dtype, device
        # Rows of whole cache lines: each column is aligned, as Triton's kernels specialize for.
        self._columns = torch.zeros(6, -(-rows // 8) * 8, dtype=torch.int64, device=device)
        columns = self._columns[:, :rows]
        self._token_ids, self._positions, self._slots, self._lengths = columns[:4]
        self._evicted_spans, self.adapter_slots = columns[4:]
        self._lengths.fill_(1)
        self._rows = torch.arange(rows, device=device)
        self._tables = torch.full((rows, max_blocks), NULL_BLOCK, device=device)
        self._filled: list[Sequence[int] | None] = [None] * rows
        # Of the batch that was written last, if it is still in place.
        self._batch: DecodeBatch | None = None
        self._index = 0
        self._advances = (
            False  # whether a captured step computed it, which can go on from it by itself
        )
        # Of the sequences that were written last: tokens in their blocks, and steps since.
        self._known: Sequence[int] = ()
        self._since = 0
        self._mirror = BlockTables(rows, max_blocks)
        # What the other tensor-parallel ranks lack: rows, and width of their tables.
        self._new_rows = self._new_width = 0
        self._arrays = None
        if device.type == "cpu":
            self._arrays = [tensor.numpy() for tensor in (*columns, self._tables)]
            self._counters = self._columns.numpy()[1:4]
            self._mirror.tables = self._arrays[-1]

    @property
    def most_rows(self) -> int:
        """Rows of the largest step."""
        return len(self._filled)

    @property
    def takes_runs(self) -> bool:
        """Whether `fill_runs` can write to the tensors."""
        return self._arrays is not None

    def num_held(self, size: int) -> list[int]:
        """Tokens in the blocks of each of `size` rows, padding included, as the host knows them."""
        held = [count + self._since for count in self._known]
        return held + [1] * (size - len(held))

    def step(
        self,
        size: int,
        sink_length: int,
        aux_hidden_state_layers: tuple[int, ...],
        plans: StepPlans | None = None,
    ) -> StepInputs:
        """The inputs of a step of `size` rows, on these tensors."""
        group = DecodeGroup(
            self._rows[:size],
            self._tables[:size].view(-1),
            self._lengths[:size],
            self._evicted_spans[:size],
            sink_length,
        )
        batch = AttentionBatch([], group, self._block_size, self._dtype, plans=plans)
        rows = self._token_ids[:size], self._positions[:size], self._slots[:size]
        return StepInputs(*rows, batch, aux_hidden_state_layers=aux_hidden_state_layers)

    def clear(self) -> None:
        """Make every row padding, whose tables stay."""
        self._forget_batch()
        self._columns.zero_()
        self._columns[2].fill_(NULL_BLOCK * self._block_size)
        self._columns[3].fill_(1)
        self.adapter_slots.fill_(NO_SLOT)

    def take_news(self) -> tuple[int, ...]:
        """See `StaticInputs`: rows, and how wide the part of their tables is in which some changed."""
        news = self._new_rows, self._new_width
        self._new_width = 0
        return news

    def share(self, news: tuple[int, ...], broadcast: Callable[[torch.Tensor], None]) -> None:
        """See `StaticInputs`."""
        rows, width = news
        broadcast(self._columns)
        if width:
            tables = self._tables[:rows, :width]
            packed_tables = tables.contiguous()
            broadcast(packed_tables)
            tables.copy_(packed_tables)

    def fill(
        self,
        inputs: StepInputs,
        group: DecodeGroup,
        rows: int,
        size: int,
        adapter_slots: Sequence[int] = (),
    ) -> None:
        """Copy a step's values."""
        self._forget_batch()
        self._token_ids[:rows] = inputs.token_ids
        self._positions[:rows] = inputs.positions
        self._slots[:rows] = inputs.slots
        self._lengths[:rows] = group.lengths
        self._evicted_spans[:rows] = group.evicted_spans
        if adapter_slots:
            self.adapter_slots[:rows] = packed([adapter_slots], self._device)[0]
        tables = group.block_ids.view(rows, -1)
        self._tables[:rows, : tables.shape[1]] = tables
        assert group.counts is not None
        self._known, self._since = group.counts.num_held, 0
        self._filled[:rows] = [None] * rows
        self._pad(rows, size, tables.shape[1])

    def fill_runs(self, runs: Sequence[Run], size: int, adapter_slots: Sequence[int] = ()) -> None:
        """Write the values of a plain decode step."""
        assert self._arrays is not None
        self._forget_batch()
        token_ids, positions, slots, lengths, _, adapters, tables = self._arrays
        rows, block_size = len(runs), self._block_size
        starts = [run.start for run in runs]
        self._known, self._since = starts, 1
        token_ids[:rows] = [run.token_ids[0] for run in runs]
        positions[:rows] = starts
        lengths[:rows] = starts
        lengths[:rows] += 1
        slots[:rows] = [
            run.block_ids[run.start // block_size] * block_size + run.start % block_size
            for run in runs
        ]
        self._evicted_spans[:rows] = 0
        adapters[:rows] = adapter_slots or NO_SLOT
        width = max(starts) // block_size + 1
        for row, run in enumerate(runs):
            if run.block_ids != self._filled[row]:
                held = run.block_ids[: run.start // block_size + 1]
                tables[row, : len(held)] = held
                # What was cut off here is written when the sequence reaches it.
                self._filled[row] = run.block_ids if len(held) == len(run.block_ids) else None
        self._pad(rows, size, width)

    def fill_batch(
        self,
        rows: DecodeRows,
        size: int,
        sampled: torch.Tensor | None = None,
        adapter_slots: Sequence[int] = (),
    ) -> None:
        """Write a decode step; in place, where the one before it in its batch was written last.

        `sampled` are the tokens [rows] of rows with placeholders, on the device.
        """
        if not self._follows(rows):
            self._begin_batch(rows, size, adapter_slots)
        elif self._arrays is not None:
            self._go_on(rows)
        else:
            self._go_on_elsewhere(rows)
        self._batch, self._index, self._advances = rows.batch, rows.step, False
        self._known, self._since = rows.batch.starts, rows.step + 1
        if sampled is not None:
            self._token_ids[: len(rows)].copy_(sampled)
        elif self._arrays is not None:
            self._arrays[0][: len(rows)] = rows.token_ids
        else:
            (token_ids,) = packed([rows.token_ids], self._device)
            self._token_ids[: len(rows)].copy_(token_ids)

    def advance_call(self, rows: int, sampled: torch.Tensor) -> AdvanceCall:
        """The argument of `advance_step` for a step of so many rows, which leaves its tokens in `sampled`."""
        columns = self._token_ids, self._positions, self._slots, self._lengths
        pointers = (tensor.data_ptr() for tensor in (*columns, self._tables, sampled))
        return AdvanceCall(*pointers, rows, self._tables.shape[1], self._block_size, 0)

    def follow_batch(self, rows: DecodeRows, size: int, adapter_slots: Sequence[int] = ()) -> bool:
        """Prepare a step that begins with `advance_step`; returns whether that has to advance the values.

        Else the step before was another, and the values are written.
        """
        advances = self._advances and self._follows(rows)
        if advances:
            for begun in self._begun_blocks(rows):
                self._mirror.append(*begun)
            self._index, self._since = rows.step, rows.step + 1
        else:
            self.fill_batch(rows, size, None, adapter_slots)
            self._advances = True
        return advances

    def _follows(self, rows: DecodeRows) -> bool:
        return rows.batch is self._batch and rows.step == self._index + 1

    def _begin_batch(self, rows: DecodeRows, size: int, adapter_slots: Sequence[int]) -> None:
        """Write all but the tokens; of the tables what the batch before did not have in them."""
        batch, count, block_size = rows.batch, len(rows), self._block_size
        values = np.zeros((5, count), np.int64)
        positions, slots, lengths = values[:3]
        values[-1] = adapter_slots or NO_SLOT
        positions[:] = batch.starts
        positions += rows.step
        np.add(positions, 1, out=lengths)
        self._mirror.take(batch.tables)
        places = positions // block_size
        width = int(places.max()) + 1
        slots[:] = self._mirror.tables[np.arange(count), places]
        slots *= block_size
        slots += positions % block_size
        self._filled[:count] = [None] * count
        if self._arrays is not None:
            self._columns.numpy()[1:, :count] = values
        else:
            self._columns[1:, :count].copy_(to_device(values, self._device))
            tables = np.ascontiguousarray(self._mirror.tables[:count, :width])
            self._tables[:count, :width].copy_(to_device(tables, self._device))
        self._pad(count, size, width)

    def _go_on(self, rows: DecodeRows) -> None:
        assert self._arrays is not None
        slots = self._arrays[2]
        self._counters[:, : len(rows)] += 1
        for place, column, block_id in self._begun_blocks(rows):
            self._mirror.append(place, column, block_id)
            slots[place] = block_id * self._block_size

    def _go_on_elsewhere(self, rows: DecodeRows) -> None:
        """The same on a GPU, in stream order: nothing waits, and no step in flight reads other values."""
        self._columns[1:4, : len(rows)] += 1
        if begun := self._begun_blocks(rows):
            width = self._tables.shape[1]
            for place, column, block_id in begun:
                self._mirror.append(place, column, block_id)
            at, block_ids, of_rows, slots = packed(
                [
                    [place * width + column for place, column, _ in begun],
                    [block_id for _, _, block_id in begun],
                    [place for place, _, _ in begun],
                    [block_id * self._block_size for _, _, block_id in begun],
                ],
                self._device,
            )
            self._tables.view(-1).index_copy_(0, at, block_ids)
            self._slots.index_copy_(0, of_rows, slots)

    def _begun_blocks(self, rows: DecodeRows) -> list[tuple[int, int, int]]:
        """(row, place in its table, block) where a token is the first of a block."""
        begun: list[tuple[int, int, int]] = []
        batch = rows.batch
        for place in batch.beginning(rows.step):
            column = (batch.starts[place] + rows.step) // self._block_size
            begun.append((place, column, batch.tables[place][column]))
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
        self.adapter_slots[rows:size] = NO_SLOT
        self._tables[rows:size, 0] = NULL_BLOCK
        self._filled[rows:size] = [None] * (size - rows)


class BlockTables:
    """Block tables [rows, blocks] of a decode batch in NumPy: what was written before stays where it can.

    A table is known by its list, which a sequence only appends to while it runs; of the sequences that a
    batch shares with the one before it no entry is read again, though their rows moved up.
    """

    def __init__(self, rows: int, max_blocks: int) -> None:
        self.tables = np.full((rows, max_blocks), NULL_BLOCK, np.int64)
        self._lists: list[Sequence[int]] = []
        self._written: list[int] = []

    def take(self, lists: Sequence[Sequence[int]]) -> None:
        """Write the tables of a batch."""
        places = {id(entries): place for place, entries in enumerate(self._lists)}
        sources = [places.get(id(entries), -1) for entries in lists]
        written = [self._written[source] if source >= 0 else 0 for source in sources]
        moved = [place for place, source in enumerate(sources) if source not in (-1, place)]
        if moved:
            self.tables[moved] = self.tables[[sources[place] for place in moved]]
        for place, entries in enumerate(lists):
            new = entries[written[place] :]  # once: another thread may append to it meanwhile
            self.tables[place, written[place] : written[place] + len(new)] = new
            written[place] += len(new)
        self._lists, self._written = list(lists), written

    def append(self, place: int, column: int, block_id: int) -> None:
        """Write a block that a sequence took."""
        self.tables[place, column] = block_id
        self._written[place] = column + 1

    def forget(self) -> None:
        """Something else wrote to the tables."""
        self._lists, self._written = [], []
