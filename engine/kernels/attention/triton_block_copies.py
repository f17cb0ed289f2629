# pyright: reportCallIssue=false, reportGeneralTypeIssues=false
"""Copies of KV blocks in Triton: all blocks of all layers in one launch, those in pinned memory included.

The device reads and writes pinned memory at its own address (unified addressing), so a swap is the same
gather as a copy within the cache.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl

from ...base.device import to_device

WORD = 4
"""Bytes of what a lane copies: those of a block must be a multiple."""
BLOCK = tl.constexpr(2048)
ON_DEVICE, ON_HOST = 0, 1


@triton.jit
def _copy_blocks(
    part_ptr, pair_ptr, SOURCE: tl.constexpr, DESTINATION: tl.constexpr, ALIGNED: tl.constexpr
):
    """Copy block `pair[0]` to block `pair[1]`. Grid: pairs, parts. `part_ptr` int64 [parts, 3]: addresses on
    the device and on the host, words of a block; `ALIGNED`: blocks begin at multiples of 16 bytes."""
    part = part_ptr + tl.program_id(1) * 3
    pair = pair_ptr + tl.program_id(0) * 2
    words = tl.load(part + 2)
    source = tl.load(part + SOURCE) + tl.load(pair) * words * 4
    destination = tl.load(part + DESTINATION) + tl.load(pair + 1) * words * 4
    if ALIGNED:
        source, destination = tl.multiple_of(source, 16), tl.multiple_of(destination, 16)
    source = source.to(tl.pointer_type(tl.int32))
    destination = destination.to(tl.pointer_type(tl.int32))
    for begin in range(0, words, BLOCK):
        lanes = begin + tl.arange(0, BLOCK)
        mask = lanes < words
        tl.store(destination + lanes, tl.load(source + lanes, mask=mask, other=0), mask=mask)


class TritonBlockCopies:
    """Copies blocks of `parts` [blocks, ...], the tensors of a cache, and of those like them on the host."""

    def __init__(self, parts: Sequence[torch.Tensor], on_host: Sequence[torch.Tensor]) -> None:
        rows = [
            (part.data_ptr(), host.data_ptr(), part[0].nbytes // WORD)
            for part, host in zip(parts, on_host, strict=True)
        ]
        self._device = parts[0].device
        self._parts = to_device(np.array(rows, dtype=np.int64), self._device)
        addresses = [
            value for first, second, words in rows for value in (first, second, words * WORD)
        ]
        self._aligned = all(value % 16 == 0 for value in addresses)

    def within(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy (source, destination) blocks of the cache; none may be both."""
        self._launch(pairs, ON_DEVICE, ON_DEVICE)

    def to_host(self, pairs: Sequence[tuple[int, int]]) -> None:
        self._launch(pairs, ON_DEVICE, ON_HOST)

    def from_host(self, pairs: Sequence[tuple[int, int]]) -> None:
        self._launch(pairs, ON_HOST, ON_DEVICE)

    def _launch(self, pairs: Sequence[tuple[int, int]], source: int, destination: int) -> None:
        if not pairs:
            return
        table = to_device(np.array(pairs, dtype=np.int64), self._device)
        ways = {"SOURCE": source, "DESTINATION": destination, "ALIGNED": self._aligned}
        grid = len(pairs), self._parts.shape[0]
        _copy_blocks[grid](self._parts, table, **ways, num_warps=4)
