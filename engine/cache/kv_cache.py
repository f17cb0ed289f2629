"""The paged KV cache: its tensors, its number of blocks, block copies and swap space."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import ceil, gcd
from typing import Any

import torch

from ...base.errors import BadInput
from ..base.device import packed, pinned_bytes
from ..base.host import available_memory_bytes
from ..base.units import format_gib
from ..config.config import EngineConfig
from ..kernels.attention.paged_tensor import (
    BLOCK_COPIES,
    E4M3_ALONE,
    ONLY_LIBRARIES,
    BlockCopiesKernelQuery,
    CacheDtype,
    TorchBlockCopies,
    vector_bytes,
)
from ..kernels.common.devices import refuses_fp8, refuses_triton
from ..model.layers.attention import LayerCache
from ..model.layers.spec import KvLayout
from ..model.layers.state import StateCache
from ..planner.cache_size import CacheRequest, KvCacheBudget, size_cache
from ..scheduling.block_pool import NULL_BLOCK
from ..scheduling.scheduler_config import SchedulerConfig
from ..scheduling.step_plan import BlockCopies

_STORED: dict[str, CacheDtype] = {
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "fp8": torch.float8_e4m3fn,
    "int8": torch.int8,
    "fp8_e5m2": torch.float8_e5m2,
    "fp8_e4m3": E4M3_ALONE,
}

_MOST_EMPTY_BLOCKS = 2**16
HOST_ALIGNMENT = 16
"""Bytes that a lane of the copies between host and device takes at once."""


def stored_dtype(config: EngineConfig, device: torch.device, computed: torch.dtype) -> CacheDtype:
    """How keys and values are stored; "auto": as computed, but bfloat16 on CPUs that compute in float32. It
    takes half the memory, and what it rounds is a hundredth of what 8-bit activations do."""
    if device.type == "cpu" and config.dtype == "auto":
        computed = torch.bfloat16
    return _STORED.get(config.kv_cache_dtype, computed)


def check_stored_dtype(dtype: CacheDtype, device: torch.device) -> None:
    """Raise BadInput for e4m3 without FP8 instructions, or 8 bits that no Triton kernel reads unscaled."""
    name, is_e4m3 = stored_name(dtype), dtype in (torch.float8_e4m3fn, E4M3_ALONE)
    if dtype in ONLY_LIBRARIES and (reason := refuses_triton(device.type)) is not None:
        raise BadInput(f"kv_cache_dtype {name} is for GPUs: {reason}; take fp8 or int8")
    if is_e4m3 and (reason := refuses_fp8(device.type)) is not None:
        raise BadInput(f"kv_cache_dtype {name}: {reason}; take int8")


def stored_name(dtype: CacheDtype) -> str:
    return next(name for name, stored in _STORED.items() if stored == dtype)


@dataclass(frozen=True, slots=True)
class _Layers:
    """KV layouts of a model, of that many elements a token, with the planner's interface."""

    num_elements: int

    def kv_bytes_per_token(self, bytes_per_element: float | Fraction) -> int:
        return ceil(self.num_elements * bytes_per_element)


def kv_block_bytes(layouts: Sequence[KvLayout], dtype: CacheDtype, block_size: int) -> int:
    return sum(
        vector_bytes(dim, dtype) * layout.entries(block_size)
        for layout in layouts
        for dim in layout.vectors
    )


