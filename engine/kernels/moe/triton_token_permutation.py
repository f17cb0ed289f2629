# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportPossiblyUnboundVariable=false
"""Token permutation for grouped GEMMs (vLLM: moe_align_block_size), on the device, without host sync.

A counting sort: a row's rank is the rows of smaller experts, plus its own expert's before it. Few rows take
one launch, each of whose programs counts all; more take two, to count and to rank blocks of rows.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from ..common.devices import power_of_two
from ..elementwise.reference import GatedActivation
from ..elementwise.triton_rows import activated
from ..linear.triton_gemm import TokenPermutation

MIN_ROWS, MAX_ROWS = 16, 128
"""Least and most rows of a tile, where the weights set no other limit."""
MAX_COUNTED = 1024
"""Routed rows (tokens x top_k) up to which every program counts all of them."""
BLOCK, COUNTED_BLOCK = tl.constexpr(64), tl.constexpr(256)
"""Rows of a program that counts all, and of one where blocks are counted first."""


@triton.jit
def _write_tiles(
    tile_ptr, expert_rows, expert_id, num_experts, tile, num_tiles, ROWS: tl.constexpr
):
    """Write the tiles `[tiles, 3]` numbered `tile`: expert, first row, end row (exclusive)."""
    ends = tl.cumsum(expert_rows, 0)
    tiles = (expert_rows + ROWS - 1) // ROWS
    tile_ends = tl.cumsum(tiles, 0)
    expert = tl.sum((tile_ends[None, :] <= tile[:, None]).to(tl.int32), 1)
    # A surplus tile begins after the end of the last expert, and so is empty.
    expert = tl.minimum(expert, num_experts - 1)
    is_expert = expert_id[None, :] == expert[:, None]
    end = tl.sum(tl.where(is_expert, ends[None, :], 0), 1)
    first = tl.sum(tl.where(is_expert, (ends - expert_rows)[None, :], 0), 1)
    first_tile = tl.sum(tl.where(is_expert, (tile_ends - tiles)[None, :], 0), 1)
    first += (tile - first_tile) * ROWS
    pointers, mask = tile_ptr + tile * 3, tile < num_tiles
    tl.store(pointers, expert, mask=mask)
    tl.store(pointers + 1, first, mask=mask)
    tl.store(pointers + 2, tl.minimum(first + ROWS, end), mask=mask)


@triton.jit
def _counted(expert_ptr, begin, total, expert_id, LANES: tl.constexpr):
    """Rows of each expert among `LANES` of them from `begin` on."""
    lane = begin + tl.arange(0, LANES)
    expert = tl.load(expert_ptr + lane, mask=lane < total, other=-1)
    return tl.sum((expert[:, None] == expert_id[None, :]).to(tl.int32), 0)


@triton.jit(do_not_specialize=["total", "num_experts", "num_tiles"])
def _permute_few(
    expert_ptr,
    order_ptr,
    tile_ptr,
    total,
    num_experts,
    num_tiles,
    ROWS: tl.constexpr,
    EXPERTS: tl.constexpr,
    LANES: tl.constexpr,
):
    """Rank rows by comparing them with all others; program 0 writes the tiles too. Grid: blocks of rows."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    expert = tl.load(expert_ptr + row, mask=row < total, other=0)
    rank = tl.zeros([BLOCK], tl.int32)
    for begin in range(0, total, BLOCK):
        other = begin + tl.arange(0, BLOCK)
        other_expert = tl.load(expert_ptr + other, mask=other < total, other=2147483647)
        is_before = other_expert[None, :] < expert[:, None]
        is_before |= (other_expert[None, :] == expert[:, None]) & (other[None, :] < row[:, None])
        rank += tl.sum(is_before.to(tl.int32), 1)
    tl.store(order_ptr + rank, row.to(tl.int64), mask=row < total)
    if tl.program_id(0) == 0:
        expert_id = tl.arange(0, EXPERTS)
        expert_rows = tl.zeros([EXPERTS], tl.int32)
        for begin in range(0, total, LANES):
            expert_rows += _counted(expert_ptr, begin, total, expert_id, LANES)
        for begin in range(0, num_tiles, LANES):
            tile = begin + tl.arange(0, LANES)
            _write_tiles(tile_ptr, expert_rows, expert_id, num_experts, tile, num_tiles, ROWS)


