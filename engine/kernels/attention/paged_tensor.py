"""Paged KV cache of a layer: blocks of keys or values, unquantized or int8 / fp8 with per-token-head scales.

e5m2 has the range of 16-bit floats, and so no scales; e4m3 may have none (`WithoutScales`): queries and
outputs take calibrated ones. A token's dequantized vectors depend on that token alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import torch

from ...base.device import packed
from ..common.devices import refuses_triton, serves_all
from ..common.dispatch import Candidate, Operation, lazily
from ..common.verdicts import RandomInputs, Trial, tolerance

if TYPE_CHECKING:
    from .triton_block_copies import TritonBlockCopies

LARGEST_CODE = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
"""The 8-bit dtypes with scales, and the largest magnitude of each."""


@dataclass(frozen=True, slots=True)
class WithoutScales:
    """8-bit dtype of `LARGEST_CODE` whose codes are the elements, up to a scale of the whole tensor."""

    dtype: torch.dtype

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize

    def __str__(self) -> str:
        return f"{self.dtype} without scales"


E4M3_ALONE = WithoutScales(torch.float8_e4m3fn)
CacheDtype = torch.dtype | WithoutScales
"""Dtypes that elements are stored in; those of `LARGEST_CODE` have a scale for each vector."""
ONLY_LIBRARIES = (torch.float8_e5m2, E4M3_ALONE)
"""8-bit dtypes without scales, for GPUs only."""

SCALE_BYTES = 4
_LEAST = torch.finfo(torch.float32).tiny


@dataclass(frozen=True, slots=True)
class PagedTensor:
    """Keys or values of a layer: `codes` [blocks, block_size, kv_heads, head_dim], and their `scales`."""

    codes: torch.Tensor
    scales: torch.Tensor | None = None

    @classmethod
    def empty(
        cls,
        num_blocks: int,
        block_size: int,
        num_heads: int,
        dim: int,
        device: torch.device,
        dtype: CacheDtype,
    ) -> Self:
        """Uninitialised blocks: a CPU commits their pages as they are first written."""
        shape = (num_blocks, block_size, num_heads)
        scales = torch.empty(shape, device=device) if dtype in LARGEST_CODE else None
        codes = dtype.dtype if isinstance(dtype, WithoutScales) else dtype
        return cls(torch.empty(*shape, dim, device=device, dtype=codes), scales)

    @classmethod
    def zeros(cls, *given: Any) -> Self:
        """Blocks of zeros, all of them written, of the sizes that `empty` takes."""
        paged = cls.empty(*given)
        for part in paged.parts:
            part.zero_()
        return paged

    @property
    def parts(self) -> tuple[torch.Tensor, ...]:
        """The underlying tensors, by block, in dtypes that every device can copy."""
        codes = self.codes.view(torch.uint8) if self.codes.itemsize == 1 else self.codes
        return (codes,) if self.scales is None else (codes, self.scales)

    @property
    def stored(self) -> CacheDtype:
        dtype = self.codes.dtype
        return WithoutScales(dtype) if self.scales is None and dtype in LARGEST_CODE else dtype

    @property
    def num_heads(self) -> int:
        return self.codes.shape[2]

    @property
    def dim(self) -> int:
        return self.codes.shape[3]

    def first_elements(self, dim: int) -> PagedTensor:
        return PagedTensor(self.codes[..., :dim], self.scales)

    def takes(self, static: torch.Tensor | None) -> bool:
        """True if `write` uses calibrated scales: a checkpoint has them for fp8."""
        return static is not None and self.codes.dtype is torch.float8_e4m3fn

    def rescaled(self, x: torch.Tensor, static: torch.Tensor | None) -> torch.Tensor:
        """Queries or outputs [tokens, heads, head_dim] times the calibrated scale that the elements lack."""
        if static is None or self.stored != E4M3_ALONE:
            return x
        factor = static.expand(self.num_heads).repeat_interleave(x.shape[1] // self.num_heads)
        return x * factor[:, None].to(x.dtype)

    def write(
        self, x: torch.Tensor, slots: torch.Tensor, static: torch.Tensor | None = None
    ) -> None:
        """Write vectors [tokens, kv_heads, head_dim] to their slots, quantized as the cache is.

        `slots` is the slot mapping, int64 [tokens], `block * block_size + offset`; padding tokens map to the
        null block. `static` are calibrated scales, [kv_heads] or [1]: an fp8 cache takes them in place of
        each vector's.
        """
        if self.scales is None:
            if static is not None and self.takes(static):
                x = x / static[:, None]
            if (dtype := self.codes.dtype).itemsize > 1:
                elements = x.to(dtype)
            else:
                largest = torch.finfo(dtype).max
                elements = x.clamp(-largest, largest).to(dtype).view(torch.uint8)
            self.parts[0].flatten(0, 1).index_copy_(0, slots, elements)
            return
        if static is not None and self.takes(static):
            # As vLLM's fp8 cache: values beyond the calibrated range are clipped.
            top = LARGEST_CODE[self.codes.dtype]
            codes = (x.float() / static[:, None]).clamp(-top, top).to(self.codes.dtype)
            scales = static.expand(x.shape[:-1]).contiguous()
        else:
            codes, scales = quantize(x, self.codes.dtype)
        whole, of_heads = self.parts
        whole.flatten(0, 1).index_copy_(0, slots, codes.view(torch.uint8))
        of_heads.flatten(0, 1).index_copy_(0, slots, scales)

    def read(self, block_ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The blocks of `block_ids`, dequantized to `dtype`, [ids, block_size, kv_heads, head_dim]."""
        codes = self.parts[0].index_select(0, block_ids).view(self.codes.dtype)
        if self.scales is None:
            return codes.to(dtype)
        scales = self.scales.index_select(0, block_ids)
        return (codes.float() * scales[..., None]).to(dtype)


