"""Static scales of an 8-bit KV cache, from the calibrated ranges of keys and values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

# The largest magnitude of each KV-cache dtype.
LARGEST = {"fp8": 448.0, "int8": 127.0}


@dataclass(slots=True)
class KvRanges:
    """Largest magnitudes of keys (after RoPE) and values, over all heads and tokens.

    Passed to a layer as its `past_key_values`: attention calls `update` with the keys and values.
    """

    key: float = 0.0
    value: float = 0.0

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Observe `[samples, heads, length, width]` keys and values; returns them unchanged."""
        self.key = max(self.key, float(keys.abs().max()) if keys.numel() else 0.0)
        self.value = max(self.value, float(values.abs().max()) if values.numel() else 0.0)
        return keys, values

    def scales(self, kind: str) -> dict[str, torch.Tensor]:
        """`self_attn.k_scale` and `self_attn.v_scale`, float32 `[1]`: quantization steps of the cache."""
        return {
            f"self_attn.{letter}_scale": torch.tensor([largest / LARGEST[kind] or 1.0])
            for letter, largest in (("k", self.key), ("v", self.value))
        }
