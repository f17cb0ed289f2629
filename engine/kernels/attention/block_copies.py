"""Dispatch of copies of KV blocks: one launch for all layers, or torch's copies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from ...base.device import packed
from ..common.dispatch import Candidate, Operation
from ..common.runtime import refuses_triton

Pairs = Sequence[tuple[int, int]]
"""(source, destination) blocks."""


class BlockCopier(Protocol):
    """Copies blocks of all parts of a cache, in the order of the calls."""

    def within(self, pairs: Pairs) -> None:
        """Copy blocks of the cache; none may be both source and destination."""
        ...

    def to_host(self, pairs: Pairs) -> None:
        """Copy blocks of the cache to the host."""
        ...

    def from_host(self, pairs: Pairs) -> None:
        """Copy blocks of the host to the cache."""
        ...


@dataclass(frozen=True, slots=True)
class TorchBlockCopies:
    """Torch's copies: two operations a part within the cache, one a part and block to and from the host."""

    parts: Sequence[torch.Tensor]
    on_host: Sequence[torch.Tensor]

    def within(self, pairs: Pairs) -> None:
        """See `BlockCopier`."""
        for part in self.parts:
            sources, destinations = packed([*zip(*pairs, strict=True)], part.device)
            part.index_copy_(0, destinations, part.index_select(0, sources))

    def to_host(self, pairs: Pairs) -> None:
        """See `BlockCopier`."""
        for part, host in zip(self.parts, self.on_host, strict=True):
            for source, destination in pairs:
                host[destination].copy_(part[source], non_blocking=True)

    def from_host(self, pairs: Pairs) -> None:
        """See `BlockCopier`."""
        for part, host in zip(self.parts, self.on_host, strict=True):
            for source, destination in pairs:
                part[destination].copy_(host[source], non_blocking=True)


@dataclass(frozen=True, slots=True)
class BlockCopiesKernelQuery:
    """Kernel query of block copies: device, and bytes that divide every part's block."""

    device: str
    divisor: int

    def __str__(self) -> str:
        return f"blocks of multiples of {self.divisor} bytes on {self.device}"


def _refuses_triton(kernel_query: BlockCopiesKernelQuery) -> str | None:
    if not kernel_query.divisor:
        return "there is nothing to copy"
    if kernel_query.divisor % 4:
        return "it copies words of 4 bytes"
    return refuses_triton(kernel_query.device)


def _triton(parts: Sequence[torch.Tensor], on_host: Sequence[torch.Tensor]) -> BlockCopier:
    from .triton_block_copies import TritonBlockCopies

    return TritonBlockCopies(parts, on_host)


BLOCK_COPIES: Operation[
    BlockCopiesKernelQuery,
    Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], BlockCopier],
] = Operation(
    "block copies",
    [
        Candidate("triton", _refuses_triton, _triton),
        Candidate("torch", lambda kernel_query: None, TorchBlockCopies),
    ],
)
