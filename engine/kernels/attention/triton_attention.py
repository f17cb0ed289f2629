# pyright: reportCallIssue=false, reportPossiblyUnboundVariable=false, reportGeneralTypeIssues=false
"""Paged attention: FlashAttention-2 over block tables, with split-KV decoding (Flash-Decoding).

A program takes some query tokens of one sequence and the query heads of one KV head as the rows of one tile;
the heads share the keys that are read. The key tile's size is independent of the block size. Sequences with
few query tokens would occupy few programs: their keys are split into parts, and a second kernel reduces the
partial results. The split depends on the sequence alone, so results are batch-invariant. The number of
programs per sequence depends on the batch's size alone, so that a captured launch can be replayed for
sequences of any length.

Source: Dao, "FlashAttention-2" (arXiv:2307.08691); Dao et al., "Flash-Decoding" (2023) for the parts.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..common.runtime import power_of_two
from .paged_attention import AttentionBatch, AttentionRule
from .paged_tensor import PagedTensor
from .triton_metadata import AttentionMetadata

PART_TOKENS = 256
MAX_PARTS = 64
"""A part of the split is `PART_TOKENS` keys, or more where that would make more parts than this."""
FULL_GRID = 1024
"""Programs that fill a GPU: the grid of a split batch is about this large, a program takes several parts."""
_LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _held_slot(position, sink_length, evicted_span):
    """The slot of a position; of an evicted position, the slot after the evicted span."""
    return tl.where(
        position >= sink_length + evicted_span,
        position - evicted_span,
        tl.minimum(position, sink_length),
    )


@triton.jit
def _with_sink(top, total, acc, sink):
    """Add a learned sink logit (base 2) to the running softmax; it weighs no value."""
    highest = tl.maximum(top, sink)
    old = tl.exp2(top - highest)
    return total * old + tl.exp2(sink - highest), acc * old[:, None]


@triton.jit
def _attend(
    out_ptr,
    part_ptr,
    state_ptr,
    used_ptr,
    query_ptr,
    sink_query_ptr,
    key_ptr,
    value_ptr,
    key_scale_ptr,
    value_scale_ptr,
    sink_ptr,
    tile_ptr,
    segment_ptr,
    table_ptr,
    scale,
    num_heads,
    num_parts,
    query_row,
    query_head,
    sink_query_row,
    sink_query_head,
    key_block,
    key_slot,
    key_head,
    value_block,
    value_slot,
    value_head,
    scale_block,
    scale_slot,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    FRONT_DIM: tl.constexpr,
    REST_DIM: tl.constexpr,
    VALUE_TILE: tl.constexpr,
    VALUES_IN_KEYS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_TILE: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    NUM_SINK_TOKENS: tl.constexpr,
    CHUNK: tl.constexpr,
    SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    HAS_SINK_QUERIES: tl.constexpr,
    IN_PARTS: tl.constexpr,
    PART_TILES: tl.constexpr,
    MAX_PARTS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """FlashAttention-2 forward. Grid: tiles of query tokens, tiles of heads, programs per split of the keys.

    `tile_ptr` int64 [tiles, 3]: segment, its first token, its first row among the partial results;
    `segment_ptr` int64 [segments, 6]: begin, tokens, num_cached, sink_length, evicted_span, offset of its
    block table.
    """
    tile_row = tl.load(tile_ptr + tl.program_id(0) * 3)
    first = tl.load(tile_ptr + tl.program_id(0) * 3 + 1)
    part_row = tl.load(tile_ptr + tl.program_id(0) * 3 + 2)
    begin = tl.load(segment_ptr + tile_row * 6)
    count = tl.load(segment_ptr + tile_row * 6 + 1)
    num_cached = tl.load(segment_ptr + tile_row * 6 + 2)
    sink_length = tl.load(segment_ptr + tile_row * 6 + 3)
    evicted_span = tl.load(segment_ptr + tile_row * 6 + 4)
    table = table_ptr + tl.load(segment_ptr + tile_row * 6 + 5)
    HEAD_TILES: tl.constexpr = (GROUP + GROUP_TILE - 1) // GROUP_TILE
    kv_head = (tl.program_id(1) // HEAD_TILES).to(tl.int64)

    row = tl.arange(0, ROWS)
    token = first + row // GROUP_TILE
    in_group = (tl.program_id(1) % HEAD_TILES) * GROUP_TILE + row % GROUP_TILE
    is_row = (token < count) & (in_group < GROUP)
    head = kv_head * GROUP + in_group
    query_position = num_cached - count + token

    lanes = tl.arange(0, FRONT_DIM)
    place = (begin + token) * query_row + head * query_head
    lane_mask = is_row[:, None] & (lanes < KEY_DIM)[None, :]
    query = tl.load(query_ptr + place[:, None] + lanes[None, :], mask=lane_mask, other=0.0)
    if REST_DIM:
        rest = FRONT_DIM + tl.arange(0, REST_DIM)
        rest_mask = is_row[:, None] & (rest < KEY_DIM)[None, :]
        query_rest = tl.load(query_ptr + place[:, None] + rest[None, :], mask=rest_mask, other=0.0)
    if HAS_SINK_QUERIES:
        place = (begin + token) * sink_query_row + head * sink_query_head
        sink_queries = tl.load(
            sink_query_ptr + place[:, None] + lanes[None, :], mask=lane_mask, other=0.0
        )
        if REST_DIM:
            sink_query_rest = tl.load(
                sink_query_ptr + place[:, None] + rest[None, :], mask=rest_mask, other=0.0
            )

    # The visible key tiles: those of the sink tokens, then from the window's edge on.
    lowest = num_cached - count + first
    highest = tl.minimum(lowest + ROWS // GROUP_TILE, num_cached) - 1
    end = _held_slot(highest, sink_length, evicted_span) + 1
    start = lowest * 0
    if WINDOW:
        start = tl.maximum(lowest - (WINDOW - 1), 0)
    if CHUNK:
        start = tl.maximum(start, lowest - lowest % CHUNK)
    sink_tiles = (tl.minimum(end, NUM_SINK_TOKENS) + TILE - 1) // TILE
    start_tile = tl.maximum(_held_slot(start, sink_length, evicted_span) // TILE, sink_tiles)
    num_tiles = sink_tiles + tl.maximum((end + TILE - 1) // TILE - start_tile, 0)
    first_part, num_used, stride, each = 0, 1, 1, num_tiles
    if IN_PARTS:
        first_part, stride = tl.program_id(2), tl.num_programs(2)
        each = tl.maximum((num_tiles + MAX_PARTS - 1) // MAX_PARTS, PART_TILES)
        num_used = (num_tiles + each - 1) // each
        place = (part_row + row // GROUP_TILE) * num_heads + head
        tl.store(used_ptr + place, num_used, mask=is_row & (first_part == 0))

    value_lanes = tl.arange(0, VALUE_TILE)
    out_mask = is_row[:, None] & (value_lanes < VALUE_DIM)[None, :]
    for part in range(first_part, num_used, stride):
        from_tile = part * each
        to_tile = tl.minimum(from_tile + each, num_tiles)
        top = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.full([ROWS], 0.0, tl.float32)
        acc = tl.full([ROWS, VALUE_TILE], 0.0, tl.float32)
        for index in range(from_tile, to_tile):
            tile = tl.where(index < sink_tiles, index, start_tile + index - sink_tiles)
            slot = tile * TILE + tl.arange(0, TILE)
            is_held = slot < end
            block = tl.load(table + slot // BLOCK_SIZE, mask=is_held, other=0)
            inside = slot % BLOCK_SIZE
            position = slot + tl.where(slot >= sink_length, evicted_span, 0)

            key_place = block * key_block + inside * key_slot + kv_head * key_head
            mask = is_held[None, :] & (lanes < KEY_DIM)[:, None]
            key = tl.load(key_ptr + key_place[None, :] + lanes[:, None], mask=mask, other=0.0)
            if HAS_SCALES:
                key = key.to(tl.float32)
            key = key.to(query.dtype)
            scores = tl.dot(query, key, input_precision=PRECISION)
            if REST_DIM:
                mask = is_held[None, :] & (rest < KEY_DIM)[:, None]
                key_rest = tl.load(
                    key_ptr + key_place[None, :] + rest[:, None], mask=mask, other=0.0
                )
                if HAS_SCALES:
                    key_rest = key_rest.to(tl.float32)
                key_rest = key_rest.to(query.dtype)
                scores = tl.dot(query_rest, key_rest, scores, input_precision=PRECISION)
            if HAS_SINK_QUERIES:  # noqa: SIM102 - a constexpr, the inner condition is not
                if index < sink_tiles:
                    others = tl.dot(sink_queries, key, input_precision=PRECISION)
                    if REST_DIM:
                        others = tl.dot(
                            sink_query_rest, key_rest, others, input_precision=PRECISION
                        )
                    scores = tl.where((position < NUM_SINK_TOKENS)[None, :], others, scores)
            scores = scores * scale
            if HAS_SCALES:
                scale_place = block * scale_block + inside * scale_slot + kv_head
                scores = (
                    scores * tl.load(key_scale_ptr + scale_place, mask=is_held, other=0.0)[None, :]
                )
            if SOFTCAP > 0.0:
                scores = SOFTCAP * (1.0 - 2.0 / (tl.exp2(scores * (2.0 * _LOG2E / SOFTCAP)) + 1.0))
            scores = scores * _LOG2E
            visible = is_held[None, :] & (position[None, :] <= query_position[:, None])
            if WINDOW:
                in_window = position[None, :] > query_position[:, None] - WINDOW
                visible = visible & (in_window | (position < NUM_SINK_TOKENS)[None, :])
            if CHUNK:
                chunk_start = query_position - query_position % CHUNK
                visible = visible & (position[None, :] >= chunk_start[:, None])
            scores = tl.where(visible, scores, float("-inf"))

            highest_score = tl.maximum(top, tl.max(scores, 1))
            # Rows without a visible key yet: avoids inf - inf.
            base = tl.where(highest_score == float("-inf"), 0.0, highest_score)
            old = tl.exp2(top - base)
            weights = tl.exp2(scores - base[:, None])
            total = total * old + tl.sum(weights, 1)
            top = highest_score
            if HAS_SCALES:
                weights = (
                    weights
                    * tl.load(value_scale_ptr + scale_place, mask=is_held, other=0.0)[None, :]
                )
            if VALUES_IN_KEYS:
                value = tl.trans(key)
            else:
                value_place = block * value_block + inside * value_slot + kv_head * value_head
                mask = is_held[:, None] & (value_lanes < VALUE_DIM)[None, :]
                value = tl.load(
                    value_ptr + value_place[:, None] + value_lanes[None, :], mask=mask, other=0.0
                )
                if HAS_SCALES:
                    value = value.to(tl.float32)
                value = value.to(query.dtype)
            acc = acc * old[:, None]
            acc = tl.dot(weights.to(query.dtype), value, acc, input_precision=PRECISION)

        if IN_PARTS:
            place = (part_row + row // GROUP_TILE) * num_heads + head
            place = place * num_parts + part
            tl.store(state_ptr + place * 2, top, mask=is_row)
            tl.store(state_ptr + place * 2 + 1, total, mask=is_row)
            tl.store(
                part_ptr + place[:, None] * VALUE_DIM + value_lanes[None, :], acc, mask=out_mask
            )
        else:
            if HAS_SINKS:
                sink = tl.load(sink_ptr + head, mask=is_row, other=0.0) * _LOG2E
                total, acc = _with_sink(top, total, acc, sink)
            acc = acc / tl.where(total > 0.0, total, 1.0)[:, None]
            place = ((begin + token) * num_heads + head) * VALUE_DIM
            out = acc.to(out_ptr.dtype.element_ty)
            tl.store(out_ptr + place[:, None] + value_lanes[None, :], out, mask=out_mask)


@triton.jit
def _reduce_parts(
    out_ptr,
    part_ptr,
    state_ptr,
    used_ptr,
    sink_ptr,
    row_ptr,
    num_heads,
    num_parts,
    VALUE_DIM: tl.constexpr,
    VALUE_TILE: tl.constexpr,
    STRIDE: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """Reduce the partial results of the split keys (log-sum-exp rescaling). Grid: rows, heads."""
    row = tl.load(row_ptr + tl.program_id(0))
    head = tl.program_id(1)
    first = tl.program_id(0).to(tl.int64) * num_heads + head
    num_used = tl.load(used_ptr + first)
    first = first * num_parts
    lanes = tl.arange(0, VALUE_TILE)
    top = tl.full([1], float("-inf"), tl.float32)
    total = tl.full([1], 0.0, tl.float32)
    acc = tl.full([1, VALUE_TILE], 0.0, tl.float32)
    for begin in range(0, num_used, STRIDE):
        part = begin + tl.arange(0, STRIDE)
        place = first + part
        is_part = part < num_used
        part_m = tl.load(state_ptr + place * 2, mask=is_part, other=float("-inf"))
        part_l = tl.load(state_ptr + place * 2 + 1, mask=is_part, other=0.0)
        is_full = part_m > float("-inf")
        mask = is_full[:, None] & (lanes < VALUE_DIM)[None, :]
        mixed = tl.load(
            part_ptr + place[:, None] * VALUE_DIM + lanes[None, :], mask=mask, other=0.0
        )
        highest = tl.maximum(top, tl.max(part_m, 0))
        base = tl.where(highest == float("-inf"), 0.0, highest)
        old = tl.exp2(top - base)
        factor = tl.where(is_full, tl.exp2(part_m - base), 0.0)
        total = total * old + tl.sum(part_l * factor, 0)
        acc = acc * old[:, None] + tl.sum(mixed * factor[:, None], 0)[None, :]
        top = highest
    if HAS_SINKS:
        sink = tl.load(sink_ptr + head) * _LOG2E
        total, acc = _with_sink(top, total, acc, sink)
    acc = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    place = (row * num_heads + head) * VALUE_DIM
    out = acc.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + place + lanes[None, :], out, mask=(lanes < VALUE_DIM)[None, :])


def attend_triton(
    queries: torch.Tensor,
    keys: PagedTensor,
    values: PagedTensor,
    batch: AttentionBatch,
    rule: AttentionRule,
    sink_queries: torch.Tensor | None = None,
) -> torch.Tensor:
    """Paged attention as `attend_reference` defines it, without tree attention."""
    metadata = batch.kernel_metadata(AttentionMetadata)
    queries = queries if queries.stride(2) == 1 else queries.contiguous()
    heads, key_dim = queries.shape[1:]
    group = heads // keys.num_heads
    front_dim = max(16, 1 << (key_dim.bit_length() - 1))
    rest_dim = 0 if key_dim <= front_dim else max(16, power_of_two(key_dim - front_dim))
    shared = values.codes.data_ptr() == keys.codes.data_ptr() and values.dim == front_dim
    wide = key_dim + values.dim * (not shared) > 512
    group_tile = min(power_of_two(group), 16 if wide else 64)
    out = queries.new_empty(queries.shape[0], heads, values.dim)
    met = queries if sink_queries is None else sink_queries
    met = met if met.stride(2) == 1 else met.contiguous()
    scales = keys.scales, values.scales
    is_float32 = queries.dtype is torch.float32
    tile = max(16, min(64, 8192 // front_dim) // (2 if is_float32 else 1))
    for short in (True, False):
        # Prefill-sized spans are compute-bound and take large tiles; decode-sized ones are memory-bound.
        rows = max(16, group_tile)
        if not short and not wide:
            rows = max(rows, 32 if is_float32 else min(128, 16384 // front_dim))
        if (tiles := metadata.tiles(rows // group_tile, short)) is None:
            continue
        num_parts, part, state, used = 1, out, out, out
        if short:
            num_parts = min(MAX_PARTS, -(-tiles.width // PART_TOKENS))
            shape = (tiles.rows.numel(), heads, num_parts)
            part = out.new_empty(*shape, values.dim, dtype=torch.float32)
            state = out.new_empty(*shape, 2, dtype=torch.float32)
            used = out.new_empty(shape[:2], dtype=torch.int32)
        sinks = state if rule.sinks is None else rule.sinks.float().contiguous()
        tasks = tiles.index.shape[0], keys.num_heads * -(-group // group_tile)
        grid = *tasks, min(num_parts, -(-FULL_GRID // (tasks[0] * tasks[1])))
        _attend[grid](
            out,
            part,
            state,
            used,
            queries,
            met,
            keys.codes,
            values.codes,
            state if scales[0] is None else scales[0],
            state if scales[1] is None else scales[1],
            sinks,
            tiles.index,
            metadata.segments,
            metadata.table,
            rule.scale,
            heads,
            num_parts,
            *queries.stride()[:2],
            *met.stride()[:2],
            *keys.codes.stride()[:3],
            *values.codes.stride()[:3],
            *((0, 0) if scales[0] is None else scales[0].stride()[:2]),
            KEY_DIM=key_dim,
            VALUE_DIM=values.dim,
            FRONT_DIM=front_dim,
            REST_DIM=rest_dim,
            VALUE_TILE=max(16, power_of_two(values.dim)),
            VALUES_IN_KEYS=shared,
            GROUP=group,
            GROUP_TILE=group_tile,
            ROWS=rows,
            TILE=tile,
            BLOCK_SIZE=batch.block_size,
            WINDOW=rule.window or 0,
            NUM_SINK_TOKENS=rule.num_sink_tokens,
            CHUNK=rule.chunk or 0,
            SOFTCAP=rule.softcap or 0.0,
            HAS_SINKS=rule.sinks is not None,
            HAS_SCALES=scales[0] is not None,
            HAS_SINK_QUERIES=sink_queries is not None,
            IN_PARTS=short,
            PART_TILES=max(1, PART_TOKENS // tile),
            MAX_PARTS=MAX_PARTS,
            PRECISION="ieee" if is_float32 else "tf32",
            num_warps=8 if rows > 16 else 4,
            num_stages=2 if wide else 3,
        )
        if short:
            _reduce_parts[(tiles.rows.numel(), heads)](
                out,
                part,
                state,
                used,
                sinks,
                tiles.rows,
                heads,
                num_parts,
                VALUE_DIM=values.dim,
                VALUE_TILE=max(16, power_of_two(values.dim)),
                STRIDE=8,
                HAS_SINKS=rule.sinks is not None,
                num_warps=4,
            )
    return out
