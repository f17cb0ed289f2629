"""Paged attention in Triton: the tile sizes of a head shape, and the launches of a batch.

A program takes query tokens of one sequence, and the query heads of one KV head, as rows of a tile. Of
sequences with few query tokens the keys are split into parts, by the sequence alone, so that results are
batch-invariant; the program that ends last reduces them, or for large tiles a second kernel. Programs share a
work list of parts, made on the device: a captured launch can be replayed for sequences of any length.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..common.devices import GpuLimits, dependent_launch, gpu_limits, power_of_two
from .paged_attention import AttentionCall, attention_kernel
from .triton_attention_kernels import attend, reduce_parts
from .triton_metadata import MAX_PARTS, PART_TOKENS, AttentionMetadata, Tiles, Visibility


@dataclass(frozen=True, slots=True)
class HeadShape:
    """Shape of a layer's heads and cache, which determines the tiles; bytes are an element's. `in_keys`:
    values are the keys' first elements (MLA); `num_queries`: 2 if sink tokens meet their own."""

    key_dim: int
    value_dim: int
    group: int
    in_keys: bool
    query_bytes: int
    cache_bytes: int
    num_queries: int = 1

    @property
    def front_dim(self) -> int:
        """The largest power of two in the keys' elements; the rest is a second product."""
        return max(16, 1 << (self.key_dim.bit_length() - 1))

    @property
    def rest_dim(self) -> int:
        more = self.key_dim - self.front_dim
        return 0 if more <= 0 else max(16, power_of_two(more))

    @property
    def value_tile(self) -> int:
        return max(16, power_of_two(self.value_dim))

    @property
    def shares_tiles(self) -> bool:
        return self.in_keys and self.value_dim == self.front_dim

    @property
    def precision(self) -> str:
        return "ieee" if self.query_bytes == 4 else "tf32"

    @property
    def is_wide(self) -> bool:
        """True if a tile of queries and sums fills the registers (MLA's latents)."""
        return self.key_dim + self.value_dim * (not self.shares_tiles) > 512


@dataclass(frozen=True, slots=True)
class Tiling:
    """Tile sizes: query `rows`, tokens times `group_tile` heads; keys of a `tile`; Triton's `num_stages`."""

    rows: int
    group_tile: int
    tile: int
    warps: int
    stages: int

    def shared_bytes(self, heads: HeadShape, has_wgmma: bool) -> int:
        """Shared memory of a program: queries, the ring of key and value tiles, 16-bit copies of 8 bits."""
        keys = heads.front_dim + heads.rest_dim
        both = keys + (0 if heads.shares_tiles else heads.value_tile)
        # Where operands come from registers, the tile that is multiplied needs no buffer.
        buffers = self.stages if has_wgmma and self.rows >= 64 else max(1, self.stages - 1)
        ring = buffers * self.tile * both * heads.cache_bytes
        copies = self.tile * both * heads.query_bytes * (heads.cache_bytes < heads.query_bytes)
        queries = self.rows * keys * heads.query_bytes * heads.num_queries
        return queries + ring + copies + self.rows * self.tile * heads.query_bytes


WGMMA_ROWS = 64
"""Rows of Hopper's least matrix instruction."""


