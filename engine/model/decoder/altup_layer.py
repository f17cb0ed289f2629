"""The decoder layer of Gemma 3n: alternating updates around attention, MLP and a per-layer input."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from ..layers.altup import AltUp, Laurel, PerLayerInput
from ..layers.attention import HeadAttention, LayerCache, SharedAttention, Step
from ..layers.mlp import FeedForward
from ..layers.norm import Norm
from ..layers.state import StateLayout


@dataclass(frozen=True, slots=True)
class AltUpLayer:
    """A layer over residual streams [streams, tokens, hidden], of which it computes one.

    Attention and LAuReL read the same norm, and their sum is divided by the root of 2; the per-layer input is
    added to all streams but the first.
    """

    altup: AltUp
    laurel: Laurel
    input_norm: Norm
    attention: HeadAttention | SharedAttention
    post_attention_norm: Norm
    mlp_norm: Norm
    mlp: FeedForward
    post_mlp_norm: Norm
    per_layer_input: PerLayerInput

    state_layouts: ClassVar[tuple[StateLayout, ...]] = ()

    @property
    def weight_bytes(self) -> int:
        norms = (self.input_norm, self.post_attention_norm, self.mlp_norm, self.post_mlp_norm)
        parts = (self.altup, self.laurel, self.attention, self.mlp, self.per_layer_input, *norms)
        return sum(part.weight_bytes for part in parts)

    @property
    def is_capturable(self) -> bool:
        return self.mlp.is_capturable

    def __call__(
        self, hidden: torch.Tensor, added: torch.Tensor | None, step: Step, cache: LayerCache
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The streams after the layer, and None: nothing is left to add."""
        assert added is None and step.per_layer_inputs is not None
        adapters = step.inputs.adapters
        predicted = self.altup.predict(hidden, adapters)
        active = predicted[self.altup.active]
        normed = self.input_norm(active)
        mixed = self.post_attention_norm(self.attention(normed, step, cache))
        joined = (active + mixed + self.laurel(normed, adapters)) * 2.0**-0.5
        computed = joined + self.post_mlp_norm(self.mlp(self.mlp_norm(joined), adapters))
        streams = self.altup.correct(predicted, computed, adapters)
        first = self.altup.scaled(streams[self.altup.active])
        own = self.per_layer_input(first, step.per_layer_inputs, adapters)
        return torch.cat([streams[:1], streams[1:] + own]), None