def quantize(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize `x` [..., head_dim] per vector: 8-bit codes, and float32 scales [...].

    The scale maps the largest element to the largest code. The error is at most half a step: in int8 1/254 of
    the vector's largest element; in fp8 (e4m3) 1/16 of the element itself, and for the smallest ones 1/458752
    of the largest.
    """
    x = x.float()
    top = LARGEST_CODE[dtype]
    scales = (x.abs().amax(dim=-1) / top).clamp_min(_LEAST)
    codes = (x / scales[..., None]).clamp(-top, top)
    return (codes.round() if dtype is torch.int8 else codes).to(dtype), scales


def vector_bytes(dim: int, dtype: CacheDtype) -> int:
    return dim * dtype.itemsize + (SCALE_BYTES if dtype in LARGEST_CODE else 0)


Pairs = Sequence[tuple[int, int]]
"""(source, destination) blocks."""


@dataclass(frozen=True, slots=True)
class TorchBlockCopies:
    """Torch's copies: two operations a part within the cache, one a part and block to and from the host."""

    parts: Sequence[torch.Tensor]
    on_host: Sequence[torch.Tensor]

    def within(self, pairs: Pairs) -> None:
        """Copy blocks of the cache; none may be both source and destination."""
        for part in self.parts:
            sources, destinations = packed([*zip(*pairs, strict=True)], part.device)
            part.index_copy_(0, destinations, part.index_select(0, sources))

    def to_host(self, pairs: Pairs) -> None:
        for part, host in zip(self.parts, self.on_host, strict=True):
            for source, destination in pairs:
                host[destination].copy_(part[source], non_blocking=True)

    def from_host(self, pairs: Pairs) -> None:
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


def copies_trial(query: BlockCopiesKernelQuery) -> Trial[Any]:
    """Copies within a cache, to the host, and back; nothing is timed."""
    values = RandomInputs(query.device, torch.float32)(4, query.divisor)

    def compute(make: MakeCopies) -> list[torch.Tensor]:
        part, host = values.clone(), torch.zeros(values.shape, pin_memory=True)
        copies = make([part], [host])
        copies.within([(0, 1)])
        copies.to_host([(1, 2)])
        copies.from_host([(2, 3)])
        return [part]

    return Trial(compute, tolerance(torch.float32))


Tensors = Sequence[torch.Tensor]
MakeCopies = Callable[[Tensors, Tensors], "TorchBlockCopies | TritonBlockCopies"]
TRITON_COPIES = lazily("attention.triton_block_copies", "TritonBlockCopies")

BLOCK_COPIES: Operation[BlockCopiesKernelQuery, MakeCopies] = Operation(
    "block copies",
    [
        Candidate("triton", _refuses_triton, TRITON_COPIES),
        Candidate("torch", serves_all, TorchBlockCopies),
    ],
    copies_trial,
)
