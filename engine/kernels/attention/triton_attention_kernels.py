# pyright: reportAssignmentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false, reportPossiblyUnboundVariable=false
"""Triton kernels of paged attention: FlashAttention-2 over block tables, with Flash-Decoding's split keys.

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
def _split(num_tiles, SEES: tl.constexpr):
    """Key tiles of a part of the split, and number of parts: they follow from the sequence alone."""
    part_tiles = tl.maximum((num_tiles + SEES.max_parts - 1) // SEES.max_parts, SEES.part_tiles)
    return part_tiles, tl.maximum((num_tiles + part_tiles - 1) // part_tiles, 1)


@triton.jit(do_not_specialize=["num_query_tiles", "head_programs"])
def list_parts(
    work_ptr,
    arrived_ptr,
    tile_ptr,
    segment_ptr,
    num_query_tiles,
    head_programs,
    TOKENS: tl.constexpr,
    SEES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """List the split keys: number of parts, then query tile * `max_parts` + part. Set the counts of arrived
    parts, `arrived_ptr` int32 [tiles, head_programs], to 0. Grid: blocks of tiles."""
    own = tl.program_id(0) * BLOCK
    before = 0
    for begin in range(0, own + 1, BLOCK):
        tile = begin + tl.arange(0, BLOCK)
        is_tile = tile < num_query_tiles
        segment = segment_ptr + tl.load(tile_ptr + tile * 3, mask=is_tile, other=0) * 6
        first = tl.load(tile_ptr + tile * 3 + 1, mask=is_tile, other=0)
        _, _, _, num_tiles = _visible_tiles(first, _span(segment), TOKENS, SEES)
        parts = tl.where(is_tile, _split(num_tiles, SEES)[1], 0).to(tl.int32)
        if begin < own:
            before += tl.sum(parts, 0)
        else:
            ends = tl.cumsum(parts, 0)
            pointer = work_ptr + 1 + before + ends - parts
            for part in range(tl.max(parts, 0)):
                tl.store(pointer + part, tile * SEES.max_parts + part, mask=part < parts)
            for program in range(head_programs):
                tl.store(arrived_ptr + tile * head_programs + program, 0, mask=is_tile)
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


@triton.jit
def _reduced(part_ptr, state_ptr, first, num_used, is_row, lanes, mask, VALUE_DIM: tl.constexpr):
    """Reduce the parts of a tile's rows (log-sum-exp rescaling), eight at a time; `first`: index of each
    row's first part, `lanes`: elements of the values."""
    top = tl.full(first.shape, float("-inf"), tl.float32)
    total = tl.full(first.shape, 0.0, tl.float32)
    acc = tl.full(mask.shape, 0.0, tl.float32)
    for begin in range(0, num_used, 8):
        highest, tops, totals = top, (), ()
        for index in tl.static_range(8):
            state = state_ptr + (first + begin + index) * 2
            is_held = is_row & (begin + index < num_used)
            tops = tops + (tl.load(state, mask=is_held, other=float("-inf")),)  # noqa: RUF005
            totals = totals + (tl.load(state + 1, mask=is_held, other=0.0),)  # noqa: RUF005
            highest = tl.maximum(highest, tops[index])
        base = tl.where(highest == float("-inf"), 0.0, highest)
        old = tl.exp2(top - base)
        top = highest
        weighted = ()
        mixed = tl.full(acc.shape, 0.0, tl.float32)
        for index in tl.static_range(8):
            at = (first + begin + index)[:, None] * VALUE_DIM + lanes[None, :]
            value = tl.load(part_ptr + at, mask=mask & (begin + index < num_used), other=0.0)
            is_full = tops[index] > float("-inf")
            factor = tl.where(is_full, tl.exp2(tops[index] - base), 0.0)
            mixed += tl.where(is_full[:, None], value, 0.0) * factor[:, None]
            weighted = weighted + (totals[index] * factor,)  # noqa: RUF005 - a starred tuple is no Triton
        a, b, c, d, e, f, g, h = weighted
        total = total * old + (((a + b) + (c + d)) + ((e + f) + (g + h)))
        acc = acc * old[:, None] + mixed
    return top, total, acc


