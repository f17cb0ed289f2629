"""The native decoder: embedding, decoder layers, final norm and LM head, for all families.

A layer is what mixes tokens (attention, or a recurrence with a state) and a feed-forward block. `AltUpLayer`
is Gemma 3n's: alternating updates around attention, MLP and a per-layer input.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from ....quant.families.spec_parts import RopeSpec
from ...kernels.attention.dispatch import (
    AttentionKernels,
    attention_kernels,
    reads_in_place,
    takes_static_metadata,
)
from ...kernels.attention.paged_tensor import CacheDtype
from ...kernels.elementwise.dispatch import ROPE_AND_CACHE, RowKernelQuery
from ...kernels.elementwise.reference import RopeAndCacheKernel, Rows
from ...scheduling.block_pool import Window
from ..layers.altup import AltUp, AltUpStreams, Laurel, PerLayerEmbedding, PerLayerInput
from ..layers.attention import (
    NO_CACHE,
    HeadAttention,
    LatentAttention,
    LayerCache,
    SharedAttention,
    Step,
    StepInputs,
)
from ..layers.embedding import RotaryEmbedding, TokenEmbedding
from ..layers.lora import AdapterBank
from ..layers.mixers import GatedDeltaNet, Mamba2, ShortConvolution
from ..layers.mlp import FeedForward
from ..layers.norm import Norm
from ..layers.projection import LinearSite, Projection, Weights
from ..layers.spec import ImageSpec, KvLayout, ModelSpec
from ..layers.state import NO_STEP_STATES, StateLayout, StepStates

Attention = HeadAttention | LatentAttention | SharedAttention
StateMixer = ShortConvolution | GatedDeltaNet | Mamba2
"""Mixers that take no keys and values, and overwrite a constant state."""


@dataclass(frozen=True, slots=True)
class DecoderLayer(Weights):
    """A decoder layer: attention (or a recurrence) and MLP (or experts), each added to the residual.

    Attributes:
        input_norm: None in a post-norm layer (OLMo 2).
        mlp_norm: None in a post-norm layer, and where attention and MLP share the input norm.
        post_attention_norm, post_mlp_norm: norms of the outputs, before the residual add (Gemma).
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
        hidden, x = self.norm.of_sum(hidden, added, self.block.activation_quant)
        if isinstance(self.block, FeedForward):
            return hidden, self.block(x, step.inputs.adapters)
        return hidden, self.block(x, step, cache)


@dataclass(frozen=True, slots=True)
class AltUpLayer(Weights):
    """A layer over residual streams [streams, tokens, hidden], of which it computes one. Attention and LAuReL
    read one norm; their sum is divided by √2. The per-layer input goes to all but the first."""

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


class LayerKernels(NamedTuple):
    """Kernels of layers with one KV-cache layout: attention, RoPE + KV write."""

    attend: AttentionKernels
    rope_and_cache: RopeAndCacheKernel


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """Weights of a decoder. With tied embeddings `head` shares the embedding. `ropes` are the distinct RoPEs,
    indexed by the layers' `Rotation.index`; `linears` are the layers' linears by name below `base`, the
    prefix of the decoder's tensors, for LoRA."""

    embedding: TokenEmbedding
    positions: torch.Tensor | None
    layers: Sequence[Layer]
    final_norm: Norm
    head: Projection
    is_tied: bool
    ropes: Sequence[RopeSpec]
    linears: Mapping[str, LinearSite]
    base: str
    per_layer: PerLayerEmbedding | None = None
    streams: AltUpStreams | None = None

    @property
    def bytes_held(self) -> int:
        """Bytes of weights in memory. A tied head counts only if its kernel holds a repacked copy."""
        shared = self.is_tied and not self.head.holds_a_copy
        # With tensor parallelism the tied head is a slice of the embedding, which is replicated.
        tables = self.embedding.nbytes - (self.head.weight_bytes if shared else 0)
        tables += 0 if self.positions is None else self.positions.nbytes
        tables += 0 if self.per_layer is None else self.per_layer.table.nbytes
        return self.bytes_per_step + tables

    @property
    def bytes_per_step(self) -> int:
        """Bytes of weights that a step reads: all but the embedding tables, of which it reads rows."""
        layers = sum(layer.weight_bytes for layer in self.layers)
        layers += 0 if self.per_layer is None else self.per_layer.weight_bytes
        layers += 0 if self.streams is None else self.streams.weight_bytes
        return self.head.weight_bytes + self.final_norm.weight_bytes + layers


