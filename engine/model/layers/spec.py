"""Declarative spec of a decoder: its shape, and architecture choices that the shape does not cover.

`streaming_spec` adds StreamingLLM to it: attention sinks and a window over every layer (arXiv:2309.17453).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from ....base.errors import BadInput
from ....quant.families.shapes import ModelShape
from ....quant.families.spec_parts import (
    AltUpSpec,
    LayerParts,
    LayerSizes,
    Names,
    RopeSpec,
    RouterSpec,
    Temperature,
)
from ...config.compatibility import refuse
from ...kernels.attention.paged_tensor import CacheDtype
from ...scheduling.block_pool import Window


@dataclass(frozen=True, slots=True)
class LoadingOptions:
    """How weights are loaded.

    Attributes:
        loras: PEFT folders by adapter name; with `max_loras` others may be loaded later.
        stream: StreamingLLM, with which sequences may exceed the model's context.
        cache_dtype: dtype of stored keys and values, for which attention kernels are chosen; None: the
            model's.
    """

    device: torch.device
    dtype: torch.dtype
    max_model_len: int | None = None
    input_bits: int = 16
    loras: Mapping[str, Path] = field(default_factory=dict)
    max_loras: int | None = None
    stream: Window | None = None
    cache_dtype: CacheDtype | None = None

    @property
    def takes_adapters(self) -> bool:
        return bool(self.loras or self.max_loras)


@dataclass(frozen=True, slots=True)
class KvLayout:
    """KV-cache layout of a layer: per token `num_heads` keys of `key_dim` and values of `value_dim` elements.
    With `values_in_keys` the values are the first `value_dim` elements of the keys and take no memory (MLA).
    With a `stride` there is an entry per so many tokens, in the block of the last of them."""

    num_heads: int
    key_dim: int
    value_dim: int
    values_in_keys: bool = False
    stride: int = 1

    def entries(self, block_size: int) -> int:
        return -(-block_size // self.stride)

    @property
    def num_elements(self) -> int:
        return sum(self.vectors)

    @property
    def vectors(self) -> tuple[int, ...]:
        dims = (self.key_dim,) if self.values_in_keys else (self.key_dim, self.value_dim)
        return tuple(dim for dim in dims for _ in range(self.num_heads))


@dataclass(frozen=True, slots=True)
class ImageSpec:
    """How a language model treats image tokens: M-RoPE positions, and attention to each other."""

    has_mrope: bool = False
    is_bidirectional: bool = False


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Spec of a decoder-only transformer. Sizes are in elements, in `shape`.

    Attributes:
        rotary_interleaved: pairs are (2i, 2i + 1) (GPT-J), not (i, i + width / 2) (NeoX).
        bidirectional: layers in which the tokens of an image attend to all of it (Gemma 3 and 4); (): none.
        attention_softcap, logit_softcap: `cap * tanh(x / cap)` on scores and logits.
        norm_bias: layer norms have a bias; False in Cohere.
        qk_norm_whole: QK-norm is over all heads of a projection, not over each head (OLMo 2, MiniMax-M2).
        grouped_qkv: the stacked QKV projection is grouped by KV head: its queries, its key, its value.
        value_norm: values get a norm without weights (Gemma 4).
        per_layer_width, per_layer_vocab: per-layer embeddings: elements of a layer's input, and rows of their
            table; 0: none (Gemma 3n and 4).
        placeholders, placeholder_pad: tokens of images, video and audio that are embedded as the padding
            token is, also where a text or the model itself has one (Gemma 4).
        altup: alternating updates of several residual streams; None: there is one.
        mlp_beside_experts: layers have an MLP and experts that read the same residual, each between norms of
            its own (Gemma 4).
        expert_latent: the width that routed experts work in, if not the model's (Nemotron-H); 0: the model's.
        parallel: attention and MLP read the same residual and are added together (Falcon, Cohere).
        mtp_layers: checkpoints may hold layers for multi-token prediction after the decoder's (DeepSeek-V3).
        is_classifier: the checkpoint is a sequence classifier, without a language head.
        multimodal: True for the text model of a multimodal checkpoint, whose other tensors are not read.
    """

    shape: ModelShape
    names: Names
    dtype: str
    norm_eps: float
    ropes: tuple[RopeSpec | None, ...]
    rotary_width: int
    attention_scale: float
    activation: str = "silu"
    rotary_interleaved: bool = False
    bidirectional: tuple[bool, ...] = ()
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    norm_offset: float = 0.0
    norm_bias: bool = True
    qk_norm_whole: bool = False
    qk_norm_after_rotation: bool = False
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    residual_scale: float = 1.0
    temperature: Temperature | None = None
    grouped_qkv: bool = False
    attention_gate: bool = False
    layers: tuple[LayerSizes, ...] = ()
    parts: tuple[LayerParts, ...] = ()
    value_norm: bool = False
    mlp_beside_experts: bool = False
    per_layer_width: int = 0
    per_layer_vocab: int = 0
    placeholders: tuple[int, ...] = ()
    placeholder_pad: int = 0
    altup: AltUpSpec | None = None
    expert_latent: int = 0
    parallel: bool = False
    mtp_layers: bool = False
    multimodal: bool = False
    is_classifier: bool = False
    router: RouterSpec = field(default_factory=RouterSpec)
    stream: Window | None = None

    @property
    def image_spec(self) -> ImageSpec:
        has_mrope = any(rope is not None and bool(rope.sections) for rope in self.ropes)
        return ImageSpec(has_mrope, any(self.bidirectional))

    @property
    def num_sink_tokens(self) -> int:
        return 0 if self.stream is None else self.stream.sinks

    @property
    def kv_layouts(self) -> tuple[KvLayout, ...]:
        if self.layers:
            return tuple(
                KvLayout(layer.num_kv_heads, layer.head_dim, layer.head_dim)
                for layer in self.layers
                if layer.kv_source is None
            )
        return (self.usual_layout,) * sum(
            self.parts_of(i).has_cache for i in range(self.shape.num_layers)
        )

    @property
    def usual_layout(self) -> KvLayout:
        if (latent := self.shape.latent) is not None:
            return KvLayout(1, latent.cached_elements, latent.kv_rank, values_in_keys=True)
        return KvLayout(self.shape.num_kv_heads, self.shape.head_dim, self.shape.head_dim)

    @property
    def cache_indices(self) -> tuple[int | None, ...]:
        """Index into `kv_layouts` of each layer's cache, shared or not; None without attention."""
        if not self.layers:
            has_cache = [self.parts_of(i).has_cache for i in range(self.shape.num_layers)]
            return tuple(sum(has_cache[:i]) if has else None for i, has in enumerate(has_cache))
        with_cache = [i for i, layer in enumerate(self.layers) if layer.kv_source is None]
        return tuple(
            with_cache.index(i if layer.kv_source is None else layer.kv_source)
            for i, layer in enumerate(self.layers)
        )

    def parts_of(self, index: int) -> LayerParts:
        return self.parts[index] if self.parts else LayerParts()

    def first_state(self, index: int) -> int:
        return sum(part.state.num_states for part in self.parts[:index] if part.state is not None)

    @property
    def num_states(self) -> int:
        return self.first_state(len(self.parts))

    def of_layer(self, index: int) -> ModelSpec:
        if not self.layers:
            return self
        sizes = self.layers[index]
        shape = replace(
            self.shape,
            num_kv_heads=sizes.num_kv_heads,
            head_dim=sizes.head_dim,
            intermediate_size=sizes.intermediate_size,
        )
        return replace(self, shape=shape)


ENDLESS = 2**31 - 1
"""`max_model_len` of streamed sequences without a configured limit."""


def streaming_spec(spec: ModelSpec, stream: Window) -> ModelSpec:
    """`spec` with sinks and window of `stream`. BadInput: no RoPE, own windows, or beyond the context."""
    options = f"window = {stream.length} with attention_sinks = {stream.sinks}"
    if spec.names.positions:
        raise BadInput(
            f"{options}: this model has a learned vector for each of its {spec.shape.max_context} positions, "
            "so its sequences end there: leave both out"
        )
    if any(window is not None for window in spec.shape.windows):
        refuse({"streams", "windows"}, options)
    if stream.num_visible > spec.shape.max_context:
        raise BadInput(
            f"{options}: together they exceed the model's context of {spec.shape.max_context} tokens"
        )
    shape = replace(spec.shape, windows=(stream.length,) * spec.shape.num_layers)
    return replace(spec, shape=shape, stream=stream)
