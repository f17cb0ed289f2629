# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportPossiblyUnboundVariable=false
"""Triton kernels of paged attention: FlashAttention-2 over block tables, and Flash-Decoding's reduction.

The block table's entries of a tile of keys are loaded one tile ahead and carried through the loop: a load
whose address comes from another load of the same iteration would take stages of the software pipeline for
itself, and leave the keys and values with a single buffer.

Source: Dao, "FlashAttention-2" (arXiv:2307.08691); Dao et al., "Flash-Decoding" (2023) for the parts.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..common.triton_language import await_predecessor

_LOG2E = tl.constexpr(1.4426950408889634)  # GPUs have an instruction for exp2, not for exp


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
def _span(segment_ptr):
    """Tokens of a segment, its tokens so far, its sink length, and its evicted span."""
    count, num_cached = tl.load(segment_ptr + 1), tl.load(segment_ptr + 2)
    return count, num_cached, tl.load(segment_ptr + 3), tl.load(segment_ptr + 4)


@triton.jit
def _visible_tiles(first, span, TOKENS: tl.constexpr, SEES: tl.constexpr):
    """End of held slots, sink tiles, first tile after them, and number of the tiles that query tokens see."""
    count, num_cached, sink_length, evicted_span = span
    lowest = num_cached - count + first
    highest = tl.minimum(lowest + TOKENS, num_cached) - 1
    end = _held_slot(highest, sink_length, evicted_span) + 1
    start = lowest * 0
    if SEES.window:
        start = tl.maximum(lowest - (SEES.window - 1), 0)
    if SEES.chunk:
        start = tl.maximum(start, lowest - lowest % SEES.chunk)
    sink_tiles = (tl.minimum(end, SEES.num_sink_tokens) + SEES.tile - 1) // SEES.tile
    start_tile = tl.maximum(_held_slot(start, sink_length, evicted_span) // SEES.tile, sink_tiles)
    num_tiles = sink_tiles + tl.maximum((end + SEES.tile - 1) // SEES.tile - start_tile, 0)
    return end, sink_tiles, start_tile, num_tiles


@triton.jit
def _inner_tiles(first, span, visible, TOKENS: tl.constexpr, SEES: tl.constexpr):
    """The key tiles, among the visible ones, all of whose keys every query token sees: begin and end."""
    count, num_cached, sink_length, evicted_span = span
    sink_tiles, start_tile, num_tiles = visible
    lowest = num_cached - count + first
    highest = tl.minimum(lowest + TOKENS, num_cached) - 1
    start = lowest * 0
    if SEES.window:
        start = tl.maximum(highest - (SEES.window - 1), 0)
    if SEES.chunk:
        start = tl.maximum(start, highest - highest % SEES.chunk)
    behind = sink_tiles - start_tile
    end = (_held_slot(lowest, sink_length, evicted_span) + 1) // SEES.tile + behind
    end = tl.maximum(tl.minimum(end, num_tiles), sink_tiles)
    begin = (_held_slot(start, sink_length, evicted_span) + SEES.tile - 1) // SEES.tile + behind
    return tl.minimum(tl.maximum(begin, sink_tiles), end), end


@triton.jit
def _tile_at(index, edge, skipped, sink_tiles, start_tile):
    """The key tile at an index of a loop that leaves out `skipped` visible tiles from `edge` on."""
    index += tl.where(index < edge, 0, skipped)
    return tl.where(index < sink_tiles, index, start_tile + index - sink_tiles)


@triton.jit
def _part_tiles(num_tiles, SEES: tl.constexpr):
    """Key tiles of a part of the split: they follow from the sequence alone."""
    return tl.maximum((num_tiles + SEES.max_parts - 1) // SEES.max_parts, SEES.part_tiles)


@triton.jit(do_not_specialize=["num_query_tiles"])
def list_parts(
    work_ptr,
    tile_ptr,
    segment_ptr,
    num_query_tiles,
    TOKENS: tl.constexpr,
    SEES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """List the split keys: number of parts, then query tile * `max_parts` + part. Grid: blocks of tiles."""
    own = tl.program_id(0) * BLOCK
    before = 0
    for begin in range(0, own + 1, BLOCK):
        tile = begin + tl.arange(0, BLOCK)
        is_tile = tile < num_query_tiles
        segment = segment_ptr + tl.load(tile_ptr + tile * 3, mask=is_tile, other=0) * 6
        first = tl.load(tile_ptr + tile * 3 + 1, mask=is_tile, other=0)
        _, _, _, num_tiles = _visible_tiles(first, _span(segment), TOKENS, SEES)
        part_tiles = _part_tiles(num_tiles, SEES)
        parts = tl.where(is_tile, tl.maximum((num_tiles + part_tiles - 1) // part_tiles, 1), 0).to(
            tl.int32
        )
        if begin < own:
            before += tl.sum(parts, 0)
        else:
            ends = tl.cumsum(parts, 0)
            pointer = work_ptr + 1 + before + ends - parts
            for part in range(tl.max(parts, 0)):
                tl.store(pointer + part, tile * SEES.max_parts + part, mask=part < parts)
            if own + BLOCK >= num_query_tiles:
                tl.store(work_ptr, before + tl.sum(parts, 0))


@triton.jit
def _blocks(table, slot, end, BLOCK_SIZE: tl.constexpr):
    return tl.load(table + slot // BLOCK_SIZE, mask=slot < end, other=0)


@triton.jit
def _keys(pointers, is_held, is_lane, dtype, MASKED: tl.constexpr, PADDED: tl.constexpr):
    """A tile of the cache in the queries' type: 0 beyond the held slots and the elements of a head."""
    if MASKED:
        loaded = tl.load(pointers, mask=is_held & is_lane, other=0.0)
    elif PADDED:
        loaded = tl.load(pointers, mask=is_lane, other=0.0)
    else:
        loaded = tl.load(pointers)
    if loaded.dtype.primitive_bitwidth == 8:
        loaded = loaded.to(tl.float32)
    return loaded.to(dtype)