class Decoder:
    """A decoder-only transformer; `broadcast`, if set, gets each call's name and argument for the workers."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: DecoderWeights,
        max_model_len: int,
        dtype: torch.dtype,
        adapters: AdapterBank | None = None,
        cache_dtype: CacheDtype | None = None,
    ) -> None:
        self.spec, self.weights = spec, weights
        self.bytes_per_step = weights.bytes_per_step
        self.hidden_size: int | None = spec.shape.hidden_size
        """Width of the final hidden states, with which the rows of `forward` begin."""
        self.vocab_size, self.kv_layouts = spec.shape.vocab_size, spec.kv_layouts
        self.image_spec: ImageSpec = spec.image_spec
        self.broadcast: Callable[[str, Any], None] | None = None
        self.lora_bank = adapters
        device = weights.embedding.device
        self._rotary_embedding = RotaryEmbedding(
            weights.ropes,
            spec.rotary_width,
            max_model_len if spec.stream is None else spec.stream.num_visible,
            device,
            dtype,
            spec.stream,
        )
        # Gemma rounds the factor to the model's dtype.
        self._scale = float(torch.tensor(spec.embedding_scale, dtype=dtype))
        self._cache_indices = spec.cache_indices
        layouts = self.kv_layouts
        self._kernels: dict[KvLayout, LayerKernels] = {}
        for layout in layouts or [spec.usual_layout]:
            dims = layout.key_dim, layout.value_dim
            width = layout.key_dim if spec.layers else spec.rotary_width
            self._kernels[layout] = self._kernels.get(layout) or LayerKernels(
                attention_kernels(device, dtype, *dims, cache_dtype),
                ROPE_AND_CACHE.select(RowKernelQuery(device.type, dtype, width)).run(),
            )
        # A layer without a cache runs with the kernels of any other.
        usual = layouts[0] if layouts else spec.usual_layout
        self._layouts = [usual if i is None else layouts[i] for i in self._cache_indices]

    @property
    def state_layouts(self) -> tuple[StateLayout, ...]:
        return tuple(layout for layer in self.weights.layers for layout in layer.state_layouts)

    @property
    def window(self) -> Window | None:
        """Sinks and window of the widest sliding window; None: some layer has full attention."""
        windows = [window for window in self.spec.shape.windows if window is not None]
        if len(windows) < self.spec.shape.num_layers:
            return None
        return Window(max(windows), self.spec.num_sink_tokens)

    @property
    def bytes_held(self) -> int:
        adapters = 0 if self.lora_bank is None else self.lora_bank.num_bytes
        return self.weights.bytes_held + adapters

    @property
    def is_capturable(self) -> bool:
        in_place = all(reads_in_place(kernels.attend.causal) for kernels in self._kernels.values())
        return in_place and all(layer.is_capturable for layer in self.weights.layers)

    @property
    def captures_any_step(self) -> bool:
        """True if a captured step serves any spread of its tokens over sequences, unlike a recurrence."""
        kernels = (kernels.attend.causal for kernels in self._kernels.values())
        static = self.is_capturable and all(map(takes_static_metadata, kernels))
        return static and not self.state_layouts

    @torch.inference_mode()
    def forward(self, inputs: StepInputs, caches: Sequence[LayerCache]) -> torch.Tensor:
        """Fill the KV caches; normed hidden states [tokens, hidden], then `aux_hidden_state_layers`."""
        if self.broadcast is not None:
            self.broadcast("forward", inputs)
        positions = inputs.positions
        cache_positions = self._rotary_embedding.cache_positions(positions)
        cos_sin = self._rotary_embedding.of(positions)
        sink_cos_sin = self._rotary_embedding.of_sink_queries(cache_positions)
        token_ids = self._embedded_ids(inputs.token_ids)
        hidden = self.weights.embedding(token_ids)
        if self._scale != 1.0:
            hidden = hidden * self._scale
        if inputs.embedded is not None:
            hidden = inputs.embedded.replace(hidden)
        per_layer = self.weights.per_layer
        per_layer_inputs = None if per_layer is None else per_layer(token_ids, hidden)
        has_states = bool(inputs.states.tensors)
        states = StepStates.of(inputs.states, inputs.batch) if has_states else NO_STEP_STATES
        steps = {
            layout: Step(
                inputs,
                cache_positions,
                cos_sin,
                kernels.attend.of(inputs.batch),
                sink_cos_sin,
                kernels.rope_and_cache,
                per_layer_inputs,
                states,
            )
            for layout, kernels in self._kernels.items()
        }
        if self.weights.positions is not None:
            hidden = hidden + functional.embedding(inputs.positions, self.weights.positions)
        streams = self.weights.streams
        if streams is not None:
            hidden = streams.split(hidden)
        added: torch.Tensor | None = None
        aux_hidden: dict[int, torch.Tensor] = {}
        for index, layer in enumerate(self.weights.layers):
            if index in inputs.aux_hidden_state_layers:
                aux_hidden[index] = hidden if added is None else hidden + added
            cache_index = self._cache_indices[index]
            cache = NO_CACHE if cache_index is None else caches[cache_index]
            hidden, added = layer(hidden, added, steps[self._layouts[index]], cache)
            if inputs.embedded is not None and index < len(inputs.embedded.deepstack):
                hidden = hidden if added is None else hidden + added
                hidden, added = inputs.embedded.add_deepstack(index, hidden), None
        if streams is not None:
            hidden, added = streams.merge(hidden if added is None else hidden + added), None
        _, normed = self.weights.final_norm.of_sum(hidden, added)
        assert isinstance(normed, torch.Tensor)  # quantized only if asked to
        if not inputs.aux_hidden_state_layers:
            return normed
        return torch.cat(
            [normed, *(aux_hidden[index] for index in inputs.aux_hidden_state_layers)], dim=-1
        )

    def _embedded_ids(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Token ids, int64 [tokens], with the padding token in place of placeholders."""
        if not self.spec.placeholders:
            return token_ids
        is_placeholder = torch.zeros_like(token_ids, dtype=torch.bool)
        for token in self.spec.placeholders:
            is_placeholder = is_placeholder | (token_ids == token)
        return token_ids.masked_fill(is_placeholder, self.spec.placeholder_pad)

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits, float32 [rows, vocab], of rows from `forward`, or of normed states [rows, hidden]."""
        hidden = hidden[:, : self.spec.shape.hidden_size].contiguous()
        if self.broadcast is not None:
            self.broadcast("logits", hidden)
        logits = self.weights.head.in_float32(hidden)
        if self.spec.logit_scale != 1.0:
            logits = logits * self.spec.logit_scale
        cap = self.spec.logit_softcap
        return logits if cap is None else cap * (logits / cap).tanh()