def tiling(heads: HeadShape, limits: GpuLimits, is_short: bool) -> Tiling:
    """Tiles that fit the GPU; `is_short`: few query tokens (decode); the others take larger tiles."""
    is_float32 = heads.query_bytes == 4
    has_wgmma = limits.capability // 10 == 9 and not is_float32
    group_tile = min(power_of_two(heads.group), 64 if has_wgmma or not heads.is_wide else 16)
    # A tile of 8 bits and its 16-bit copy, or queries of the sink tokens.
    is_narrow = heads.cache_bytes < heads.query_bytes
    holds_more = heads.num_queries > 1 or is_narrow
    # Sums of 128 rows leave registers for 16 keys of 8 bits and their copies; of 32 Triton 3.6 spills.
    is_tight = is_narrow and heads.num_queries == 1 and limits.capability // 10 in (9, 10)
    is_tight &= not (is_short or heads.is_wide or is_float32)
    rows = max(16, group_tile)
    if not is_short and not heads.is_wide:
        most = 64 if holds_more and not is_tight else 128
        rows = max(rows, 32 if is_float32 else min(most, 16384 // heads.front_dim))
    elif not is_short and has_wgmma and not holds_more:
        # Several tokens share a tile of latents: wgmma multiplies 64 rows, mma.sync 16 at a time. In tensor
        # memory, on 10.0, 64 rows of sums leave no room for scores, nor in registers those of 8 bits.
        rows = max(rows, WGMMA_ROWS)
    tile = 32 if heads.is_wide else min(64, 8192 // heads.front_dim)
    tile = max(16, tile // 2 if is_float32 else tile)
    if is_tight:
        tile = 16
    elif is_short and not heads.is_wide and (is_float32 or holds_more):
        # With 64 keys they spill on 9.0 and 10.0, and so do 32 of float32, which no tensor core multiplies.
        tile = max(16, tile // 2)
    # Decode leaves room for a second program on the multiprocessor.
    room = limits.shared_bytes // (2 if is_short and not heads.is_wide else 1)
    while True:
        # Of a wide tile of 8 bits the 16-bit copy and the sums are more than four warps' registers hold.
        warps = 8 if rows > 16 or (heads.is_wide and is_narrow) else 4
        for stages, keys in ((3, tile), (3, tile // 2), (2, tile), (2, tile // 2), (1, 16)):
            chosen = Tiling(rows, group_tile, max(16, keys), warps, stages)
            if chosen.shared_bytes(heads, has_wgmma) <= room:
                return chosen
        if rows <= max(16, group_tile):
            return chosen
        rows //= 2


MOST_REGISTERS = 255  # that a thread of an NVIDIA GPU can have
MOST_REDUCED = 2048
"""Elements of a sequence's tile up to which the program that arrives last reduces it. One multiprocessor
would take longer for more (64 parts of 8,192, a latent's: 2 MB) than all of them and a launch."""
SLOTS = 2
"""Persistent programs of a split batch on a multiprocessor."""


@attention_kernel
def attend_triton(call: AttentionCall) -> torch.Tensor:
    """Paged attention without tree attention."""
    queries, keys, values, batch, rule, sink_queries = call
    metadata = batch.kernel_metadata(AttentionMetadata)
    queries = queries if queries.stride(2) == 1 else queries.contiguous()
    if sink_queries is not None and sink_queries.stride(2) != 1:
        sink_queries = sink_queries.contiguous()
    call = AttentionCall(queries, keys, values, batch, rule, sink_queries)
    heads = HeadShape(
        *(queries.shape[2], values.dim, queries.shape[1] // keys.num_heads),
        values.codes.data_ptr() == keys.codes.data_ptr(),
        *(queries.element_size(), keys.codes.element_size(), 1 if sink_queries is None else 2),
    )
    limits = gpu_limits(queries.device)
    out = call.empty_result()
    for is_short in (True, False):
        chosen = tiling(heads, limits, is_short)
        if (tiles := metadata.tiles(chosen.rows // chosen.group_tile, is_short)) is None:
            continue
        seen = rule.window or 0, rule.num_sink_tokens, rule.chunk or 0
        given: dict[str, Any] = {
            "HEADS": heads,
            "TILING": chosen,
            "SEES": Visibility(chosen.tile, *seen),
            "BLOCK_SIZE": batch.block_size,
            "SOFTCAP": rule.softcap or 0.0,
            "IN_PARTS": is_short,
            "REDUCES": heads.value_tile * chosen.group_tile <= MOST_REDUCED,
            "HEAD_PROGRAMS": keys.num_heads * -(-heads.group // chosen.group_tile),
            "num_warps": chosen.warps,
            "num_stages": chosen.stages,
            # Left to itself the assembler spills for a third program on a multiprocessor, which none has.
            "maxnreg": MOST_REGISTERS if is_short else None,
            **(dependent_launch(queries) if is_short else {"PDL": False}),
        }
        if is_short:
            most = max(1, SLOTS * limits.multiprocessors // given["HEAD_PROGRAMS"])
            _attend_in_parts(out, most, given, call, metadata, tiles)
        else:
            programs = tiles.index.shape[0] * given["HEAD_PROGRAMS"]
            _launch(programs, (out, out, out, out, out), 1, given, call, metadata, tiles)
    return out


def _attend_in_parts(
    out: torch.Tensor,
    most: int,
    given: dict[str, Any],
    call: AttentionCall,
    metadata: AttentionMetadata,
    tiles: Tiles,
) -> None:
    """Split-KV attention of the short sequences by at most `most` programs for each tile of heads."""
    num_parts = min(MAX_PARTS, -(-tiles.width // PART_TOKENS))
    shape = (tiles.num_rows, call.queries.shape[1], num_parts)
    part = out.new_empty(*shape, call.values.dim, dtype=torch.float32)
    state = out.new_empty(*shape, 2, dtype=torch.float32)
    chosen, head_programs = given["TILING"], given["HEAD_PROGRAMS"]
    tokens = chosen.rows // chosen.group_tile
    work, arrived = metadata.work_list(tokens, given["SEES"], num_parts, head_programs)
    workers = min(most, tiles.index.shape[0] * num_parts)
    results = out, part, state, arrived, work
    _launch(workers * head_programs, results, num_parts, given, call, metadata, tiles)
    if not given["REDUCES"]:
        reduce: Any = reduce_parts
        sinks = None if call.rule.sinks is None else call.rule.sinks.float().contiguous()
        reduce[(tiles.index.shape[0], shape[1])](
            *(out, part, state, sinks, tiles.index, metadata.segments, *shape[1:]),
            **{name: given[name] for name in ("HEADS", "SEES")},
            **dependent_launch(call.queries),
            TOKENS=tokens,
            num_warps=4,
        )


def _launch(
    programs: int,
    results: tuple[torch.Tensor, ...],
    num_parts: int,
    given: dict[str, Any],
    call: AttentionCall,
    metadata: AttentionMetadata,
    tiles: Tiles,
) -> None:
    queries, keys, values, _, rule, sink_queries = call
    met = queries if sink_queries is None else sink_queries
    sinks = None if rule.sinks is None else rule.sinks.float().contiguous()
    kernel: Any = attend
    kernel[(programs,)](
        *(*results, queries, met, keys.codes, values.codes),
        *(keys.scales, values.scales, sinks),
        *(tiles.index, metadata.segments, metadata.table),
        *(rule.scale, queries.shape[1], num_parts, *queries.stride()[:2], *met.stride()[:2]),
        *(*keys.codes.stride()[:3], *values.codes.stride()[:3]),
        *(keys.scales.stride()[:2] if keys.scales is not None else (0, 0)),
        HAS_SCALES=keys.scales is not None,
        **given,
    )