@triton.jit
def _write(out, sink, is_row, mask, top, total, acc):
    """Write the results of a tile's rows, with a learned sink logit if there is one; it weighs no value."""
    if sink is not None:
        logit = tl.load(sink, mask=is_row, other=0.0) * _LOG2E
        highest = tl.maximum(top, logit)
        old = tl.exp2(top - highest)
        total = total * old + tl.exp2(logit - highest)
        acc = acc * old[:, None]
    acc = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    tl.store(out, acc.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_parts"])
def attend(
    out_ptr,
    part_ptr,
    state_ptr,
    arrived_ptr,
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
    REDUCES: tl.constexpr,
    PDL: tl.constexpr,
):
    """FlashAttention-2 forward. Grid: query tiles x tiles of heads, the heads fastest.

    With `IN_PARTS` the programs are persistent: those of a tile of heads share the work list `work_ptr` of
    `list_parts` among them. Of a tile in several parts the program that arrives last, by the count in
    `arrived_ptr`, reduces them in their order; without `REDUCES`, `reduce_parts` does.

    `tile_ptr` int64 [tiles, 3]: segment, its first token, its first row among the partial results;
    `segment_ptr` int64 [segments, 6]: begin, tokens, num_cached, sink_length, evicted_span, offset of its
    block table.
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
            part_tiles, num_used = _split(num_tiles, SEES)
            from_tile = part * part_tiles
            to_tile = tl.minimum(from_tile + part_tiles, num_tiles)
        else:
            num_used: tl.constexpr = 1

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
        offset = ((begin + token) * num_heads + head) * HEADS.value_dim
        row_ptr = out_ptr + offset[:, None]
        sink = sink_ptr + head if sink_ptr is not None else None
        if num_used == 1:
            _write(row_ptr + value_lanes[None, :], sink, is_row, out_mask, top, total, acc)
        else:
            first_part = ((part_row + row // GROUP_TILE) * num_heads + head) * num_parts
            own_part = first_part + part
            tl.store(state_ptr + own_part * 2, top, mask=is_row)
            tl.store(state_ptr + own_part * 2 + 1, total, mask=is_row)
            sums_ptr = part_ptr + own_part[:, None] * HEADS.value_dim
            tl.store(sums_ptr + value_lanes[None, :], acc, mask=out_mask)
            if REDUCES:
                # Every thread has stored its part before one of them counts the program as arrived.
                tl.debug_barrier()
                arrived = arrived_ptr + query_tile * HEAD_PROGRAMS + head_program
                if tl.atomic_add(arrived, 1, sem="acq_rel", scope="gpu") == num_used - 1:
                    # Of so many elements of each row eight parts take 64 registers.
                    FIT: tl.constexpr = 256 * TILING.warps // ROWS
                    LANES: tl.constexpr = FIT if HEADS.value_tile > FIT else HEADS.value_tile
                    for lane in range(0, HEADS.value_tile, LANES):
                        some = lane + tl.arange(0, LANES)
                        is_some = is_row[:, None] & (some < HEADS.value_dim)[None, :]
                        given = part_ptr, state_ptr, first_part, num_used, is_row, some, is_some
                        reduced = _reduced(*given, HEADS.value_dim)
                        _write(row_ptr + some[None, :], sink, is_row, is_some, *reduced)
                    tl.store(arrived, 0)


@triton.jit(do_not_specialize=["num_parts"])
def reduce_parts(
    out_ptr,
    part_ptr,
    state_ptr,
    sink_ptr,
    tile_ptr,
    segment_ptr,
    num_heads,
    num_parts,
    HEADS: tl.constexpr,
    SEES: tl.constexpr,
    TOKENS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Reduce the parts of large tiles, of which `attend` wrote those of a single part. Grid: tiles, heads."""
    await_predecessor(PDL)
    at = tile_ptr + tl.program_id(0) * 3
    first = tl.load(at + 1)
    segment = segment_ptr + tl.load(at) * 6
    span = _span(segment)
    _, _, _, num_tiles = _visible_tiles(first, span, TOKENS, SEES)
    _, num_used = _split(num_tiles, SEES)
    if num_used > 1:
        token, head = first + tl.arange(0, TOKENS), tl.program_id(1)
        is_row = token < span[0]
        lanes = tl.arange(0, HEADS.value_tile)
        mask = is_row[:, None] & (lanes < HEADS.value_dim)[None, :]
        first_part = ((tl.load(at + 2) + tl.arange(0, TOKENS)) * num_heads + head) * num_parts
        given = part_ptr, state_ptr, first_part, num_used, is_row, lanes, mask
        reduced = _reduced(*given, HEADS.value_dim)
        offset = ((tl.load(segment) + token) * num_heads + head) * HEADS.value_dim
        sink = sink_ptr + head + token * 0 if sink_ptr is not None else None
        _write(out_ptr + offset[:, None] + lanes[None, :], sink, is_row, mask, *reduced)