@triton.jit(do_not_specialize=["total"])
def _count_blocks(expert_ptr, count_ptr, total, EXPERTS: tl.constexpr, LANES: tl.constexpr):
    """Write the rows of each expert in a block, `[blocks, EXPERTS]`. Grid: blocks of rows."""
    block = tl.program_id(0)
    expert_id = tl.arange(0, EXPERTS)
    expert_rows = tl.zeros([EXPERTS], tl.int32)
    for begin in range(block * COUNTED_BLOCK, (block + 1) * COUNTED_BLOCK, LANES):
        expert_rows += _counted(expert_ptr, begin, total, expert_id, LANES)
    tl.store(count_ptr + block * EXPERTS + expert_id, expert_rows)


@triton.jit(do_not_specialize=["total", "num_experts", "num_tiles", "num_blocks"])
def _rank_blocks(
    expert_ptr,
    count_ptr,
    order_ptr,
    tile_ptr,
    total,
    num_experts,
    num_tiles,
    num_blocks,
    ROWS: tl.constexpr,
    EXPERTS: tl.constexpr,
    LANES: tl.constexpr,
):
    """Rank a block's rows from the counts of all blocks, and write a share of the tiles. Grid: blocks."""
    block = tl.program_id(0)
    expert_id = tl.arange(0, EXPERTS)
    expert_rows, before = tl.zeros([EXPERTS], tl.int32), tl.zeros([EXPERTS], tl.int32)
    for begin in range(0, num_blocks, LANES):
        other = begin + tl.arange(0, LANES)
        pointers = count_ptr + other[:, None] * EXPERTS + expert_id[None, :]
        counts = tl.load(pointers, mask=(other < num_blocks)[:, None], other=0)
        expert_rows += tl.sum(counts, 0)
        before += tl.sum(tl.where((other < block)[:, None], counts, 0), 0)
    before += tl.cumsum(expert_rows, 0) - expert_rows
    for begin in range(block * COUNTED_BLOCK, (block + 1) * COUNTED_BLOCK, LANES):
        row = begin + tl.arange(0, LANES)
        expert = tl.load(expert_ptr + row, mask=row < total, other=-1)
        is_expert = expert[:, None] == expert_id[None, :]
        rank = tl.sum(tl.where(is_expert, before[None, :], 0), 1)
        same = (expert[None, :] == expert[:, None]) & (row[None, :] < row[:, None])
        rank += tl.sum(same.to(tl.int32), 1)
        tl.store(order_ptr + rank, row.to(tl.int64), mask=row < total)
        before += tl.sum(is_expert.to(tl.int32), 0)
    for begin in range(block * LANES, num_tiles, num_blocks * LANES):
        tile = begin + tl.arange(0, LANES)
        _write_tiles(tile_ptr, expert_rows, expert_id, num_experts, tile, num_tiles, ROWS)


