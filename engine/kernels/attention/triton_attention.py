"""Paged attention in Triton: the launches of a batch.

A program takes some query tokens of one sequence and the query heads of one KV head as the rows of one tile;
the heads share the keys that are read. The key tile's size is independent of the block size. Sequences with
few query tokens would occupy few programs: their keys are split into parts, and a second kernel reduces the
partial results. The split depends on the sequence alone, so results are batch-invariant. A work list of the
parts, made on the device, is shared among as many programs as the GPU holds: one long sequence occupies all
of it, and a captured launch can be replayed for sequences of any length.
"""

from __future__ import annotations

from typing import Any

import torch

from ..common.gpu_limits import gpu_limits
from .paged_attention import AttentionBatch, AttentionRule
from .paged_tensor import PagedTensor
from .triton_attention_kernels import attend, reduce_parts
from .triton_metadata import MAX_PARTS, PART_TOKENS, AttentionMetadata, Tiles, Visibility
from .triton_tiling import HeadShape, Tiling, tiling

MOST_REGISTERS = 255
SLOTS = 2
"""Persistent programs of a split batch on a multiprocessor."""


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
    if sink_queries is not None and sink_queries.stride(2) != 1:
        sink_queries = sink_queries.contiguous()
    heads = HeadShape(
        queries.shape[2],
        values.dim,
        queries.shape[1] // keys.num_heads,
        values.codes.data_ptr() == keys.codes.data_ptr(),
        queries.element_size(),
        keys.codes.element_size(),
        1 if sink_queries is None else 2,
    )
    limits = gpu_limits(queries.device)
    out = queries.new_empty(*queries.shape[:2], values.dim)
    for is_short in (True, False):
        chosen = tiling(heads, limits, is_short)
        if (tiles := metadata.tiles(chosen.rows // chosen.group_tile, is_short)) is None:
            continue
        given = _constants(heads, chosen, rule, batch.block_size)
        given |= {"HAS_SINK_QUERIES": sink_queries is not None, "IN_PARTS": is_short}
        given |= {"HEAD_PROGRAMS": keys.num_heads * -(-heads.group // chosen.group_tile)}
        # Left to itself the assembler spills for a third program on a multiprocessor, which none has.
        given |= {"maxnreg": MOST_REGISTERS if is_short else None}
        arguments = queries, sink_queries, keys, values, rule, metadata, tiles
        if is_short:
            most = max(1, SLOTS * limits.multiprocessors // given["HEAD_PROGRAMS"])
            _attend_in_parts(out, most, chosen, given, *arguments)
        else:
            programs = tiles.index.shape[0] * given["HEAD_PROGRAMS"]
            _launch(programs, (out, out, out, out, out), 1, given, *arguments)
    return out


def _attend_in_parts(
    out: torch.Tensor,
    most: int,
    chosen: Tiling,
    given: dict[str, Any],
    queries: torch.Tensor,
    sink_queries: torch.Tensor | None,
    keys: PagedTensor,
    values: PagedTensor,
    rule: AttentionRule,
    metadata: AttentionMetadata,
    tiles: Tiles,
) -> None:
    """Split-KV attention of the short sequences by at most `most` programs for each tile of heads."""
    num_heads = queries.shape[1]
    num_parts = min(MAX_PARTS, -(-tiles.width // PART_TOKENS))
    shape = (tiles.rows.numel(), num_heads, num_parts)
    part = out.new_empty(*shape, values.dim, dtype=torch.float32)
    state = out.new_empty(*shape, 2, dtype=torch.float32)
    used = out.new_empty(shape[:2], dtype=torch.int32)
    visibility = Visibility(chosen.tile, rule.window or 0, rule.num_sink_tokens, rule.chunk or 0)
    work = metadata.work_list(chosen.rows // chosen.group_tile, visibility, num_parts)
    workers = min(most, tiles.index.shape[0] * num_parts)
    arguments = queries, sink_queries, keys, values, rule, metadata, tiles
    results = out, part, state, used, work
    _launch(workers * given["HEAD_PROGRAMS"], results, num_parts, given, *arguments)
    reduce: Any = reduce_parts
    reduce[(tiles.rows.numel(), num_heads)](
        out,
        part,
        state,
        used,
        state if rule.sinks is None else rule.sinks.float().contiguous(),
        tiles.rows,
        num_heads,
        num_parts,
        VALUE_DIM=values.dim,
        VALUE_TILE=given["VALUE_TILE"],
        STRIDE=8,
        HAS_SINKS=rule.sinks is not None,
        num_warps=4,
    )


def _launch(
    programs: int,
    results: tuple[torch.Tensor, ...],
    num_parts: int,
    given: dict[str, Any],
    queries: torch.Tensor,
    sink_queries: torch.Tensor | None,
    keys: PagedTensor,
    values: PagedTensor,
    rule: AttentionRule,
    metadata: AttentionMetadata,
    tiles: Tiles,
) -> None:
    out = results[0]
    met = queries if sink_queries is None else sink_queries
    key_scales, value_scales = keys.scales, values.scales
    kernel: Any = attend
    kernel[(programs,)](
        *results,
        queries,
        met,
        keys.codes,
        values.codes,
        out if key_scales is None else key_scales,
        out if value_scales is None else value_scales,
        out if rule.sinks is None else rule.sinks.float().contiguous(),
        tiles.index,
        metadata.segments,
        metadata.table,
        rule.scale,
        queries.shape[1],
        num_parts,
        *queries.stride()[:2],
        *met.stride()[:2],
        *keys.codes.stride()[:3],
        *values.codes.stride()[:3],
        *((0, 0) if key_scales is None else key_scales.stride()[:2]),
        HAS_SCALES=key_scales is not None,
        **given,
    )


def _constants(
    heads: HeadShape, chosen: Tiling, rule: AttentionRule, block_size: int
) -> dict[str, Any]:
    """Compile-time constants of `attend`, and its launch options."""
    return {
        "KEY_DIM": heads.key_dim,
        "VALUE_DIM": heads.value_dim,
        "FRONT_DIM": heads.front_dim,
        "REST_DIM": heads.rest_dim,
        "VALUE_TILE": heads.value_tile,
        "VALUES_IN_KEYS": heads.shares_tiles,
        "GROUP": heads.group,
        "GROUP_TILE": chosen.group_tile,
        "ROWS": chosen.rows,
        "TILE": chosen.tile,
        "BLOCK_SIZE": block_size,
        "WINDOW": rule.window or 0,
        "NUM_SINK_TOKENS": rule.num_sink_tokens,
        "CHUNK": rule.chunk or 0,
        "SOFTCAP": rule.softcap or 0.0,
        "HAS_SINKS": rule.sinks is not None,
        "PART_TILES": max(1, PART_TOKENS // chosen.tile),
        "MAX_PARTS": MAX_PARTS,
        "PRECISION": "ieee" if heads.query_bytes == 4 else "tf32",
        "num_warps": chosen.warps,
        "num_stages": chosen.stages,
    }
