"""Static scales of an fp8 KV cache, per tensor or per head, from the calibrated ranges of keys and values."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from ...base.errors import BadInput
from ..base.scheme import LARGEST, KvStrategy
from ..base.workers import gathered


@dataclass(slots=True)
class KvRanges:
    """Largest magnitudes of keys (after RoPE) and values of each KV head, over all tokens.

    Passed to a layer as its `past_key_values`: attention calls `update` with the keys and values. Latent
    attention calls it with the latent and the rotated part of the keys, which servers cache as one vector:
    both get the range of the two together.

    Attributes:
        latent: whether the model has latent attention.
        key, value: float32 `[kv_heads]`; empty before the first update.
    """

    latent: bool = False
    key: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    value: torch.Tensor = field(default_factory=lambda: torch.empty(0))

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Observe `[samples, heads, length, width]` keys and values; returns them unchanged."""
        if not keys.numel():
            return keys, values
        largest = [part.abs().amax(dim=(0, 2, 3)).float().cpu() for part in (keys, values)]
        if self.latent and keys.shape[1] == values.shape[1] == 1:
            largest = [torch.maximum(*largest)] * 2
        if self.key.numel():
            largest = [
                torch.maximum(*pair) for pair in zip((self.key, self.value), largest, strict=True)
            ]
        self.key, self.value = largest
        return keys, values

    def scales(self, kind: str, strategy: KvStrategy = "tensor") -> dict[str, torch.Tensor]:
        """Steps `self_attn.k_scale` and `.v_scale`, float32: `[1]`, or `[kv_heads, 1, 1]` per head."""
        steps = {}
        for letter, largest in (("k", self.key), ("v", self.value)):
            step = largest / LARGEST[kind]
            step = torch.where(step > 0, step, 1.0)
            whole = step.amax().view(1) if strategy == "tensor" else step.view(-1, 1, 1).clone()
            steps[f"self_attn.{letter}_scale"] = whole
        return steps

    def of_all_workers(self) -> KvRanges:
        """The ranges over the tokens of all workers, which meet."""
        seen = [pair for pair in gathered((self.key, self.value)) if pair[0].numel()]
        if not seen:
            return self
        keys, values = (torch.stack(parts).amax(dim=0) for parts in zip(*seen, strict=True))
        return KvRanges(self.latent, keys, values)

    def checked(self, prefix: str) -> KvRanges:
        """The ranges themselves; BadInput where keys and values, or the latent, were not measured."""
        if not self.key.numel():
            raise BadInput(
                f"--kv-cache: no keys and values of {prefix} were measured (statistics that were made "
                "without --kv-cache do not have them)"
            )
        if self.latent and not torch.equal(self.key, self.value):
            raise BadInput(
                f"--kv-cache: {prefix} has latent attention, of which servers cache the latent, and "
                "transformers' module caches its keys and values: its scale was not measured"
            )
        return self


def kv_heads(text_config: dict[str, Any]) -> int:
    """KV heads of a layer that the cache holds, by the model's config; latent attention caches one vector."""
    if text_config.get("kv_lora_rank"):
        return 1
    heads = text_config.get("num_key_value_heads") or text_config.get("num_attention_heads")
    return int(heads or text_config.get("n_head") or 1)
