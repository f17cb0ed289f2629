"""How large the keys and values of a layer become, and the scales of an 8-bit KV cache that follow."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

# The largest magnitude that each type of cache holds.
LARGEST = {"fp8": 448.0, "int8": 127.0}


@dataclass(slots=True)
class KvRanges:
    """Largest magnitudes of keys (after their rotation) and values, over all heads and tokens.

    Stands where a layer expects its cache: attention hands it what would be stored.
    """

    key: float = 0.0
    value: float = 0.0

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Look at `[samples, heads, length, width]` keys and values; gives them back."""
        self.key = max(self.key, float(keys.abs().max()) if keys.numel() else 0.0)
        self.value = max(self.value, float(values.abs().max()) if values.numel() else 0.0)
        return keys, values

    def scales(self, kind: str) -> dict[str, torch.Tensor]:
        """`self_attn.k_scale` and `self_attn.v_scale`, float32 `[1]`: one step of the cache's grid."""
        return {
            f"self_attn.{letter}_scale": torch.tensor([largest / LARGEST[kind] or 1.0])
            for letter, largest in (("k", self.key), ("v", self.value))
        }
