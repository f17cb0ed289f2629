"""Metadata of the Triton attention kernel: concatenated block tables, and the assignment of programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ...base.device import to_device
from .paged_attention import AttentionBatch
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
    """Query tiles of some sequences.

    Attributes:
        index: the kernel's `tile_ptr`.
        rows: the batch row of each row of the partial results.
        width: cached tokens of the longest sequence.
    """

    index: torch.Tensor
    rows: torch.Tensor
    width: int


@dataclass(frozen=True, slots=True)
class Visibility:
    """What decides which tiles of keys a token sees: the tile's size, and a layer's rule; 0 is none."""

    tile: int
    window: int
    num_sink_tokens: int
    chunk: int


class AttentionMetadata:
    """Attention metadata of a batch on the device; host data is copied once a step."""

    def __init__(self, batch: AttentionBatch) -> None:
        self._spans = sorted(batch.spans, key=lambda span: span.end - span.begin)
        self._decode = batch.decode
        tables = [span.block_ids for span in self._spans]
        fields: list[list[int]] = []
        offset = 0
        for span in self._spans:
            row = [
                span.begin,
                span.end - span.begin,
                span.num_cached,
                span.sink_length,
                span.evicted_span,
                offset,
            ]
            fields.append(row)
            offset += span.block_ids.numel()
        self._num_short = sum(row[1] <= SHORT_SPAN for row in fields)
        segments = []
        if (decode := batch.decode) is not None:
            count = decode.rows.numel()
            self._decode_width = decode.block_ids.numel() // count
            steps = torch.arange(count, device=decode.rows.device) * self._decode_width + offset
            tables.append(decode.block_ids)
            ones = torch.ones_like(steps)
            of_decode = (
                decode.rows,
                ones,
                decode.lengths,
                ones * decode.sink_length,
                decode.evicted_spans,
                steps,
            )
            segments.append(torch.stack(of_decode, dim=1))
        self.table = tables[0] if len(tables) == 1 else torch.cat(tables)
        self._device = self.table.device
        if fields:
            segments.insert(0, self._copied(fields))
        self.segments = segments[0] if len(segments) == 1 else torch.cat(segments)
        self._block_size = batch.block_size
        self._made: dict[tuple[int, bool], Tiles | None] = {}
        self._work_lists: dict[tuple[int, Visibility], torch.Tensor] = {}

    def tiles(self, tokens: int, short: bool) -> Tiles | None:
        """Tiles of `tokens` query tokens of the short or of the long sequences; None: there are none."""
        key = (tokens, short)
        if key not in self._made:
            self._made[key] = self._tiles(tokens, short)
        return self._made[key]

    def work_list(self, tokens: int, visibility: Visibility, num_parts: int) -> torch.Tensor:
        """The work list of the short sequences' tiles: made on the device once for the layers of a rule.

        int32 [1 + tiles * num_parts]: the number of parts, then each part's tile and number
        (`triton_attention_kernels.list_parts`).
        """
        if (key := (tokens, visibility)) not in self._work_lists:
            tiles = self.tiles(tokens, True)
            assert tiles is not None
            count = tiles.index.shape[0]
            work = torch.empty(1 + count * num_parts, dtype=torch.int32, device=self._device)
            kernel: Any = list_parts
            kernel[(-(-count // LISTED),)](
                work,
                tiles.index,
                self.segments,
                count,
                TOKENS=tokens,
                TILE=visibility.tile,
                WINDOW=visibility.window,
                NUM_SINK_TOKENS=visibility.num_sink_tokens,
                CHUNK=visibility.chunk,
                PART_TILES=max(1, PART_TOKENS // visibility.tile),
                MAX_PARTS=MAX_PARTS,
                BLOCK=LISTED,
                num_warps=4,
            )
            self._work_lists[key] = work
        return self._work_lists[key]

    def _tiles(self, tokens: int, short: bool) -> Tiles | None:
        chosen = range(self._num_short) if short else range(self._num_short, len(self._spans))
        index, rows, width = [], [], 0
        for segment in chosen:
            span = self._spans[segment]
            count = span.end - span.begin
            index += [[segment, first, len(rows) + first] for first in range(0, count, tokens)]
            rows += range(span.begin, span.end)
            width = max(width, span.num_held)
        parts = [self._copied(index)] if index else []
        of_parts = [self._copied(rows)] if rows else []
        if short and self._decode is not None:
            steps = torch.arange(self._decode.rows.numel(), device=self._device)
            decode_index = (steps + len(self._spans), torch.zeros_like(steps), steps + len(rows))
            parts.append(torch.stack(decode_index, dim=1))
            of_parts.append(self._decode.rows)
            width = max(width, self._decode_width * self._block_size)
        if not parts:
            return None
        return Tiles(torch.cat(parts), torch.cat(of_parts), width)

    def _copied(self, values: Sequence[int] | Sequence[Sequence[int]]) -> torch.Tensor:
        return to_device(np.array(values, dtype=np.int64), self._device)
