"""Tile sizes of Triton's paged attention, by head shape and by what the GPU's multiprocessors hold."""

from __future__ import annotations

from dataclasses import dataclass

from ..common.gpu_limits import GpuLimits
from ..common.runtime import power_of_two


@dataclass(frozen=True, slots=True)
class HeadShape:
    """What a layer's heads and cache are, as far as tiles depend on it.

    Attributes:
        group: query heads of a KV head.
        in_keys: whether the values are the first elements of the keys (MLA).
        query_bytes, cache_bytes: of an element.
        num_queries: 2 where the sink tokens meet queries of their own.
    """

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
        """Whether a tile of keys serves as the tile of values."""
        return self.in_keys and self.value_dim == self.front_dim

    @property
    def is_wide(self) -> bool:
        """Whether a tile of queries and sums fills the registers (MLA's latents)."""
        return self.key_dim + self.value_dim * (not self.shares_tiles) > 512


@dataclass(frozen=True, slots=True)
class Tiling:
    """Tile sizes and the depth of the software pipeline.

    Attributes:
        rows: query rows of a tile: tokens times `group_tile` heads.
        tile: keys of a tile.
        stages: Triton's `num_stages`; one is the tile that is multiplied.
    """

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


def tiling(heads: HeadShape, limits: GpuLimits, is_short: bool) -> Tiling:
    """Tiles that fit the GPU.

    Args:
        is_short: for sequences with few query tokens (decode), which are memory-bound; the others are
            compute-bound and take larger tiles.
    """
    is_float32 = heads.query_bytes == 4
    has_wgmma = limits.capability // 10 == 9 and not is_float32
    group_tile = min(power_of_two(heads.group), 64 if has_wgmma or not heads.is_wide else 16)
    rows = max(16, group_tile)
    if not is_short and not heads.is_wide:
        rows = max(rows, 32 if is_float32 else min(128, 16384 // heads.front_dim))
    tile = 32 if heads.is_wide else min(64, 8192 // heads.front_dim)
    tile = max(16, tile // 2 if is_float32 else tile)
    if is_short and not heads.is_wide and (is_float32 or heads.cache_bytes < heads.query_bytes):
        # A tile of 8 bits and its 16-bit copy are held at once: of 64 keys they spill on 9.0 and 10.0, and so
        # do 32 keys of float32, which no tensor core multiplies.
        tile = max(16, tile // 2)
    # Decode leaves room for a second program on the multiprocessor.
    room = limits.shared_bytes // (2 if is_short and not heads.is_wide else 1)
    while True:
        # Of a wide tile of 8 bits the 16-bit copy and the sums are more than four warps' registers hold.
        warps = 8 if rows > 16 or (heads.is_wide and heads.cache_bytes < heads.query_bytes) else 4
        for stages, keys in ((3, tile), (3, tile // 2), (2, tile), (2, tile // 2), (1, 16)):
            chosen = Tiling(rows, group_tile, max(16, keys), warps, stages)
            if chosen.shared_bytes(heads, has_wgmma) <= room:
                return chosen
        if rows <= max(16, group_tile):
            return chosen
        rows //= 2
