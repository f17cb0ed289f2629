"""Metadata of the Triton attention kernel: concatenated block tables, and the assignment of programs.

That of a captured step lies in tensors of a fixed capacity, filled anew for each replay.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch

from ...base.device import to_device
from .batch import AttentionBatch
from .triton_attention_kernels import list_parts

PART_TOKENS = 256
MAX_PARTS = 64
"""A part of the split is `PART_TOKENS` keys, or more where that would make more parts than this."""
LISTED = 128
"""Query tiles per program of the work list."""
SHORT_SPAN = 8
"""Query tokens of a sequence up to which its keys are split over several programs (split-KV)."""


@dataclass(frozen=True, slots=True)
class Tiles:
    """Query tiles of some sequences: `index` is the kernel's `tile_ptr`, `num_rows` the rows of the partial
    results, `width` the cached tokens of the longest sequence."""

    index: torch.Tensor
    num_rows: int
    width: int


@dataclass(frozen=True, slots=True)
class Visibility:
    """Facts that decide which tiles of keys a token sees: the tile's size, and a layer's rule; 0 is none."""

    tile: int
    window: int
    num_sink_tokens: int
    chunk: int

    max_parts: ClassVar[int] = MAX_PARTS

    @property
    def part_tiles(self) -> int:
        """Tiles of a part, where that does not make more than `max_parts`."""
        return max(1, PART_TOKENS // self.tile)


class AttentionMetadata:
    """Attention metadata of a batch on the device; host data is copied once a step."""

    def __init__(self, batch: AttentionBatch) -> None:
        self._spans = sorted(batch.spans, key=lambda span: span.end - span.begin)
        self._decode = batch.decode
        tables = [span.block_ids for span in self._spans]
        fields: list[list[int]] = []
        offset = 0
        for span in self._spans:
            length = span.end - span.begin
            row = [span.begin, length, span.num_cached, span.sink_length, span.evicted_span, offset]
            fields.append(row)
            offset += span.block_ids.numel()
        self._num_short = sum(row[1] <= SHORT_SPAN for row in fields)
        segments = []
        if (decode := batch.decode) is not None:
            count = decode.rows.numel()
            self._decode_width = decode.block_ids.numel() // count
            tables.append(decode.block_ids)
            if decode.constants is not None:  # two launches of a captured step, not twelve
                written = decode.constants.segments
                written[:, 2].copy_(decode.lengths)
                written[:, 4].copy_(decode.evicted_spans)
                segments.append(written)
            else:
                steps = torch.arange(count, device=decode.rows.device)
                ones = torch.ones_like(steps)
                of_decode = decode.rows, ones, decode.lengths, ones * decode.sink_length
                begins = steps * self._decode_width + offset
                segments.append(torch.stack((*of_decode, decode.evicted_spans, begins), dim=1))
        self.table = tables[0] if len(tables) == 1 else torch.cat(tables)
        self._device = self.table.device
        if fields:
            segments.insert(0, self._copied(fields))
        self.segments = segments[0] if len(segments) == 1 else torch.cat(segments)
        self._block_size = batch.block_size
        self._made: dict[tuple[int, bool], Tiles | None] = {}
        self._work_lists: dict[tuple[int, Visibility, int], tuple[torch.Tensor, torch.Tensor]] = {}

    def tiles(self, tokens: int, short: bool) -> Tiles | None:
        key = (tokens, short)
        if key not in self._made:
            self._made[key] = self._tiles(tokens, short)
        return self._made[key]

    def work_list(
        self, tokens: int, visibility: Visibility, num_parts: int, head_programs: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Work list of short sequences' tiles (`list_parts`), int32 [1 + tiles * num_parts], of a rule; and
        the parts that have arrived of each, int32 [tiles, head_programs], zeros between layers."""
        if (key := (tokens, visibility, head_programs)) not in self._work_lists:
            tiles = self.tiles(tokens, True)
            assert tiles is not None
            count = tiles.index.shape[0]
            work = torch.empty(1 + count * num_parts, dtype=torch.int32, device=self._device)
            arrived = work.new_empty(count, head_programs)
            kernel: Any = list_parts
            sizes = {"TOKENS": tokens, "SEES": visibility, "BLOCK": LISTED}
            grid = (-(-count // LISTED),)
            given = work, arrived, tiles.index, self.segments, count, head_programs
            kernel[grid](*given, **sizes, num_warps=4)
            self._work_lists[key] = work, arrived
        return self._work_lists[key]

    def _tiles(self, tokens: int, short: bool) -> Tiles | None:
        if short and self._decode is not None and self._decode.constants is not None:
            width = self._decode_width * self._block_size
            return Tiles(self._decode.constants.tiles, self._decode.rows.numel(), width)
        chosen = range(self._num_short) if short else range(self._num_short, len(self._spans))
        index, num_rows, width = [], 0, 0
        for segment in chosen:
            span = self._spans[segment]
            count = span.end - span.begin
            index += [[segment, first, num_rows + first] for first in range(0, count, tokens)]
            num_rows += count
            width = max(width, span.num_held)
        if not short:
            known = [span.num_cached - (span.end - span.begin) for span in self._spans]
            _sort_longest_first(index, known)
        parts = [self._copied(index)] if index else []
        if short and self._decode is not None:
            steps = torch.arange(self._decode.rows.numel(), device=self._device)
            decode_index = (steps + len(self._spans), torch.zeros_like(steps), steps + num_rows)
            parts.append(torch.stack(decode_index, dim=1))
            num_rows += steps.numel()
            width = max(width, self._decode_width * self._block_size)
        if not parts:
            return None
        return Tiles(torch.cat(parts), num_rows, width)

    def _copied(self, values: Sequence[int] | Sequence[Sequence[int]]) -> torch.Tensor:
        return to_device(np.array(values, dtype=np.int64), self._device)


def _sort_longest_first(index: list[list[int]], known: Sequence[int]) -> None:
    """Sort tiles (segment, first token, row) by the keys that they see: the last to end is the shortest."""
    index.sort(key=lambda tile: -known[tile[0]] - tile[1])


TILE_KINDS = 8
"""Kinds of tiles (tokens of a tile, short spans or long) that a model's layers may ask for."""


class Segment(NamedTuple):
    """The tokens of one sequence in a step: its first row, tokens, tokens so far, and its blocks."""

    begin: int
    num_tokens: int
    num_cached: int
    block_ids: Sequence[int]


@dataclass(slots=True)
class _TileKind:
    """Where the `num_tiles` triples of a kind lie in the buffer."""

    tokens: int
    short: bool
    begin: int
    num_tiles: int


@dataclass(slots=True)
class StaticBuffer:
    """Host and device copies of everything that a replay reads; one copy brings a step. In order: `columns`
    of `size` numbers each (token ids, positions, slots, slots of adapters; the last number is padding),
    segments, tiles, block table. `num_filled` numbers belong to the last step."""

    size: int
    max_blocks: int
    on_device: torch.Tensor
    null_block: int
    kinds: dict[tuple[int, bool], _TileKind] = field(default_factory=dict)
    segments_filled: Sequence[Segment] = ()
    num_filled: int = 0

    columns = 4

    @staticmethod
    def capacity(size: int, max_blocks: int) -> int:
        return StaticBuffer._table_begin(size) + 1 + size * max_blocks

    @staticmethod
    def _tile_begin(size: int) -> int:
        return StaticBuffer.columns * size + 6 * (size + 1)

    @staticmethod
    def _table_begin(size: int) -> int:
        # A kind has at most one tile a token; four numbers each, so that a kind's address is aligned.
        return StaticBuffer._tile_begin(size) + TILE_KINDS * 4 * (size + 1)

    def column(self, index: int) -> torch.Tensor:
        return self.on_device[index * self.size : (index + 1) * self.size]

    @property
    def segments(self) -> torch.Tensor:
        """int64 [size + 1, 6]; padding has the last."""
        begin = self.columns * self.size
        return self.on_device[begin : self._tile_begin(self.size)].view(-1, 6)

    @property
    def table(self) -> torch.Tensor:
        """The concatenated block tables; the first entry is the null block."""
        return self.on_device[self._table_begin(self.size) :]

    def tiles(self, tokens: int, short: bool) -> Tiles:
        """The tiles of a kind, which later steps fill."""
        key = tokens, short
        if key not in self.kinds:
            assert len(self.kinds) < TILE_KINDS, "more kinds of tiles than a buffer holds"
            begin = self._tile_begin(self.size) + len(self.kinds) * 4 * (self.size + 1)
            long = self.size // tokens + self.size // (SHORT_SPAN + 1) + 1
            num_tiles = self.size if short else min(self.size, long)
            self.kinds[key] = _TileKind(tokens, short, begin, num_tiles)
            self._copy(begin, self._numbers(self.kinds[key], self.segments_filled))
        kind = self.kinds[key]
        index = self.on_device[kind.begin :][: 3 * kind.num_tiles].view(-1, 3)
        return Tiles(index, self.size if short else 0, self.max_blocks)

    def fill(self, columns: Sequence[Sequence[int]], segments: Sequence[Segment]) -> None:
        """Copy a step's values; `columns` and `segments` are of its tokens, padding follows."""
        size, self.segments_filled = self.size, segments
        host = np.zeros(self._table_begin(size) + 1, np.int64)
        for index, column in enumerate(columns):
            host[index * size : index * size + len(column)] = column
        fields = np.zeros((size + 1, 6), np.int64)
        table: list[int] = []  # the blocks after the table's first entry
        for row, (begin, count, num_cached, block_ids) in zip(fields, segments, strict=False):
            row[:] = begin, count, num_cached, 0, 0, 1 + len(table)
            table += block_ids
        fields[-1] = size - 1, 1, 1, 0, 0, 0
        begin = self.columns * size
        host[begin : begin + fields.size] = fields.ravel()
        for kind in self.kinds.values():
            numbers = self._numbers(kind, segments)
            host[kind.begin : kind.begin + len(numbers)] = numbers
        host[-1] = self.null_block
        self.num_filled = len(host) + len(table)
        self._copy(0, np.concatenate([host, np.array(table, np.int64)]))

    def take_unshared(self) -> tuple[int, ...]:
        """Number of values that `fill` copied, which the other tensor-parallel ranks need."""
        return (self.num_filled,)

    def share(self, unshared: tuple[int, ...], broadcast: Callable[[torch.Tensor], None]) -> None:
        broadcast(self.on_device[: unshared[0]])

    def _numbers(self, kind: _TileKind, segments: Sequence[Segment]) -> np.ndarray:
        """Tiles of a kind: those of the segments, then padding's, each in a single part."""
        index: list[list[int]] = []
        num_rows = 0
        for number, (_, count, _, _) in enumerate(segments):
            if (count <= SHORT_SPAN) != kind.short:
                continue
            index += [[number, first, num_rows + first] for first in range(0, count, kind.tokens)]
            num_rows += count
        if not kind.short:
            _sort_longest_first(index, [segment[2] - segment[1] for segment in segments])
        index += [[self.size, 0, self.size - 1]] * (kind.num_tiles - len(index))
        return np.array(index).ravel()

    def _copy(self, begin: int, values: np.ndarray) -> None:
        given = to_device(values.astype(np.int64, copy=False), self.on_device.device)
        self.on_device[begin : begin + len(values)].copy_(given, non_blocking=True)


class StaticMetadata(AttentionMetadata):
    """`AttentionMetadata` on a static buffer; made anew for each capture."""

    def __init__(self, buffer: StaticBuffer, block_size: int) -> None:
        self._buffer = buffer
        self.table, self.segments = buffer.table, buffer.segments
        self._device, self._block_size = buffer.on_device.device, block_size
        self._made: dict[tuple[int, bool], Tiles | None] = {}
        self._work_lists = {}

    def _tiles(self, tokens: int, short: bool) -> Tiles | None:
        tiles = self._buffer.tiles(tokens, short)
        return Tiles(tiles.index, tiles.num_rows, tiles.width * self._block_size)
