# pyright: reportAssignmentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportPossiblyUnboundVariable=false
"""Mixed-input GEMM with fused dequantization, `y = x @ weight.T`: one kernel for all grids and input dtypes.

A tile of codes is dequantized in registers to the inputs' dtype: floats, int8 or e4m3. Outputs are the rows
of a tile and tokens its columns: Hopper's tensor cores take 64 rows from registers, and 8 columns.

Scales apply to the partial sums of groups, so 16 bits hold integer codes exactly. With few output tiles the
inputs are split over programs (split-K), by the weight alone; the last to arrive adds the sums. So results
are batch-invariant up to `FEW_TOKENS` tokens. A `TokenPermutation` makes it a grouped GEMM.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ..common.devices import (
    DECODE_SLOTS,
    FEW_ROWS,
    FEW_TOKENS,
    MAGIC,
    RESERVED,
    decode_slots,
    dependent_launch,
    gpu_limits,
    or_unread,
    power_of_two,
    split_runs,
)
from ..common.triton_language import await_predecessor
from .triton_dequantize import (
    HAS_PTX,
    LOOKUP_REGISTERS,
    decode,
    group_of,
    look_up,
    lookup_ptx,
    low_of,
    pointers,
    scale_of,
    strides,
    unpack,
    unpack_short,
    zeros_of,
)
from .triton_packed_weight import OUTPUTS, PIECES, TritonPackedWeight

MOST_TILES = 1 << 16
"""Tiles of a batch up to which it is split: each has a count of the programs that have arrived."""


@triton.jit
def _scales(pointers, run, piece, output, columns, is_row, GRID: tl.constexpr, X_RUN: tl.constexpr):
    """The factors of the group of a piece: scales, zero points or minimums, scales of the inputs."""
    scale_ptr, outer_scale_ptr, low_ptr, outer_low_ptr, x_scale_ptr = pointers
    group = group_of(run, piece, GRID)
    if GRID.group > 0 or GRID.is_affine:
        scale = scale_of(scale_ptr, outer_scale_ptr, group, output, columns, GRID)
    else:
        scale = (output * 0).to(tl.float32)
    low = low_of(low_ptr, outer_low_ptr, group, output, columns, GRID)
    if X_RUN > 0:
        at = x_scale_ptr + (run * GRID.pieces + piece) * GRID.piece // X_RUN
        x_scale = tl.load(at, mask=is_row, other=0.0)
    else:
        x_scale = is_row.to(tl.float32)
    return scale, low, x_scale


@triton.jit
def _run_scales(pointers, run, output, columns, is_row, GRID: tl.constexpr, X_RUN: tl.constexpr):
    PIECES: tl.constexpr = GRID.pieces
    scales = ()
    for piece in tl.static_range(PIECES):
        factors = _scales(pointers, run, piece, output, columns, is_row, GRID, X_RUN)
        scales = scales + (factors,)  # noqa: RUF005 - a starred tuple is no Triton
    return scales


@triton.jit(do_not_specialize=["num_rows", "runs_per_split"])
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
    split_ptr,
    arrived_ptr,
    order_ptr,
    part_ptr,
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
    GRID: tl.constexpr,
    X_RUN: tl.constexpr,
    SPAN: tl.constexpr,
    IS_INTEGER: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    TOP_K: tl.constexpr,
    PRECISION: tl.constexpr,
    MAGIC: tl.constexpr,
    PTX: tl.constexpr,
    TABLE_PTX: tl.constexpr,
    REGISTERS: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid: tiles of outputs, splits of K, tiles of rows. `out_ptr` [rows, outputs].

    `X_RUN`: group size of the activation scales; 0: per token; -1: unquantized inputs. `SPAN`: pieces whose
    sums are scaled together. With `TOP_K` (grouped GEMM) each tile of rows has one part (expert) of the
    weight and a range of `order_ptr`, which holds its rows; `TOP_K` consecutive rows read the same of `x`.

    With `IS_SPLIT` (split-K) partial sums go to `split_ptr` [splits, rows, outputs], and the program of a
    tile that arrives last, by the count in `arrived_ptr`, adds them in their order.
    """
    await_predecessor(PDL)
    KIND: tl.constexpr = "element" if TABLE_PTX != "" else GRID.kind
    PIECES: tl.constexpr = GRID.pieces
    WORDS: tl.constexpr = GRID.words
    HALVES: tl.constexpr = GRID.has_halves
    # Affine grids are dequantized with their scales. Hopper accumulates e4m3 in few bits: keep sums short.
    IS_E4M3: tl.constexpr = x_ptr.dtype.element_ty == tl.float8e4nv
    BY_GROUP: tl.constexpr = (GRID.group > 0 and not GRID.is_affine) or X_RUN > 0 or IS_E4M3
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
    within = tl.arange(0, OUTPUTS)[:, None].to(tl.int64) * code_row + tl.arange(0, WORDS)[None, :]
    at_row = x_ptr + source[None, :] * x_row
    x_scales = x_scale_ptr + source * x_scale_row
    sums = tl.full([OUTPUTS, ROWS], 0, TYPE)
    total = tl.full([OUTPUTS, ROWS], 0.0, tl.float32)
    first_run = split * runs_per_split
    end_run = tl.minimum(first_run + runs_per_split, num_runs)
    # Scales are loaded a run ahead, into registers: 8 or 16 bits are too short for asynchronous copies.
    start = tl.maximum(tl.minimum(first_run, num_runs - 1), 0)
    pointers = scale_ptr, outer_scale_ptr, low_ptr, outer_low_ptr, x_scales
    scales = _run_scales(pointers, start, output, columns, is_row, GRID, X_RUN)
    for run in tl.range(first_run, end_run, num_stages=STAGES):
        packed = tl.load(code_ptr + tile * code_tile + run * code_run + within)
        if TABLE_PTX != "":
            looked = look_up(packed, TABLE_PTX, REGISTERS)
        if MAGIC > 0:
            fronts, backs = packed.to(tl.int16), (packed >> 16).to(tl.int16)
        zeros = zeros_of(low_ptr, run, output, columns, GRID)
        following = tl.minimum(run + 1, num_runs - 1)
        next_scales = _run_scales(pointers, following, output, columns, is_row, GRID, X_RUN)
        for piece in tl.static_range(PIECES):
            scale, low, x_scale = scales[piece]
            if GRID.bits == 4 and GRID.zero < 0:
                low = (zeros >> (8 * piece)) & 255
            offset = at_row + (run * PIECES + piece) * GRID.piece
            if BY_GROUP and piece % SPAN == 0:
                sums = tl.full([OUTPUTS, ROWS], 0, TYPE)
            if GRID.bits == 4 and TABLE_PTX != "":
                front = looked[piece].to(x_ptr.dtype.element_ty, bitcast=True)
                back = looked[PIECES + piece].to(x_ptr.dtype.element_ty, bitcast=True)
            elif MAGIC > 0:
                front = unpack_short(fronts, piece, MAGIC, PTX)
                back = unpack_short(backs, piece, MAGIC, PTX)
            elif GRID.bits == 4:
                front, back = unpack(packed, piece)
            else:
                front, back = packed, packed
            if GRID.bits == 4 and not HALVES:
                front = tl.interleave(front, back)
            for half in tl.static_range(2 if HALVES else 1):
                lanes = half * WORDS + tl.arange(0, WORDS if HALVES else GRID.piece)
                x = tl.load(offset + lanes[:, None], mask=is_row[None, :], other=0.0)
                codes = front if half == 0 else back
                value = decode(codes, scale, low, table_ptr, GRID, KIND, MAGIC, x.dtype).to(x.dtype)
                sums = tl.dot(value, x, sums, input_precision=PRECISION, out_dtype=TYPE)
            if BY_GROUP and piece % SPAN == SPAN - 1:
                part_sum = sums.to(tl.float32)
                if X_RUN > 0:
                    part_sum *= x_scale[None, :]
                if GRID.group > 0 and not GRID.is_affine:
                    part_sum *= scale[:, None]
                total += part_sum
        scales = next_scales
    if not BY_GROUP:
        total = sums.to(tl.float32)
    if X_RUN == 0:
        total *= tl.load(x_scales, mask=is_row, other=0.0)[None, :]
    if GRID.group == 0 and not GRID.is_affine:
        total *= scale_of(scale_ptr, outer_scale_ptr, 0, output, columns, GRID)[:, None]
    offset = row[None, :] * num_outputs + column[:, None]
    mask = is_row[None, :] & (column < num_outputs)[:, None]
    if IS_SPLIT:
        size = num_rows.to(tl.int64) * num_outputs
        tl.store(split_ptr + split * size + offset, total, mask=mask)
        # Every thread's sums are stored before one of them counts the program as arrived.
        tl.debug_barrier()
        arrived = arrived_ptr + tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)
        last = tl.num_programs(1) - 1
        if tl.atomic_add(arrived, 1, sem="acq_rel", scope="gpu") == last:
            total = tl.full([OUTPUTS, ROWS], 0.0, tl.float32)
            for other in range(tl.num_programs(1)):
                total += tl.load(split_ptr + other * size + offset, mask=mask, other=0.0)
            tl.store(out_ptr + offset, total.to(out_ptr.dtype.element_ty), mask=mask)
            tl.store(arrived, 0)
    else:
        tl.store(out_ptr + offset, total.to(out_ptr.dtype.element_ty), mask=mask)