@triton.jit(do_not_specialize=["num_parts"])
def attend(
    out_ptr,
    part_ptr,
    state_ptr,
    used_ptr,
    work_ptr,
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
    HEADS: tl.constexpr,
    TILING: tl.constexpr,
    SEES: tl.constexpr,
    HEAD_PROGRAMS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    IN_PARTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """FlashAttention-2 forward. Grid: query tiles x tiles of heads, the heads fastest.

    With `IN_PARTS` the programs are persistent: those of a tile of heads share the work list `work_ptr` of
    `list_parts` among them. `tile_ptr` int64 [tiles, 3]: segment, its first token, its first row among the
    partial results; `segment_ptr` int64 [segments, 6]: begin, tokens, num_cached, sink_length, evicted_span,
    offset of its block table.
    """
    await_predecessor(PDL)
    GROUP: tl.constexpr = HEADS.group
    GROUP_TILE: tl.constexpr = TILING.group_tile
    ROWS: tl.constexpr = TILING.rows
    TILE: tl.constexpr = TILING.tile
    HAS_SINK_QUERIES: tl.constexpr = HEADS.num_queries > 1
    FIRST_PHASE: tl.constexpr = 0 if HAS_SINK_QUERIES else (2 if IN_PARTS else 1)
    HEAD_TILES: tl.constexpr = (GROUP + GROUP_TILE - 1) // GROUP_TILE
    TOKENS: tl.constexpr = ROWS // GROUP_TILE
    # Of scores in base 2; of 2 / SOFTCAP times them, which its tanh takes.
    factor = scale * (2.0 * _LOG2E / SOFTCAP if SOFTCAP > 0.0 else _LOG2E)
    worker = tl.program_id(0) // HEAD_PROGRAMS
    head_program = tl.program_id(0) % HEAD_PROGRAMS
    kv_head = (head_program // HEAD_TILES).to(tl.int64)
    row = tl.arange(0, ROWS)
    in_group = (head_program % HEAD_TILES) * GROUP_TILE + row % GROUP_TILE
    head = kv_head * GROUP + in_group
    lanes = tl.arange(0, HEADS.front_dim)
    rest = HEADS.front_dim + tl.arange(0, HEADS.rest_dim if HEADS.rest_dim else 1)
    value_lanes = tl.arange(0, HEADS.value_tile)
    key_head_ptr = key_ptr + kv_head * key_head
    value_head_ptr = value_ptr + kv_head * value_head
    if IN_PARTS:
        num_items, step = tl.load(work_ptr), tl.num_programs(0) // HEAD_PROGRAMS
    else:
        num_items, step = worker + 1, 1
    for item in range(worker, num_items, step):
        query_tile, part = item, 0
        if IN_PARTS:
            work = tl.load(work_ptr + 1 + item)
            query_tile, part = work // SEES.max_parts, work % SEES.max_parts
        at = tile_ptr + query_tile * 3
        first = tl.load(at + 1)
        part_row = tl.load(at + 2)
        segment = segment_ptr + tl.load(at) * 6
        begin = tl.load(segment)
        span = _span(segment)
        count, num_cached, sink_length, evicted_span = span
        table = table_ptr + tl.load(segment + 5)

        token = first + row // GROUP_TILE
        is_row = (token < count) & (in_group < GROUP)
        query_position = num_cached - count + token
        offset = (begin + token) * query_row + head * query_head
        lane_mask = is_row[:, None] & (lanes < HEADS.key_dim)[None, :]
        query = tl.load(query_ptr + offset[:, None] + lanes[None, :], mask=lane_mask, other=0.0)
        if HEADS.rest_dim:
            rest_mask = is_row[:, None] & (rest < HEADS.key_dim)[None, :]
            query_rest = tl.load(
                query_ptr + offset[:, None] + rest[None, :], mask=rest_mask, other=0.0
            )
        if HAS_SINK_QUERIES:
            offset = (begin + token) * sink_query_row + head * sink_query_head
            sink_queries = tl.load(
                sink_query_ptr + offset[:, None] + lanes[None, :], mask=lane_mask, other=0.0
            )
            if HEADS.rest_dim:
                sink_query_rest = tl.load(
                    sink_query_ptr + offset[:, None] + rest[None, :], mask=rest_mask, other=0.0
                )

        end, sink_tiles, start_tile, num_tiles = _visible_tiles(first, span, TOKENS, SEES)
        from_tile, to_tile = num_tiles * 0, num_tiles
        if IN_PARTS:
            part_tiles = _part_tiles(num_tiles, SEES)
            from_tile = part * part_tiles
            to_tile = tl.minimum(from_tile + part_tiles, num_tiles)
            offset = (part_row + row // GROUP_TILE) * num_heads + head
            num_used = tl.maximum((num_tiles + part_tiles - 1) // part_tiles, 1)
            tl.store(used_ptr + offset, num_used, mask=is_row & (part == 0))

        top = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.full([ROWS], 0.0, tl.float32)
        acc = tl.full([ROWS, HEADS.value_tile], 0.0, tl.float32)
        edge, inner_end = to_tile, to_tile
        if not IN_PARTS:
            visible_tiles = sink_tiles, start_tile, num_tiles
            edge, inner_end = _inner_tiles(first, span, visible_tiles, TOKENS, SEES)
        # Each phase is a loop of its own, since a branch within a loop would leave it without a software
        # pipeline: 0, sink tokens that meet queries of their own; 1, of prefill, which is compute-bound, the
        # tiles without a mask; 2, all others.
        for phase in tl.static_range(FIRST_PHASE, 3, 2 if IN_PARTS else 1):
            begin_tile, end_tile, skipped = from_tile, to_tile, 0
            if phase == 0:
                end_tile = tl.minimum(to_tile, sink_tiles)
            elif phase == 1:
                begin_tile, end_tile = edge, inner_end
            else:
                skipped = inner_end - edge
                end_tile = to_tile - skipped
                if HAS_SINK_QUERIES:
                    begin_tile = tl.maximum(from_tile, sink_tiles)
            # The blocks of keys, values and scales: in three shapes, as threads hold each differently.
            slot = _tile_at(begin_tile, edge, skipped, sink_tiles, start_tile) * TILE
            slot += tl.arange(0, TILE)
            key_blocks = _blocks(table, slot[None, :], end, BLOCK_SIZE)
            value_blocks = _blocks(table, slot[:, None], end, BLOCK_SIZE)
            scale_blocks = _blocks(table, slot, end, BLOCK_SIZE)
            for index in range(begin_tile, end_tile):
                tile = _tile_at(index, edge, skipped, sink_tiles, start_tile)
                slot = tile * TILE + tl.arange(0, TILE)
                is_held = slot < end
                inside = slot % BLOCK_SIZE
                position = slot + tl.where(slot >= sink_length, evicted_span, 0)

                key_place = key_blocks * key_block + inside[None, :] * key_slot
                key = _keys(
                    key_head_ptr + key_place + lanes[:, None],
                    is_held[None, :],
                    (lanes < HEADS.key_dim)[:, None],
                    query.dtype,
                    phase != 1,
                    HEADS.key_dim < HEADS.front_dim,
                )
                scores = tl.dot(query, key, input_precision=HEADS.precision)
                if HEADS.rest_dim:
                    key_rest = _keys(
                        key_head_ptr + key_place + rest[:, None],
                        is_held[None, :],
                        (rest < HEADS.key_dim)[:, None],
                        query.dtype,
                        phase != 1,
                        HEADS.key_dim < HEADS.front_dim + HEADS.rest_dim,
                    )
                    scores = tl.dot(query_rest, key_rest, scores, input_precision=HEADS.precision)
                if HAS_SINK_QUERIES and phase == 0:
                    others = tl.dot(sink_queries, key, input_precision=HEADS.precision)
                    if HEADS.rest_dim:
                        others = tl.dot(
                            sink_query_rest, key_rest, others, input_precision=HEADS.precision
                        )
                    scores = tl.where((position < SEES.num_sink_tokens)[None, :], others, scores)
                if HAS_SCALES:
                    scale_place = scale_blocks * scale_block + inside * scale_slot + kv_head
                    key_scale = tl.load(key_scale_ptr + scale_place, mask=is_held, other=0.0)
                    value_scale = tl.load(value_scale_ptr + scale_place, mask=is_held, other=0.0)
                    scores = scores * (key_scale * factor)[None, :]
                else:
                    scores = scores * factor
                if SOFTCAP > 0.0:
                    scores = (1.0 - 2.0 / (tl.exp2(scores) + 1.0)) * (SOFTCAP * _LOG2E)
                if phase != 1:
                    visible = is_held[None, :] & (position[None, :] <= query_position[:, None])
                    if SEES.window:
                        in_window = position[None, :] > query_position[:, None] - SEES.window
                        visible = visible & (in_window | (position < SEES.num_sink_tokens)[None, :])
                    if SEES.chunk:
                        chunk_start = query_position - query_position % SEES.chunk
                        visible = visible & (position[None, :] >= chunk_start[:, None])
                    scores = tl.where(visible, scores, float("-inf"))

                highest_score = tl.maximum(top, tl.max(scores, 1))
                base = highest_score
                if phase != 1:
                    # Rows without a visible key yet: avoids inf - inf.
                    base = tl.where(highest_score == float("-inf"), 0.0, highest_score)
                old = tl.exp2(top - base)
                weights = tl.exp2(scores - base[:, None])
                total = total * old + tl.sum(weights, 1)
                top = highest_score
                if HAS_SCALES:
                    weights = weights * value_scale[None, :]
                if HEADS.shares_tiles:
                    value = tl.trans(key)
                else:
                    value_place = value_blocks * value_block + inside[:, None] * value_slot
                    value = _keys(
                        value_head_ptr + value_place + value_lanes[None, :],
                        is_held[:, None],
                        (value_lanes < HEADS.value_dim)[None, :],
                        query.dtype,
                        phase != 1,
                        HEADS.value_dim < HEADS.value_tile,
                    )
                acc = acc * old[:, None]
                acc = tl.dot(weights.to(query.dtype), value, acc, input_precision=HEADS.precision)

                tile = _tile_at(index + 1, edge, skipped, sink_tiles, start_tile)
                slot = tile * TILE + tl.arange(0, TILE)
                key_blocks = _blocks(table, slot[None, :], end, BLOCK_SIZE)
                value_blocks = _blocks(table, slot[:, None], end, BLOCK_SIZE)
                scale_blocks = _blocks(table, slot, end, BLOCK_SIZE)

        out_mask = is_row[:, None] & (value_lanes < HEADS.value_dim)[None, :]
        if IN_PARTS:
            offset = ((part_row + row // GROUP_TILE) * num_heads + head) * num_parts + part
            tl.store(state_ptr + offset * 2, top, mask=is_row)
            tl.store(state_ptr + offset * 2 + 1, total, mask=is_row)
            tl.store(
                part_ptr + offset[:, None] * HEADS.value_dim + value_lanes[None, :],
                acc,
                mask=out_mask,
            )
        else:
            if sink_ptr is not None:
                sink = tl.load(sink_ptr + head, mask=is_row, other=0.0) * _LOG2E
                total, acc = _with_sink(top, total, acc, sink)
            acc = acc / tl.where(total > 0.0, total, 1.0)[:, None]
            offset = ((begin + token) * num_heads + head) * HEADS.value_dim
            out = acc.to(out_ptr.dtype.element_ty)
            tl.store(out_ptr + offset[:, None] + value_lanes[None, :], out, mask=out_mask)


@triton.jit(do_not_specialize=["num_parts"])
def reduce_parts(
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
    PDL: tl.constexpr,
):
    """Reduce the partial results of the split keys (log-sum-exp rescaling). Grid: rows, heads."""
    await_predecessor(PDL)
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
        offset = first + part
        is_part = part < num_used
        part_m = tl.load(state_ptr + offset * 2, mask=is_part, other=float("-inf"))
        part_l = tl.load(state_ptr + offset * 2 + 1, mask=is_part, other=0.0)
        is_full = part_m > float("-inf")
        mask = is_full[:, None] & (lanes < VALUE_DIM)[None, :]
        mixed = tl.load(
            part_ptr + offset[:, None] * VALUE_DIM + lanes[None, :], mask=mask, other=0.0
        )
        highest = tl.maximum(top, tl.max(part_m, 0))
        base = tl.where(highest == float("-inf"), 0.0, highest)
        old = tl.exp2(top - base)
        factor = tl.where(is_full, tl.exp2(part_m - base), 0.0)
        total = total * old + tl.sum(part_l * factor, 0)
        acc = acc * old[:, None] + tl.sum(mixed * factor[:, None], 0)[None, :]
        top = highest
    if sink_ptr is not None:
        sink = tl.load(sink_ptr + head) * _LOG2E
        total, acc = _with_sink(top, total, acc, sink)
    acc = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    offset = (row * num_heads + head) * VALUE_DIM
    out = acc.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + offset + lanes[None, :], out, mask=(lanes < VALUE_DIM)[None, :])
