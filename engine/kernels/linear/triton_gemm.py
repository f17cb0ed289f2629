# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportAssignmentType=false
# pyright: reportPossiblyUnboundVariable=false
"""Mixed-input GEMM with fused dequantization, `y = x @ weight.T`: one kernel for all grids and input dtypes.

A tile of codes is dequantized in registers to the inputs' dtype: bfloat16, float16, float32, or int8 and
e4m3 for quantized activations. Outputs are the rows of a tile and tokens its columns, because Hopper's tensor
cores take rows from registers, 64 of them, and as few columns as 8.

Scales are applied to the partial sums of their groups, not to the weights, so 16 bits hold integer codes
exactly. With few output tiles the input channels are split over programs (split-K); the number of splits
depends on the weight alone, so the results are batch-invariant up to `FEW_TOKENS` tokens. With a
`TokenPermutation` it is a grouped GEMM over experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

from ..common.runtime import power_of_two
from .triton_dequantize import (
    MAGIC,
    constants,
    dequantize_tile,
    group_of,
    pointers,
    scale_of,
    strides,
)
from .triton_packed_weight import OUTPUTS, PIECES, TritonPackedWeight

FEW_TOKENS = 64
"""Decode-sized batches: tokens per call up to which the GEMM is split-K."""
MULTIPROCESSORS = 132
"""Of a Hopper GPU: the target number of programs of prefill-sized batches; four times that for decode."""

REDUCE_BLOCK = 512
"""Elements per program of the split-K reduction."""


@triton.jit(do_not_specialize=["num_rows"])
def _gemm(
    x_ptr,
    x_scale_ptr,
    code_ptr,
    scale_ptr,
    outer_scale_ptr,
    low_ptr,
    outer_low_ptr,
    table_ptr,
    out_ptr,
    order_ptr,
    part_ptr,
    magic,
    num_rows,
    num_outputs,
    columns,
    num_runs,
    runs_per_split,
    x_row,
    x_scale_row,
    code_tile,
    code_run,
    code_row,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    PIECE: tl.constexpr,
    BITS: tl.constexpr,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    ZERO: tl.constexpr,
    IS_AFFINE: tl.constexpr,
    NESTED: tl.constexpr,
    TABLE_ROW: tl.constexpr,
    X_RUN: tl.constexpr,
    IS_INTEGER: tl.constexpr,
    TOP_K: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Grid: tiles of outputs, splits of K, tiles of rows. `out_ptr` [splits, rows, outputs].

    `X_RUN`: group size of the activation scales; 0: per token; -1: unquantized inputs. With `TOP_K` (grouped
    GEMM) each tile of rows has one part (expert) of the weight and a range of `order_ptr`, which holds its
    rows; `TOP_K` consecutive rows read the same row of `x`.
    """
    PIECES: tl.constexpr = 4 if BITS == 4 else 1
    WORDS: tl.constexpr = PIECE // 2 if BITS == 4 else PIECE
    # Affine grids are dequantized with their scales. Hopper accumulates e4m3 in few bits: keep sums short.
    IS_E4M3: tl.constexpr = x_ptr.dtype.element_ty == tl.float8e4nv
    BY_GROUP: tl.constexpr = (GROUP > 0 and not IS_AFFINE) or X_RUN > 0 or IS_E4M3
    TYPE: tl.constexpr = tl.int32 if IS_INTEGER else tl.float32
    tile = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1).to(tl.int64)
    column = tile * OUTPUTS + tl.arange(0, OUTPUTS)
    if TOP_K > 0:
        at = part_ptr + tl.program_id(2) * 3
        begin, end = tl.load(at + 1), tl.load(at + 2)
        lane = begin + tl.arange(0, ROWS)
        is_row = lane < end
        row = tl.load(order_ptr + lane, mask=is_row, other=0).to(tl.int64)
        source = row // TOP_K
        tile += tl.load(at) * tl.num_programs(0)
        # An empty tile skips its loop.
        num_runs = tl.where(begin < end, num_runs, 0)
    else:
        row = tl.program_id(2).to(tl.int64) * ROWS + tl.arange(0, ROWS)
        is_row = row < num_rows
        source = row
    output = tile * OUTPUTS + tl.arange(0, OUTPUTS)
    lanes = tl.arange(0, PIECE)
    within = tl.arange(0, OUTPUTS)[:, None].to(tl.int64) * code_row + tl.arange(0, WORDS)[None, :]
    sums = tl.full([OUTPUTS, ROWS], 0, TYPE)
    total = tl.full([OUTPUTS, ROWS], 0.0, tl.float32)
    end_run = tl.minimum(split * runs_per_split + runs_per_split, num_runs)
    for run in tl.range(split * runs_per_split, end_run, num_stages=STAGES):
        packed = tl.load(code_ptr + tile * code_tile + run * code_run + within)
        for piece in tl.static_range(PIECES):
            first = (run * PIECES + piece) * PIECE
            group = group_of(run, piece, PIECES, PIECE, GROUP)
            place = x_ptr + source[None, :] * x_row + first + lanes[:, None]
            x = tl.load(place, mask=is_row[None, :], other=0.0)
            value = dequantize_tile(
                packed,
                piece,
                magic,
                low_ptr,
                outer_low_ptr,
                scale_ptr,
                outer_scale_ptr,
                table_ptr,
                group,
                output,
                columns,
                KIND,
                BITS,
                ZERO,
                IS_AFFINE,
                NESTED,
                TABLE_ROW,
                x.dtype,
            )
            if BY_GROUP:
                sums = tl.full([OUTPUTS, ROWS], 0, TYPE)
            value = value.to(x.dtype)
            sums = tl.dot(value, x, sums, input_precision=PRECISION, out_dtype=TYPE)
            if BY_GROUP:
                part_sum = sums.to(tl.float32)
                if X_RUN > 0:
                    at = x_scale_ptr + source * x_scale_row + first // X_RUN
                    part_sum *= tl.load(at, mask=is_row, other=0.0)[None, :]
                if GROUP > 0 and not IS_AFFINE:
                    scale = scale_of(scale_ptr, outer_scale_ptr, group, output, columns, NESTED)
                    part_sum *= scale[:, None]
                total += part_sum
    if not BY_GROUP:
        total = sums.to(tl.float32)
    if X_RUN == 0:
        total *= tl.load(x_scale_ptr + source * x_scale_row, mask=is_row, other=0.0)[None, :]
    if GROUP == 0 and not IS_AFFINE:
        total *= scale_of(scale_ptr, outer_scale_ptr, 0, output, columns, NESTED)[:, None]
    place = (split * num_rows + row[None, :]) * num_outputs + column[:, None]
    mask = is_row[None, :] & (column < num_outputs)[:, None]
    tl.store(out_ptr + place, total.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_splits", "size"])
def _reduce_splits(part_ptr, out_ptr, num_splits, size, BLOCK: tl.constexpr):
    """Split-K reduction: sum `[num_splits, size]` over the splits. Grid: blocks of elements."""
    lanes = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = lanes < size
    total = tl.zeros([BLOCK], tl.float32)
    for _ in range(num_splits):
        total += tl.load(part_ptr + lanes, mask=mask, other=0.0)
        part_ptr += size
    tl.store(out_ptr + lanes, total.to(out_ptr.dtype.element_ty), mask=mask)


@dataclass(frozen=True, slots=True)
class TokenPermutation:
    """Token permutation of a grouped GEMM: rows sorted by expert, in tiles (vLLM: moe_align_block_size).

    Attributes:
        tiles: int32 `[tiles, 3]`: part of the weight (expert), begin and end of a range of `order`, which
            may be empty.
        order: int64 `[rows]`, the output rows sorted by part.
        rows: the most rows of a tile.
        top_k: output rows that read the same row of `x`.
    """

    tiles: torch.Tensor
    order: torch.Tensor
    rows: int
    top_k: int


def gemm(
    x: torch.Tensor,
    weight: TritonPackedWeight,
    dtype: torch.dtype,
    x_scales: torch.Tensor | None = None,
    parts: TokenPermutation | None = None,
) -> torch.Tensor:
    """`x [tokens, in] @ weight.T` in `dtype`, `[tokens, out]`, or with `parts` `[rows, out]` (grouped GEMM).

    Args:
        x: floats; or int8 or e4m3 codes, with `x_scales`.
        x_scales: float32 `[tokens, 1]`, or `[tokens, groups]` for groups of 128.
    """
    if weight.order is not None:
        x = x.index_select(1, weight.order)
    x = x if x.stride(1) == 1 else x.contiguous()
    count = x.shape[0] if parts is None else parts.order.shape[0]
    if not count:
        return x.new_empty(0, weight.out_features, dtype=dtype)
    if parts is not None:
        rows, row_tiles = parts.rows, parts.tiles.shape[0]
    else:
        # `tl.dot` takes at least 16 rows.
        rows = min(2 * FEW_TOKENS, max(16, power_of_two(count)))
        row_tiles = -(-count // rows)
    is_large = rows > FEW_TOKENS
    outputs = 2 * OUTPUTS if is_large and not weight.is_packed else OUTPUTS
    num_tiles = weight.part_outputs // outputs
    if count <= FEW_TOKENS:
        num_splits = max(1, 4 * MULTIPROCESSORS // num_tiles)
    else:
        num_splits = max(1, MULTIPROCESSORS // (num_tiles * row_tiles))
    runs_per_split = -(-weight.num_runs // min(num_splits, max(1, weight.num_runs // 2)))
    num_splits = -(-weight.num_runs // runs_per_split)
    wide = torch.float32 if num_splits > 1 else dtype
    out = torch.empty(num_splits, count, weight.out_features, dtype=wide, device=x.device)
    x_run = -1
    if x_scales is not None:
        x_run = 0 if x_scales.shape[1] == 1 else 128
    _gemm[(num_tiles, num_splits, row_tiles)](
        x,
        out if x_scales is None else x_scales,
        weight.codes,
        *pointers(weight),
        out,
        out if parts is None else parts.order,
        out if parts is None else parts.tiles,
        MAGIC.get(x.dtype, 0),
        count,
        weight.out_features,
        weight.padded,
        weight.num_runs,
        runs_per_split,
        x.stride(0),
        0 if x_scales is None else x_scales.stride(0),
        *strides(weight, outputs),
        ROWS=rows,
        OUTPUTS=outputs,
        X_RUN=x_run,
        IS_INTEGER=x.dtype is torch.int8,
        TOP_K=0 if parts is None else parts.top_k,
        PRECISION="ieee" if x.dtype is torch.float32 else "tf32",
        STAGES=_stages(x, weight, rows, outputs),
        **constants(weight),
        num_warps=8 if is_large else 4,
    )
    return out[0] if num_splits == 1 else _reduced(out, dtype)


def _reduced(parts: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Reduce partial sums [splits, rows, outputs] over the splits."""
    num_splits, rows, outputs = parts.shape
    out = torch.empty(rows, outputs, dtype=dtype, device=parts.device)
    size = out.numel()
    _reduce_splits[(-(-size // REDUCE_BLOCK),)](
        parts, out, num_splits, size, BLOCK=REDUCE_BLOCK, num_warps=4
    )
    return out


def _stages(x: torch.Tensor, weight: TritonPackedWeight, rows: int, outputs: int) -> int:
    """Software-pipelining stages that fit shared memory."""
    inputs = weight.piece * (PIECES if weight.is_packed else 1)
    codes = inputs // 2 if weight.is_packed else inputs * weight.codes.element_size()
    run = rows * inputs * x.element_size() + outputs * codes
    return max(1, min(4, _shared_bytes(x.device) * 3 // 4 // run))


@cache
def _shared_bytes(device: torch.device) -> int:
    """Shared memory per program, in bytes; without a GPU, Hopper's."""
    if device.type != "cuda":
        return 227 * 1024
    driver: Any = triton.runtime.driver.active
    return driver.utils.get_device_properties(device.index or 0)["max_shared_mem"]