@dataclass(frozen=True, slots=True)
class TokenPermutation:
    """Token permutation of a grouped GEMM: rows sorted by expert, in tiles (vLLM: moe_align_block_size).

    Attributes:
        tiles: int32 `[tiles, 3]`: part of the weight (expert), begin and end of a range of `order`, which may
            be empty.
        order: int64 `[rows]`, the output rows sorted by part.
        top_k: output rows that read the same row of `x`.
        active: parts that one token meets, and so the output rows of a token.
    """

    tiles: torch.Tensor
    order: torch.Tensor
    rows: int
    top_k: int
    active: int


def gemm(
    x: torch.Tensor,
    weight: TritonPackedWeight,
    dtype: torch.dtype,
    x_scales: torch.Tensor | None = None,
    parts: TokenPermutation | None = None,
) -> torch.Tensor:
    """`x [tokens, in] @ weight.T` in `dtype`; with `parts` a grouped GEMM to [rows, out]. `x` are floats, or
    codes with `x_scales`: float32 `[tokens, 1]`, or `[tokens, groups]` for groups of 128."""
    if weight.order is not None:
        x = x.index_select(1, weight.order)
    x = x if x.stride(1) == 1 else x.contiguous()
    count = x.shape[0] if parts is None else parts.order.shape[0]
    out = torch.empty(count, weight.out_features, dtype=dtype, device=x.device)
    if not count:
        return out
    if parts is not None:
        rows, row_tiles = parts.rows, parts.tiles.shape[0]
    else:
        rows = min(most_rows(weight), max(FEW_ROWS, power_of_two(count)))
        row_tiles = -(-count // rows)
    is_large = rows > FEW_TOKENS
    outputs = 2 * OUTPUTS if is_large and not weight.is_packed else OUTPUTS
    num_tiles = weight.part_outputs // outputs
    active = 1 if parts is None else parts.active
    if count <= FEW_TOKENS * active:
        # Programs that the GPU holds follow from the weight alone; of experts those of one token count: more
        # would tie a token's sums to its batch.
        stages = _stages(x, weight, -1, FEW_ROWS, OUTPUTS)
        slots = decode_slots(x.device, _ring_bytes(x, weight, FEW_ROWS, OUTPUTS, stages))
        runs_per_split = split_runs(num_tiles * active, weight.num_runs, slots)
    else:
        # Partial sums of many tokens are large: they are split only where multiprocessors would be idle.
        num_splits = gpu_limits(x.device).multiprocessors // (num_tiles * row_tiles)
        most = max(1, weight.num_runs // 2)
        runs_per_split = -(-weight.num_runs // max(1, min(num_splits, most)))
    if num_tiles * row_tiles > MOST_TILES:
        runs_per_split = weight.num_runs
    num_splits = -(-weight.num_runs // runs_per_split)
    is_split = num_splits > 1
    sums, arrived = out, out
    if is_split:
        sums = out.new_empty(num_splits, count, weight.out_features, dtype=torch.float32)
        arrived = _arrivals(x.device)
    x_run = -1
    if x_scales is not None:
        x_run = 0 if x_scales.shape[1] == 1 else 128
    has_short_codes = weight.has_short_codes and x.dtype in MAGIC
    span = 1  # pieces whose sums are scaled together: those of a run that share all scales
    if weight.is_packed and x.dtype is not torch.float8_e4m3fn:
        grid = weight.grid
        shared = [size // grid.piece for size in (grid.group, x_run) if size > 0]
        span = min([PIECES, *shared])
        span = 1 if PIECES % span or any(size % span for size in shared) else span
    order, tiles = (None, None) if parts is None else (parts.order, parts.tiles)
    _gemm[(num_tiles, num_splits, row_tiles)](
        *(x, *or_unread(out, x_scales), weight.codes, *pointers(weight)),
        *(out, sums, arrived, *or_unread(out, order, tiles)),
        *(count, weight.out_features, weight.padded, weight.num_runs, runs_per_split),
        *(x.stride(0), 0 if x_scales is None else x_scales.stride(0)),
        *strides(weight, outputs),
        ROWS=rows,
        OUTPUTS=outputs,
        GRID=weight.grid,
        X_RUN=x_run,
        SPAN=span,
        IS_INTEGER=x.dtype is torch.int8,
        IS_SPLIT=is_split,
        TOP_K=0 if parts is None else parts.top_k,
        PRECISION="ieee" if x.dtype is torch.float32 else "tf32",
        MAGIC=MAGIC[x.dtype] if has_short_codes else 0,
        PTX=HAS_PTX,
        TABLE_PTX=lookup_ptx(weight.entries) if HAS_PTX and weight.entries else "",
        REGISTERS=LOOKUP_REGISTERS,
        STAGES=_stages(x, weight, x_run, rows, outputs),
        **dependent_launch(out),
        num_warps=_warps(x, weight, x_run, rows),
    )
    return out


def most_rows(weight: TritonPackedWeight) -> int:
    """Rows of the largest tile: of 128, sums of pieces take more tensor memory than there is."""
    return FEW_TOKENS if weight.is_packed and _has_tensor_memory(weight.codes) else 2 * FEW_TOKENS


def _warps(x: torch.Tensor, weight: TritonPackedWeight, x_run: int, rows: int) -> int:
    """Warps of a program. With two, Triton takes no tensor memory (tcgen05), but mma.sync. What a thread
    decodes, and sums that it scales group by group, would move to that memory and back for each piece. All
    tiles of a decode-sized batch take the same instruction, whose sums they share."""
    if rows > FEW_TOKENS:
        return 8
    by_group = weight.is_packed or x_run > 0
    return 2 if by_group and _has_tensor_memory(x) else 4


def _has_tensor_memory(tensor: torch.Tensor) -> bool:
    return gpu_limits(tensor.device).capability // 10 == 10


def _arrivals(device: torch.device) -> torch.Tensor:
    """How many splits of each tile have arrived: zeros between the launches of a stream. A graph is captured
    on another one, and replayed on that of the eager steps."""
    is_eager = device.type == "cuda" and not torch.cuda.is_current_stream_capturing()
    stream = torch.cuda.current_stream(device).cuda_stream if is_eager else None
    known, own = _ARRIVALS.get(device, (None, stream))
    assert None in (stream, own) or stream == own, "two streams would count each other's splits"
    if known is not None:
        return known
    made = torch.zeros(MOST_TILES, dtype=torch.int32, device=device)
    if type(made) is torch.Tensor:  # not one that a dispatch mode made
        _ARRIVALS[device] = made, stream
    return made


_ARRIVALS: dict[torch.device, tuple[torch.Tensor, int | None]] = {}


def _ring_bytes(
    x: torch.Tensor, weight: TritonPackedWeight, rows: int, outputs: int, stages: int
) -> int:
    """Bytes of shared memory of the software pipeline; the codes that are decoded need no buffer."""
    inputs = weight.grid.piece * weight.grid.pieces
    codes = inputs // 2 if weight.is_packed else inputs * weight.codes.element_size()
    zeros = 4 * weight.is_packed * (weight.grid.zero < 0)
    # Hopper's matrix instructions read inputs from shared memory until they are done.
    buffers = stages if gpu_limits(x.device).capability // 10 == 9 else max(1, stages - 1)
    own = (stages - 1) * outputs * (codes + zeros)
    return own + buffers * rows * inputs * x.element_size()


def _stages(
    x: torch.Tensor, weight: TritonPackedWeight, x_run: int, rows: int, outputs: int
) -> int:
    room = gpu_limits(x.device).shared_bytes
    if rows <= FEW_ROWS:
        share = (room + RESERVED) // DECODE_SLOTS - RESERVED
        return 4 if _ring_bytes(x, weight, rows, outputs, 4) <= share else 3
    # Two programs of two warps, or one of more.
    most = room * 3 // (8 if _warps(x, weight, x_run, rows) == 2 else 4)
    fits = (n for n in (4, 3, 2) if _ring_bytes(x, weight, rows, outputs, n) <= most)
    return next(fits, 1)
