"""The tensors behind the block pool, and how many blocks they have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import ceil

import torch

from .config import EngineConfig
from .host import available_memory_bytes
from .model.attention import LayerCache
from .model.spec import KvLayout
from .planner.cache_size import CacheRequest, size_cache


@dataclass(frozen=True, slots=True)
class _Layers:
    """The layers of a model as the planner asks for them."""

    layouts: Sequence[KvLayout]

    def kv_bytes_per_token(self, bytes_per_element: float | Fraction) -> int:
        return ceil(sum(layout.num_elements for layout in self.layouts) * bytes_per_element)


def choose_num_blocks(
    config: EngineConfig,
    layouts: Sequence[KvLayout],
    block_size: int,
    max_model_len: int,
    max_num_seqs: int,
    device: torch.device,
    dtype: torch.dtype,
) -> int:
    """Blocks of the cache, the null block included: the planner's rule, with the memory free now.

    Raises:
        BadInput: the memory given does not hold a single sequence.
    """
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else available_memory_bytes()
    request = CacheRequest(
        kind=device.type,
        bytes_per_element=dtype.itemsize,
        block_size=block_size,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        memory_bytes=config.kv_cache_memory_bytes,
        num_blocks=config.num_blocks,
    )
    return size_cache(_Layers(layouts), request, free).num_blocks + 1


class KvCache:
    """Keys and values of all layers, [blocks, block_size, kv_heads, head_dim] a layer."""

    def __init__(
        self,
        layouts: Sequence[KvLayout],
        num_blocks: int,
        block_size: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.layers: list[LayerCache] = []
        for layout in layouts:
            shape = (num_blocks, block_size, layout.num_heads)
            # Zeros, not empty: padding reads the null block, and a stray NaN there would spread.
            keys = torch.zeros(*shape, layout.key_dim, device=device, dtype=dtype)
            if layout.values_in_keys:
                values = keys[..., : layout.value_dim]
            else:
                values = torch.zeros(*shape, layout.value_dim, device=device, dtype=dtype)
            self.layers.append(LayerCache(keys, values, layout.values_in_keys))
        self.block_size = block_size
        self.num_bytes = sum(part.nbytes for layer in self.layers for part in layer.parts)

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks (source, destination); every source is read before any is written."""
        if not copies:
            return
        sources, destinations = torch.tensor(copies, device=self.layers[0].keys.device).unbind(1)
        for layer in self.layers:
            for part in layer.parts:
                part.index_copy_(0, destinations, part.index_select(0, sources))