def choose_num_blocks(
    config: EngineConfig,
    limits: SchedulerConfig,
    layouts: Sequence[KvLayout],
    dtype: CacheDtype,
    profiled_budget: Callable[[], KvCacheBudget],
) -> int:
    """Number of blocks of the KV cache, the null block included, by the planner's rule. `layouts` are this
    rank's. BadInput: the memory, profiled if no size is set, does not hold a sequence."""
    block_size, most_blocks = limits.block_size, limits.max_blocks(limits.max_model_len)
    max_model_len = min(limits.max_model_len, most_blocks * block_size)  # tokens that stay
    if not layouts:  # constant states only: a block is an entry of block tables, without memory
        whole = -(-max_model_len // block_size) * limits.max_num_seqs
        return (config.num_blocks or min(whole, _MOST_EMPTY_BLOCKS)) + 1
    num_ranks, memory = config.tensor_parallel_size, config.kv_cache_memory_bytes
    layers = _Layers(sum(layout.num_elements for layout in layouts))
    block_bytes = kv_block_bytes(layouts, dtype, block_size)
    request = CacheRequest(
        bytes_per_element=Fraction(block_bytes, block_size * layers.num_elements),
        block_size=block_size,
        max_model_len=max_model_len,
        max_num_seqs=limits.max_num_seqs,
        memory_bytes=None if memory is None else memory // num_ranks,
        num_blocks=config.num_blocks,
    )
    budget = KvCacheBudget(0) if request.is_fixed else profiled_budget()
    return size_cache(layers, request, budget).num_blocks + 1


def check_fits_memory(num_bytes: int, device: torch.device) -> None:
    """Check a KV cache against a CPU's free memory, which is committed only as written; or BadInput."""
    if device.type == "cpu" and num_bytes > (free := available_memory_bytes()):
        raise BadInput(
            f"a KV cache of {format_gib(num_bytes)}: {format_gib(free)} of memory is free; lower "
            "kv_cache_memory_bytes or num_blocks"
        )


def choose_num_host_blocks(
    config: EngineConfig, layouts: Sequence[KvLayout], block_size: int, dtype: CacheDtype
) -> int:
    """Blocks of the swap space, for `layouts` of this rank. BadInput: below one block, or no memory."""
    swap_bytes = config.swap_space_bytes
    if not swap_bytes:
        return 0
    if swap_bytes > (free := available_memory_bytes()):
        raise BadInput(
            f"swap_space_bytes = {swap_bytes}: the host has {format_gib(free)} of memory free"
        )
    block_bytes = kv_block_bytes(layouts, dtype, block_size)
    num_blocks = swap_bytes // config.tensor_parallel_size // block_bytes
    if num_blocks < 1:
        raise BadInput(
            f"swap_space_bytes = {swap_bytes} does not hold one block of {block_bytes} bytes"
        )
    return num_blocks


class KvCache:
    """Keys and values of all layers in blocks, stored as `dtype`; 8-bit dtypes with their scales. A CPU
    commits a block's pages as it is first written. `num_host_blocks` are the swap space."""

    def __init__(
        self,
        layouts: Sequence[KvLayout],
        num_blocks: int,
        block_size: int,
        device: torch.device,
        dtype: CacheDtype,
        num_host_blocks: int = 0,
        states: StateCache | None = None,
    ) -> None:
        self.layers = [
            LayerCache.empty(layout, num_blocks, block_size, device, dtype, index)
            for index, layout in enumerate(layouts)
        ]
        self._parts = [part for layer in self.layers for part in layer.parts]
        self.num_host_blocks, self.states = num_host_blocks, states
        block_bytes = [part.shape[1:].numel() * part.itemsize for part in self._parts]
        sizes = [num_host_blocks * size for size in block_bytes]
        rooms = [-(-size // HOST_ALIGNMENT) * HOST_ALIGNMENT for size in sizes]
        if device.type == "cuda" and num_host_blocks:
            memory = pinned_bytes(sum(rooms), self)  # so copies are asynchronous to the host
        else:
            memory = torch.empty(sum(rooms), dtype=torch.uint8)
        self._on_host = [
            room[:size].view(part.dtype).view(num_host_blocks, *part.shape[1:])
            for part, size, room in zip(self._parts, sizes, memory.split(rooms), strict=True)
        ]
        self._ordered_copies = TorchBlockCopies(self._parts, self._on_host)
        query = BlockCopiesKernelQuery(device.type, gcd(*block_bytes))
        self._copies = BLOCK_COPIES.select(query).run(self._parts, self._on_host)
        self.block_size = block_size
        self.dtype = dtype
        self.num_bytes = sum(part.nbytes for part in self._parts)
        # A GPU commits all of it anyway, and libraries' kernels there may read, with weight 0, slots after a
        # sequence's end.
        self.zero(num_blocks if device.type != "cpu" else NULL_BLOCK + 1)
        self.broadcast: Callable[[str, Any], None] | None = None
        """Broadcasts every copy to the tensor-parallel workers, which have other heads of the same blocks."""

    def copy(self, copies: BlockCopies) -> None:
        """Carry out a step's block copies; within the cache all sources are read before any write."""
        if not copies:
            return
        if self.broadcast is not None:
            self.broadcast("copy", copies)
        if self.states is not None:
            self.states.copy(copies.states)
        if copies.within:
            sources, destinations = zip(*copies.within, strict=True)
            in_any_order = set(sources).isdisjoint(destinations)
            (self._copies if in_any_order else self._ordered_copies).within(copies.within)
        self._copies.to_host(copies.to_host)
        self._copies.from_host(copies.from_host)

    def warm_up(self) -> None:
        """Compile the copies, on the null block and the first on the host."""
        pair = ((NULL_BLOCK, 0),)
        self._copies.within(((NULL_BLOCK, NULL_BLOCK),))
        if self.num_host_blocks:
            self._copies.to_host(pair)
            self._copies.from_host(((0, NULL_BLOCK),))

    def zero(self, num_blocks: int) -> None:
        """Clear the first blocks."""
        for part in self._parts:  # none where layers have constant states
            part[:num_blocks].zero_()

    def copy_slots(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy single slots (source, destination), numbered over all blocks; all reads come first."""
        if not copies:
            return
        if self.broadcast is not None:
            self.broadcast("copy_slots", copies)
        for part in self._parts:
            sources, destinations = packed([*zip(*copies, strict=True)], part.device)
            slots = part.flatten(0, 1)
            slots.index_copy_(0, destinations, slots.index_select(0, sources))
