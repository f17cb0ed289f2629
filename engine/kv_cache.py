"""The tensors behind the block pool, and how many blocks they have."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..quant.errors import BadInput
from .config import EngineConfig, available_memory_bytes
from .model.decoder import LayerCache
from .model.spec import ModelSpec
from .planner.memory import num_blocks_for
from .planner.shapes import ModelShape
from .planner.units import format_gib

DEFAULT_BLOCK_SIZE = {"cpu": 32, "cuda": 16}
MEMORY_SHARE = {"cpu": 0.25, "cuda": 0.9}


def choose_num_blocks(
    config: EngineConfig,
    shape: ModelShape,
    block_size: int,
    max_model_len: int,
    max_num_seqs: int,
    device: torch.device,
    dtype: torch.dtype,
) -> int:
    """Blocks of the cache, the null block included.

    By default enough for `max_num_seqs` sequences of the longest kind, cut to a share of the memory
    that is free now, but never less than one such sequence needs.

    Raises:
        BadInput: the memory given does not hold a single sequence.
    """
    if config.num_blocks is not None:
        return config.num_blocks + 1
    block_bytes = block_size * shape.kv_bytes_per_token(dtype.itemsize)
    blocks_per_sequence = -(-max_model_len // block_size)
    if (given := config.kv_cache_memory_bytes) is not None:
        num_blocks = num_blocks_for(given, shape, block_size, dtype.itemsize)
        if num_blocks < 1:
            raise BadInput(
                f"kv_cache_memory_bytes = {given} does not hold one block of {block_bytes} bytes"
            )
        return num_blocks + 1
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else available_memory_bytes()
    share = int(free * MEMORY_SHARE[device.type])
    affordable = num_blocks_for(share, shape, block_size, dtype.itemsize)
    if affordable < blocks_per_sequence:
        raise BadInput(
            f"a sequence of {max_model_len} tokens needs {format_gib(blocks_per_sequence * block_bytes)} "
            f"of KV cache, but {format_gib(share)} is there: lower max_model_len"
        )
    return min(affordable, blocks_per_sequence * max_num_seqs) + 1


class KvCache:
    """Keys and values of all layers, [blocks, block_size, kv_heads, head_dim] a layer."""

    def __init__(
        self,
        spec: ModelSpec,
        num_blocks: int,
        block_size: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        shape = (num_blocks, block_size, spec.num_kv_heads, spec.head_dim)
        # Zeros, not empty: padding reads the null block, and a stray NaN there would spread.
        self.layers = [
            LayerCache(
                torch.zeros(shape, device=device, dtype=dtype),
                torch.zeros(shape, device=device, dtype=dtype),
            )
            for _ in range(spec.num_layers)
        ]
        self.block_size = block_size
        self.num_bytes = sum(layer.keys.nbytes + layer.values.nbytes for layer in self.layers)

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks (source, destination); every source is read before any is written."""
        if not copies:
            return
        sources, destinations = torch.tensor(copies, device=self.layers[0].keys.device).unbind(1)
        for layer in self.layers:
            layer.keys.index_copy_(0, destinations, layer.keys.index_select(0, sources))
            layer.values.index_copy_(0, destinations, layer.values.index_select(0, sources))