def permute_tokens(
    experts: torch.Tensor,
    count: int,
    top_k: int,
    rows_between: tuple[int, int] = (MIN_ROWS, MAX_ROWS),
    *,
    has_others: bool = False,
) -> TokenPermutation:
    """The token permutation of a routing, expert ids `[tokens * top_k]`; its tiles are the static bound.
    `rows_between`: least and most rows of a tile, which otherwise has about as many as an expert.
    `has_others`: some rows have the id `count`, of experts elsewhere: they are in no tile."""
    total = experts.shape[0]
    least, most = rows_between
    rows = min(most, max(least, power_of_two(max(1, total // count))))
    num_tiles = total // rows + min(count, total)
    width = max(16, power_of_two(count + has_others))
    lanes = max(1, min(BLOCK.value, 8192 // width))
    tiles = torch.empty(num_tiles, 3, dtype=torch.int32, device=experts.device)
    order = torch.empty_like(experts)
    shape: dict[str, Any] = {"EXPERTS": width, "LANES": lanes, "num_warps": 4}
    if total <= MAX_COUNTED:
        grid, sizes = (max(1, -(-total // BLOCK.value)),), (total, count, num_tiles)
        _permute_few[grid](experts, order, tiles, *sizes, ROWS=rows, **shape)
        return TokenPermutation(tiles, order, rows, top_k, top_k)
    blocks = -(-total // COUNTED_BLOCK.value)
    counts = torch.empty(blocks, width, dtype=torch.int32, device=experts.device)
    _count_blocks[(blocks,)](experts, counts, total, **shape)
    shape["ROWS"] = rows
    _rank_blocks[(blocks,)](experts, counts, order, tiles, total, count, num_tiles, blocks, **shape)
    return TokenPermutation(tiles, order, rows, top_k, top_k)


COLUMNS = tl.constexpr(1024)


@triton.jit(do_not_specialize=["size"])
def _biased_gate(
    row_ptr, bias_ptr, expert_ptr, out_ptr, size, row_stride, ACTIVATION: tl.constexpr
):
    """`activation(gate) * up` of rows [gate, up] plus their expert's bias. Grid: rows, blocks of a row."""
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = lanes < size
    bias = bias_ptr + tl.load(expert_ptr + row) * 2 * size + lanes
    pointers = row_ptr + row * row_stride + lanes
    dtype = row_ptr.dtype.element_ty
    gate = tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
    gate += tl.load(bias, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(pointers + size, mask=mask, other=0.0).to(tl.float32)
    up += tl.load(bias + size, mask=mask, other=0.0).to(tl.float32)
    # Rounded as the unfused sum is.
    gate, up = gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32)
    tl.store(out_ptr + row * size + lanes, activated(gate, up, dtype, ACTIVATION), mask=mask)


def biased_gate(
    rows: torch.Tensor, bias: torch.Tensor, experts: torch.Tensor, activation: GatedActivation
) -> torch.Tensor:
    """`activation(gate) * up` [rows, inner] of `rows [rows, 2 * inner] + bias[experts]`, gate before up."""
    count, size = rows.shape[0], rows.shape[1] // 2
    out = rows.new_empty(count, size)
    if count:
        grid, strides = (count, -(-size // COLUMNS.value)), (size, rows.stride(0))
        given = rows, bias, experts, out, *strides
        _biased_gate[grid](*given, ACTIVATION=activation, num_warps=4)
    return out


@triton.jit(do_not_specialize=["size"])
def _weighted_sum(
    row_ptr,
    weight_ptr,
    bias_ptr,
    expert_ptr,
    added_ptr,
    out_ptr,
    size,
    added_row,
    TOP_K: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    """Sum of a token's rows in float32, with `EXPERTS` of those below it. Grid: tokens, blocks of a row."""
    token = tl.program_id(0).to(tl.int64)
    lanes = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = lanes < size
    total = tl.zeros([COLUMNS], tl.float32)
    for choice in tl.static_range(TOP_K):
        row = token * TOP_K + choice
        is_here = mask
        if EXPERTS > 0:
            is_here &= tl.load(expert_ptr + row) < EXPERTS
        x = tl.load(row_ptr + row * size + lanes, mask=is_here, other=0.0).to(tl.float32)
        if bias_ptr is not None:
            bias = bias_ptr + tl.load(expert_ptr + row) * size + lanes
            x += tl.load(bias, mask=mask, other=0.0).to(tl.float32)
        if weight_ptr is not None:
            x *= tl.load(weight_ptr + row)
        total += x
    if added_ptr is not None:
        added = added_ptr + token * added_row + lanes
        total += tl.load(added, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * size + lanes, total.to(out_ptr.dtype.element_ty), mask=mask)


def weighted_sum(
    rows: torch.Tensor,
    weights: torch.Tensor | None,
    bias: torch.Tensor | None,
    experts: torch.Tensor,
    top_k: int,
    added: torch.Tensor | None = None,
    num_experts: int | None = None,
) -> torch.Tensor:
    """`sum(weights * (rows + bias[experts])) + added` over the `top_k` rows of each token, [tokens, size].
    `rows` [tokens * top_k, size], `weights` float32 [tokens, top_k] or None, `bias` [experts, size]; experts
    from `num_experts` on are not computed here."""
    size, tokens = rows.shape[1], rows.shape[0] // top_k
    out = rows.new_empty(tokens, size)
    if tokens:
        weights = None if weights is None else weights.contiguous()
        _weighted_sum[(tokens, -(-size // COLUMNS.value))](
            *(rows, weights, bias, experts, added, out),
            *(size, 0 if added is None else added.stride(0)),
            TOP_K=top_k,
            EXPERTS=num_experts or 0,
            num_warps=4,
        )
    return out
