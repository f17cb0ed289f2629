"""Decoder layers: what mixes tokens (attention, or a recurrence with a state) and a feed-forward block.

`AltUpLayer` is Gemma 3n's: alternating updates around attention, MLP and a per-layer input.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...kernels.elementwise.activations import Rows
from ..layers.altup import AltUp, Laurel, PerLayerInput
from ..layers.attention import HeadAttention, LatentAttention, LayerCache, SharedAttention, Step
from ..layers.mixers import GatedDeltaNet, Mamba2, ShortConvolution
from ..layers.mlp import FeedForward
from ..layers.norm import Norm
from ..layers.projection import Weights

Attention = HeadAttention | LatentAttention | SharedAttention
StateMixer = ShortConvolution | GatedDeltaNet | Mamba2
"""They take no keys and values, and overwrite a constant state."""


@dataclass(frozen=True, slots=True)
class DecoderLayer(Weights):
    """A decoder layer: attention (or a recurrence) and MLP (or experts), each added to the residual.

    Attributes:
        input_norm: None in a post-norm layer (OLMo 2).
        mlp_norm: None in a post-norm layer, and where attention and MLP share the input norm.
        post_attention_norm, post_mlp_norm: norms of the outputs, before the residual add (Gemma).
        parallel: parallel residual: attention and MLP read the same residual (Falcon).
        residual_scale: factor on both outputs (Granite).
        per_layer_input: adds the layer's own input of the token (Gemma 3n and 4).
        output_scale: [1], factor on the layer's output (Gemma 4).
    """

    input_norm: Norm | None
    attention: Attention | StateMixer
    post_attention_norm: Norm | None
    mlp_norm: Norm | None
    mlp: FeedForward
    post_mlp_norm: Norm | None
    parallel: bool
    residual_scale: float = 1.0
    per_layer_input: PerLayerInput | None = None
    output_scale: torch.Tensor | None = None

    def __call__(
        self, hidden: torch.Tensor, added: torch.Tensor | None, step: Step, cache: LayerCache
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Takes the residual as `hidden + added` and returns it so: the next norm fuses the add."""
        x: Rows
        if self.input_norm is None:
            x = hidden = hidden if added is None else hidden + added
        else:
            # With a parallel residual MLP and attention share the norm, so it stays unquantized.
            activation_quant = None if self.parallel else self.attention.activation_quant
            hidden, x = self.input_norm.of_sum(hidden, added, activation_quant)
        adapters = step.inputs.adapters
        mixed = self.attention(x, step, cache)
        if self.parallel:
            if self.mlp_norm is not None:
                x = self.mlp_norm(hidden)
            return hidden + mixed, self.mlp(x, adapters)
        if self.post_attention_norm is not None:
            mixed = self.post_attention_norm(mixed)
        mixed = self._scaled(mixed)
        if self.mlp_norm is None:
            x = hidden = hidden + mixed
        else:
            hidden, x = self.mlp_norm.of_sum(hidden, mixed, self.mlp.activation_quant)
        out = self.mlp(x, adapters)
        out = out if self.post_mlp_norm is None else self.post_mlp_norm(out)
        if self.per_layer_input is None and self.output_scale is None:
            return hidden, self._scaled(out)
        hidden = hidden + self._scaled(out)
        if self.per_layer_input is not None and step.per_layer_inputs is not None:
            hidden = hidden + self.per_layer_input(hidden, step.per_layer_inputs, adapters)
        return hidden if self.output_scale is None else hidden * self.output_scale, None

    def _scaled(self, out: torch.Tensor) -> torch.Tensor:
        return out if self.residual_scale == 1.0 else out * self.residual_scale


@dataclass(frozen=True, slots=True)
class SingleLayer(Weights):
    """A layer of one block, which mixes tokens or feeds forward: `x + block(norm(x))` (Nemotron-H)."""

    norm: Norm
    block: Attention | StateMixer | FeedForward

    def __call__(
        self, hidden: torch.Tensor, added: torch.Tensor | None, step: Step, cache: LayerCache
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Compute the layer, with the arguments of `DecoderLayer`."""
        hidden, x = self.norm.of_sum(hidden, added, self.block.activation_quant)
        if isinstance(self.block, FeedForward):
            return hidden, self.block(x, step.inputs.adapters)
        return hidden, self.block(x, step, cache)


@dataclass(frozen=True, slots=True)
class AltUpLayer(Weights):
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


Layer = DecoderLayer | SingleLayer | AltUpLayer
