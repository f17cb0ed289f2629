"""Static scales of an 8-bit KV cache, from the calibrated ranges of keys and values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

# The largest magnitude of each KV-cache dtype whose scales servers read from a checkpoint. vLLM refuses a
# stored int8 scheme (`validate_kv_cache_scheme`) and measures its int8 scales itself, per token and head.
LARGEST = {"fp8": 448.0}


@dataclass(slots=True)
class KvRanges:
    """Largest magnitudes of keys (after RoPE) and values, over all heads and tokens.

    Passed to a layer as its `past_key_values`: attention calls `update` with the keys and values. Latent
    attention calls it with the latent and the rotated part of the keys, which servers cache as one vector:
    both get the range of the two together.
    """

    key: float = 0.0
    value: float = 0.0

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Observe `[samples, heads, length, width]` keys and values; returns them unchanged."""
        largest = [float(part.abs().max()) if part.numel() else 0.0 for part in (keys, values)]
        if keys.shape[1] == values.shape[1] == 1 and keys.shape[-1] != values.shape[-1]:
            largest = [max(largest)] * 2
        self.key, self.value = max(self.key, largest[0]), max(self.value, largest[1])
        return keys, values

    def scales(self, kind: str) -> dict[str, torch.Tensor]:
        """`self_attn.k_scale` and `self_attn.v_scale`, float32 `[1]`: quantization steps of the cache."""
        return {
            f"self_attn.{letter}_scale": torch.tensor([largest / LARGEST[kind] or 1.0])
            for letter, largest in (("k", self.key), ("v", self.value))
        }
