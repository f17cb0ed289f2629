"""Writing of a checkpoint's shards one at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch

from ..base.atomic_io import layout_of, write_atomically, write_tensors
from ..manifest.manifest import to_json
from ..model.checkpoint import INDEX_NAME

SHARD_BYTES = 2**30


def write_shards(
    folder: Path, parts: Iterable[Mapping[str, torch.Tensor]], release: Callable[[], None]
) -> None:
    """Write tensors as they come in shards of 1 GiB, of which one is in memory, and their index.

    Args:
        release: called after each shard, to let go of what was read for it.
    """
    weight_map: dict[str, str] = {}
    held: dict[str, torch.Tensor] = {}
    total = size = 0

    def write() -> None:
        name = f"model-{len(set(weight_map.values())) + 1:05d}.safetensors"
        write_tensors(folder / name, held, layout_of(held))
        weight_map.update(dict.fromkeys(held, name))
        held.clear()
        release()

    for tensors in parts:
        held |= tensors
        added = sum(tensor.nbytes for tensor in tensors.values())
        size, total = size + added, total + added
        if size >= SHARD_BYTES:
            write()
            size = 0
    if held:
        write()
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    write_atomically(folder / INDEX_NAME, to_json(index))
