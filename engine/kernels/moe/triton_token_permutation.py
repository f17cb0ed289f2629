# pyright: reportCallIssue=false, reportGeneralTypeIssues=false
"""Visits of tokens to experts, dealt to tiles of rows, without a count that leaves the device."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..common.runtime import power_of_two
from ..linear.triton_gemm import TokenPermutation

MAX_ROWS = 128
"""Of a tile."""
MAX_SORTED = 4096
"""Visits up to which each is compared with every other; more are sorted by torch."""
BLOCK = 64


@triton.jit(do_not_specialize=["total"])
def _sort_by_expert(expert_ptr, order_ptr, total, BLOCK: tl.constexpr):
    """Visits in the order of their experts, and of their own. Grid: blocks of visits."""
    own = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    expert = tl.load(expert_ptr + own, mask=own < total, other=0)
    rank = tl.zeros([BLOCK], tl.int32)
    for begin in range(0, total, BLOCK):
        other = begin + tl.arange(0, BLOCK)
        theirs = tl.load(expert_ptr + other, mask=other < total, other=2147483647)
        is_before = theirs[None, :] < expert[:, None]
        is_before |= (theirs[None, :] == expert[:, None]) & (other[None, :] < own[:, None])
        rank += tl.sum(is_before.to(tl.int32), 1)
    tl.store(order_ptr + rank, own.to(tl.int64), mask=own < total)


@triton.jit(do_not_specialize=["total", "num_tiles"])
def _permute_tokens(
    expert_ptr,
    tile_ptr,
    total,
    num_experts,
    num_tiles,
    ROWS: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Tiles `[tiles, 3]`: expert, first row and the row after the last. One program."""
    number = tl.arange(0, EXPERTS)
    expert_rows = tl.zeros([EXPERTS], tl.int32)
    for begin in range(0, total, BLOCK):
        lane = begin + tl.arange(0, BLOCK)
        expert = tl.load(expert_ptr + lane, mask=lane < total, other=-1)
        expert_rows += tl.sum((expert[:, None] == number[None, :]).to(tl.int32), 0)
    ends = tl.cumsum(expert_rows, 0)
    tiles = (expert_rows + ROWS - 1) // ROWS
    tile_ends = tl.cumsum(tiles, 0)
    for begin in range(0, num_tiles, BLOCK):
        tile = begin + tl.arange(0, BLOCK)
        expert = tl.sum((tile_ends[None, :] <= tile[:, None]).to(tl.int32), 1)
        # A tile behind the last one begins behind the end of the last expert, and so is empty.
        expert = tl.minimum(expert, num_experts - 1)
        is_own = number[None, :] == expert[:, None]
        end = tl.sum(tl.where(is_own, ends[None, :], 0), 1)
        first = tl.sum(tl.where(is_own, (ends - expert_rows)[None, :], 0), 1)
        first_tile = tl.sum(tl.where(is_own, (tile_ends - tiles)[None, :], 0), 1)
        first += (tile - first_tile) * ROWS
        place, mask = tile_ptr + tile * 3, tile < num_tiles
        tl.store(place, expert, mask=mask)
        tl.store(place + 1, first, mask=mask)
        tl.store(place + 2, tl.minimum(first + ROWS, end), mask=mask)


def permute_tokens(experts: torch.Tensor, count: int, top_k: int) -> TokenPermutation:
    """Tiles of rows for visits to `experts [all top_k]`, of `count`: as many as there can be.

    Args:
        visits: of a token.
    """
    total = experts.shape[0]
    rows = min(MAX_ROWS, max(16, power_of_two(max(1, total // count))))
    num_tiles = total // rows + min(count, total)
    width = max(16, power_of_two(count))
    tiles = torch.empty(num_tiles, 3, dtype=torch.int32, device=experts.device)
    _permute_tokens[(1,)](
        experts,
        tiles,
        total,
        count,
        num_tiles,
        ROWS=rows,
        EXPERTS=width,
        BLOCK=max(1, min(BLOCK, 8192 // width)),
        num_warps=4,
    )
    if total > MAX_SORTED:
        return TokenPermutation(tiles, experts.argsort(stable=True), rows, top_k)
    order = torch.empty_like(experts)
    _sort_by_expert[(-(-total // BLOCK),)](experts, order, total, BLOCK=BLOCK, num_warps=4)
    return TokenPermutation(tiles, order, rows, top_k)
