"""The weights of layers that are written already, dequantized, in place of the checkpoint's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from ..kinds.base.format import WeightFormat


class WrittenWeights(Mapping[str, torch.Tensor]):
    """Tensors by their names in the plain checkpoint, read from shards as they are asked for.

    Args:
        folder: of the shards.
        shards: their records in the journal.
        config: the `quantization_config` that they are read by.
    """

    def __init__(
        self,
        folder: Path,
        shards: Sequence[Mapping[str, Any]],
        weight_format: WeightFormat,
        config: Mapping[str, Any],
    ):
        self._folder, self._format, self._config = folder, weight_format, config
        self._quantized = {
            f"{module['module']}.weight": shard["shard"]
            for shard in shards
            for module in shard["modules"]
        }
        self._shard_of = {name: shard["shard"] for shard in shards for name in shard["tensors"]}
        self._plain = {
            name: shard
            for name, shard in self._shard_of.items()
            if (
                name not in self._quantized
                and f"{name.rpartition('.')[0]}.weight" not in self._quantized
            )
            or name.endswith(".bias")
        }

    def __getitem__(self, name: str) -> torch.Tensor:
        if name in self._quantized:
            module = name.removesuffix(".weight")
            return self._format.unpack(module, self, self._config).dequantize()
        return self.tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter({**self._quantized, **self._plain})

    def __len__(self) -> int:
        return len({**self._quantized, **self._plain})

    def __contains__(self, name: object) -> bool:
        return name in self._quantized or name in self._shard_of

    def tensor(self, name: str) -> torch.Tensor:
        """One tensor as it is stored, codes included."""
        path = self._folder / self._shard_of[name]
        with safe_open(path, framework="pt") as shard:
            return shard.get_tensor(name)
