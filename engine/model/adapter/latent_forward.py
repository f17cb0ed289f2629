"""Multi-head latent attention (MLA) of transformers models over a paged cache that holds the latents alone.

The projection from the latent to keys and values is absorbed into queries and outputs (DeepSeek-V2, section
2.1.2), as in the engine's own decoder: no head's keys and values are made.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ...kernels.attention.paged_attention import AttentionRule
from ..layers.embedded_rows import EmbeddedRows
from .packed import PackedForward, PagedAttention


def latent_layers(model: Any) -> dict[int, Any]:
    """Attention modules, by layer, that cache a latent and a shared key and expand them (`expand_kv`)."""
    return {
        module.layer_idx: module
        for module in model.modules()
        if hasattr(module, "expand_kv") and isinstance(_projection(module), torch.nn.Linear)
    }


def latent_projections(model: Any) -> list[torch.nn.Linear]:
    """The linears whose weights are absorbed: they stay plain, and take no LoRA adapter."""
    return [_projection(module) for module in latent_layers(model).values()]


class LatentForward(PackedForward):
    """`PackedForward` for models with latent attention."""

    def __init__(self, model: Any, own_attention: str) -> None:
        super().__init__(model, own_attention)
        self._latents = latent_layers(model)

    def _run(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        paged: PagedAttention,
        embedded: EmbeddedRows | None = None,
    ) -> torch.Tensor:
        for module in self._latents.values():
            module.expand_kv = _unexpanded
        try:
            absorbed = _AbsorbedAttention(paged, self._latents)
            return super()._run(tokens, positions, absorbed, embedded)
        finally:
            for module in self._latents.values():
                del module.expand_kv


@dataclass(frozen=True, slots=True)
class _AbsorbedAttention:
    """Paged attention whose keys and values, in layers of latent attention, are latents and shared keys."""

    paged: PagedAttention
    latents: Mapping[int, Any]

    def attend(
        self,
        layer: int,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        rule: AttentionRule,
    ) -> torch.Tensor:
        """Attend with `queries` [tokens, heads, nope + rope]; in a latent layer `keys` are the latents
        [tokens, 1, rank] and `values` the shared keys [tokens, 1, rope]. Returns [tokens, heads, v_dim]."""
        module = self.latents.get(layer)
        if module is None:
            return self.paged.attend(layer, queries, keys, values, rule)
        nope = module.qk_nope_head_dim
        weight = _projection(module).weight.unflatten(
            0, (queries.shape[1], -1)
        )  # [heads, .., rank]
        absorbed = torch.einsum("thn,hnr->thr", queries[..., :nope], weight[:, :nope])
        joined = torch.cat([keys, values], dim=-1)
        of_latents = self.paged.attend(
            layer,
            torch.cat([absorbed, queries[..., nope:]], dim=-1),
            joined,
            joined[..., : keys.shape[-1]],
            rule,
        )
        return torch.einsum("thr,hvr->thv", of_latents, weight[:, nope:])


def _projection(module: Any) -> Any:
    """The projection from the latent to all heads' keys and values."""
    return getattr(module, "kv_b_proj", None)


def _unexpanded(
    latents: torch.Tensor, shared_keys: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return latents, shared_keys
