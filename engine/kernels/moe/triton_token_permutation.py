# pyright: reportCallIssue=false, reportGeneralTypeIssues=false
"""Token permutation for grouped GEMMs (vLLM: moe_align_block_size), on the device, without host sync."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..common.runtime import power_of_two
from ..linear.triton_gemm import TokenPermutation

MAX_ROWS = 128
"""Most rows of a tile."""
MAX_SORTED = 4096
"""Routed rows (tokens x top_k) up to which they are sorted by pairwise comparison; above, by torch."""
BLOCK = 64


@triton.jit(do_not_specialize=["total"])
def _sort_by_expert(expert_ptr, order_ptr, total, BLOCK: tl.constexpr):
    """Stable sort of the routed rows by expert: the rank of each by counting. Grid: blocks of rows."""
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
    """Write the tiles `[tiles, 3]`: expert, first row, end row (exclusive). One program."""
    expert_id = tl.arange(0, EXPERTS)
    expert_rows = tl.zeros([EXPERTS], tl.int32)
    for begin in range(0, total, BLOCK):
        lane = begin + tl.arange(0, BLOCK)
        expert = tl.load(expert_ptr + lane, mask=lane < total, other=-1)
        expert_rows += tl.sum((expert[:, None] == expert_id[None, :]).to(tl.int32), 0)
    ends = tl.cumsum(expert_rows, 0)
    tiles = (expert_rows + ROWS - 1) // ROWS
    tile_ends = tl.cumsum(tiles, 0)
    for begin in range(0, num_tiles, BLOCK):
        tile = begin + tl.arange(0, BLOCK)
        expert = tl.sum((tile_ends[None, :] <= tile[:, None]).to(tl.int32), 1)
        # A surplus tile begins after the end of the last expert, and so is empty.
        expert = tl.minimum(expert, num_experts - 1)
        is_expert = expert_id[None, :] == expert[:, None]
        end = tl.sum(tl.where(is_expert, ends[None, :], 0), 1)
        first = tl.sum(tl.where(is_expert, (ends - expert_rows)[None, :], 0), 1)
        first_tile = tl.sum(tl.where(is_expert, (tile_ends - tiles)[None, :], 0), 1)
        first += (tile - first_tile) * ROWS
        place, mask = tile_ptr + tile * 3, tile < num_tiles
        tl.store(place, expert, mask=mask)
        tl.store(place + 1, first, mask=mask)
        tl.store(place + 2, tl.minimum(first + ROWS, end), mask=mask)


def permute_tokens(experts: torch.Tensor, count: int, top_k: int) -> TokenPermutation:
    """The token permutation of a routing; the number of tiles is the static upper bound.

    Args:
        experts: expert ids `[tokens * top_k]`, of `count` experts.
        top_k: output rows that read the same input row.
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
