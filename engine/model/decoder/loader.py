"""Weight loading of the decoder; missing and unexpected tensors are errors."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import torch

from ....quant.families.spec_parts import AltUpSpec, RopeSpec
from ....quant.model.checkpoint import Checkpoint
from ...kernels.attention.batch import AttentionRule
from ..layers.attention import HeadAttention, KvScales, Rotation, SharedAttention
from ..layers.mlp import (
    FeedForward,
    GatedMlp,
    MixtureOfExperts,
    MlpBesideExperts,
    sparse_gating,
)
from ..layers.norm import Norm, ShardedNorm
from ..layers.parallel import Shard, WeightSlice
from ..layers.projection import LinearSite
from ..layers.spec import LoadingOptions, ModelSpec
from .decoder import (
    AltUpLayer,
    Attention,
    DecoderLayer,
    DecoderWeights,
    Layer,
    SingleLayer,
    StateMixer,
)
from .expert_loader import ExpertLoader
from .reader import CheckpointReader, decoder_base, load_layers


def load_weights(
    checkpoint: Checkpoint, spec: ModelSpec, options: LoadingOptions, shard: Shard | None = None
) -> DecoderWeights:
    """Load a decoder's weights, or a shard's. BadInput: a tensor is missing, misshapen or unexpected."""
    reader = CheckpointReader(checkpoint, options, shard)
    return LayerLoader(reader, spec, decoder_base(checkpoint, spec), options.dtype, shard).load()


@dataclass(frozen=True, slots=True)
class LayerLoader(ExpertLoader):
    """Loads a decoder, layer by layer."""

    def load(self) -> DecoderWeights:
        reader, spec, names, shape = self.reader, self.spec, self.spec.names, self.spec.shape
        hidden, vocab = shape.hidden_size, shape.vocab_size
        table = f"{self.base}{names.embedding}.weight"
        # The head lies outside the decoder's prefix: `language_model.lm_head` in a multimodal checkpoint.
        parent = self.base[:-1].rpartition(".")[0]
        heads = (f"{self.base.removesuffix('model.')}{names.head}", f"{parent}.{names.head}")
        head_name = next((name for name in heads if reader.has_weight(name)), names.head)
        # A sequence classifier has no language head; its own is read next to the decoder.
        is_classifier = spec.is_classifier and not reader.has_weight(head_name)
        tied = (shape.tied or is_classifier) and not self._has_other_head(head_name)
        embedding = self.embedding(table, tied=tied)
        positions = None
        if names.positions:
            table = f"{self.base}{names.positions}.weight"
            positions = reader.tensor(table, shape.learned_positions, hidden)
        ropes: list[RopeSpec] = []
        for rope in spec.ropes:
            if rope is not None and rope not in ropes:
                ropes.append(rope)

        def load_layer(index: int) -> Layer:
            layer = replace(self, spec=spec.of_layer(index))._layer(index, ropes)
            # Repacked weights make the file's mapped pages redundant.
            reader.release()
            return layer

        layers = load_layers(load_layer, shape.num_layers, reader.device)
        per_layer = streams = None
        if spec.per_layer_width:
            per_layer = self.per_layer_embedding()
        if spec.altup is not None:
            streams = self.streams(spec.altup)
        final_norm = self.norm(f"{self.base}{names.final_norm}", hidden)
        part = slice(0, vocab) if self.shard is None else self.shard.vocabulary(vocab)
        if tied:
            head = embedding.head(part)
        else:
            weight_slice = None if self.shard is None else WeightSlice(rows=((part,),))
            head = reader.projection(
                [head_name], hidden, [vocab], bias=False, weight_slice=weight_slice
            )
        if (shard := self.shard) is not None:
            head.then(lambda logits: shard.group.all_gather_columns(logits, vocab))
        reader.finish(lambda name: self._may_remain(name, f"{head_name}.weight" if tied else ""))
        parts = embedding, positions, layers, final_norm, head, tied, ropes, self._linears()
        return DecoderWeights(*parts, self.base, per_layer, streams)

    def _has_other_head(self, name: str) -> bool:
        """True if the file's head is not its tied embedding: quantized, or of other values."""
        if self.reader.is_quantized(name):
            return True
        table = f"{self.base}{self.spec.names.embedding}.weight"
        head = f"{name}.weight"
        return head in self.reader and not self.reader.same(head, table)

    def _linears(self) -> dict[str, LinearSite]:
        names = self.spec.names
        within, routed = self.base + names.layer.split("{")[0], f".{names.experts}."
        return {
            name.removeprefix(self.base): site
            for name, site in self.reader.linears.items()
            if name.startswith(within) and routed not in name
        }

    def _may_remain(self, name: str, second_head: str) -> bool:
        """True for tensors that may stay unread: buffers, MTP layers, other modalities or ranks."""
        if name == second_head or name.endswith(self.spec.names.buffers):
            return True
        if self.spec.is_classifier and name in ("score.weight", "score.bias"):
            return True
        if self.shard is not None and (experts := self.spec.shape.experts) is not None:
            expert = name.partition(f".{self.spec.names.experts_apart}.")[2].partition(".")[0]
            if expert.isdecimal() and int(expert) not in self.shard.experts(experts.count):
                return True
        names = self.spec.names
        if ".self_attn." in name and self._is_unused_by_sharing(name):
            return True
        beyond = names.layer.format(self.spec.shape.num_layers)
        mtp = (*names.mtp, beyond) if self.spec.mtp_layers else names.mtp
        if name.startswith((*names.mtp, *(self.base + prefix for prefix in mtp))):
            return True
        # Other parts may lie below the decoder's prefix: Qwen2.5-VL's files say `model.visual`.
        parts = (names.layer.split("{")[0], names.embedding, names.final_norm)
        return self.spec.multimodal and not name.startswith(
            tuple(self.base + part for part in parts)
        )

    def _is_unused_by_sharing(self, name: str) -> bool:
        """True if it belongs to keys or values that a layer with KV sharing does not compute."""
        module = name.rpartition(".self_attn.")[2].partition(".")[0]
        return module in ("k_proj", "v_proj", "k_norm", "v_norm") and any(
            name.startswith(self.base + self.spec.names.layer.format(index))
            for index in range(len(self.spec.layers))
            if self._shares(index)
        )

    def norm(self, module: str, size: int) -> Norm:
        offset, centered = self.spec.norm_offset, self.spec.shape.layer_norm
        # 1 + w needs more precision than w: it is kept, and the norm computed, in float32.
        dtype = torch.float32 if offset else self.dtype
        weight = self.reader.tensor(f"{module}.weight", size, dtype=dtype)
        has_bias = centered and self.spec.norm_bias
        bias = self.reader.tensor(f"{module}.bias", size) if has_bias else None
        return Norm(size, self.spec.norm_eps, weight + offset if offset else weight, bias, centered)

    def _norm_if(self, layer: str, name: str) -> Norm | None:
        return self.norm(layer + name, self.spec.shape.hidden_size) if name else None

    def _layer(self, index: int, ropes: list[RopeSpec]) -> Layer:
        names, parts = self.spec.names, self.spec.parts_of(index)
        layer = self.base + names.layer.format(index)
        if not parts.has_mixer:
            norm = self.norm(layer + names.input_norm, self.spec.shape.hidden_size)
            return SingleLayer(norm, self.block(layer, index))
        mixer: Attention | StateMixer
        if parts.state is not None:
            first = self.spec.first_state(index)
            mixer = self.state_mixer(parts.state, layer, first)
        else:
            mixer = self._attention(layer, index, ropes)
        if self.spec.altup is not None:
            return self._altup_layer(layer, index, mixer, self.spec.altup)
        if not parts.has_mlp:
            norm = self.norm(layer + names.input_norm, self.spec.shape.hidden_size)
            return SingleLayer(norm, mixer)
        per_layer = self.per_layer_input(layer, index) if self.spec.per_layer_width else None
        scale = self.reader.tensor(layer + names.layer_scale, 1) if names.layer_scale else None
        return DecoderLayer(
            input_norm=self._norm_if(layer, names.input_norm),
            attention=mixer,
            post_attention_norm=self._norm_if(layer, names.post_attention_norm),
            mlp_norm=self._norm_if(layer, names.mlp_norm),
            mlp=self.block(layer, index),
            post_mlp_norm=self._norm_if(layer, names.post_mlp_norm),
            parallel=self.spec.parallel,
            residual_scale=self.spec.residual_scale,
            per_layer_input=per_layer,
            output_scale=scale,
        )

    def _altup_layer(
        self, layer: str, index: int, attention: Attention | StateMixer, altup: AltUpSpec
    ) -> AltUpLayer:
        names, hidden = self.spec.names, self.spec.shape.hidden_size
        assert isinstance(attention, HeadAttention | SharedAttention)
        return AltUpLayer(
            *self.altup(altup, layer),
            self.norm(layer + names.input_norm, hidden),
            attention,
            self.norm(layer + names.post_attention_norm, hidden),
            self.norm(layer + names.mlp_norm, hidden),
            self.block(layer, index),
            self.norm(layer + names.post_mlp_norm, hidden),
            self.per_layer_input(layer, index),
        )

    def _attention(self, layer: str, index: int, ropes: list[RopeSpec]) -> Attention:
        rope, latent = self.spec.ropes[index], self.spec.shape.latent
        rotation = None
        if rope is not None:
            rotation = Rotation(ropes.index(rope), self.spec.rotary_interleaved)
        if latent is not None and rotation is not None:
            return self.latent_attention(layer, latent, rotation)
        if rotation is not None and self._shares(index):
            return self._shared_attention(layer, index, rotation)
        return self.head_attention(layer, index, rotation)

    def _shares(self, index: int) -> bool:
        return bool(self.spec.layers) and self.spec.layers[index].kv_source is not None

    def _rule(self, index: int, sinks: torch.Tensor | None = None) -> AttentionRule:
        spec, window = self.spec, self.spec.shape.windows[index]
        return AttentionRule(
            spec.attention_scale,
            window=None if spec.shape.chunked else window,
            num_sink_tokens=spec.num_sink_tokens,
            chunk=window if spec.shape.chunked else None,
            softcap=spec.attention_softcap,
            sinks=sinks,
            bidirectional=bool(spec.bidirectional) and spec.bidirectional[index],
        )

    def _shared_attention(self, layer: str, index: int, rotation: Rotation) -> SharedAttention:
        names, shape, source = self.spec.names, self.spec.shape, self.spec.layers[index].kv_source
        hidden, queries = shape.hidden_size, shape.num_heads * shape.head_dim
        norm = self.norm(layer + names.query_norm, shape.head_dim) if shape.qk_norm else None
        load = partial(self.reader.projection, transposed=names.transposed)
        return SharedAttention(
            shape.num_heads,
            shape.head_dim,
            load([layer + names.qkv[0]], hidden, [queries], bias=shape.qkv_bias),
            load([layer + names.output], queries, [hidden], bias=shape.output_bias),
            self._rule(index),
            rotation,
            norm,
            self._kv_scales(self.base + names.layer.format(source), shape.num_kv_heads),
        )

    def head_attention(
        self, layer: str, index: int, rotation: Rotation | None, in_features: int | None = None
    ) -> HeadAttention:
        """Load a layer's attention; `in_features` defaults to the hidden size."""
        spec, names, shape, shard = self.spec, self.spec.names, self.spec.shape, self.shard
        local = shape if shard is None else shard.spec(spec).shape
        queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        modules = [layer + name for name in names.qkv]
        into_queries = queries * (2 if spec.attention_gate else 1)
        outs = [into_queries, keys, keys] if len(modules) > 1 else [queries + 2 * keys]
        keys_as_values = bool(spec.layers) and spec.layers[index].keys_as_values
        if keys_as_values:
            modules, outs = modules[:2], outs[:2]
        sinks = None
        if shape.sinks:
            # As attention reads them, so that no layer of a step casts them.
            sinks = self.reader.tensor(layer + names.sinks, shape.num_heads, dtype=torch.float32)
        if sinks is not None and shard is not None:
            sinks = sinks[shard.heads(shape)].clone()
        hidden, weight_slices, temperature = shape.hidden_size, (None, None), spec.temperature
        inputs = in_features or hidden
        load = partial(self.reader.projection, transposed=names.transposed)
        if shard is not None:
            weight_slices = shard.qkv(spec), shard.output(shape)
        return HeadAttention(
            local.num_heads,
            local.num_kv_heads,
            shape.head_dim,
            qkv=load(modules, inputs, outs, bias=shape.qkv_bias, weight_slice=weight_slices[0]),
            output=load(
                [layer + names.output],
                queries,
                [hidden],
                bias=shape.output_bias,
                weight_slice=weight_slices[1],
            ),
            rule=self._rule(index, sinks),
            rotation=rotation,
            query_norm=self._qk_norm(layer + names.query_norm, rotation, of_keys=False),
            key_norm=self._qk_norm(layer + names.key_norm, rotation, of_keys=True),
            norm_whole=spec.qk_norm_whole,
            norm_after_rotation=spec.qk_norm_after_rotation,
            temperature=temperature
            if temperature is not None and (rotation is None or temperature.everywhere)
            else None,
            grouped=spec.grouped_qkv,
            value_norm=Norm(shape.head_dim, spec.norm_eps) if spec.value_norm else None,
            keys_as_values=keys_as_values,
            kv_scales=self._kv_scales(layer, shape.num_kv_heads),
            gated=spec.attention_gate,
        )

    def _kv_scales(self, layer: str, num_heads: int) -> KvScales | None:
        scales = self.reader.kv_scales(layer, num_heads)
        if scales is None or self.shard is None or scales[0].numel() == 1:
            return scales
        heads = self.shard.kv_heads(self.spec.shape)
        return scales[0][heads].clone(), scales[1][heads].clone()

    def _qk_norm(
        self, module: str, rotation: Rotation | None, *, of_keys: bool
    ) -> Norm | ShardedNorm | None:
        spec, shape, shard = self.spec, self.spec.shape, self.shard
        head_dim, heads = shape.head_dim, shape.num_kv_heads if of_keys else shape.num_heads
        if shape.qk_norm:
            whole = self.norm(module, heads * head_dim if spec.qk_norm_whole else head_dim)
            if shard is None or not spec.qk_norm_whole:
                return whole
            part = shard.kv_heads(shape) if of_keys else shard.heads(shape)
            assert whole.weight is not None
            weight = whole.weight[part.start * head_dim : part.stop * head_dim].clone()
            copies = shard.size * (part.stop - part.start) // heads
            return ShardedNorm(weight, whole.eps, whole.size, copies, shard.group.all_reduce)
        if spec.qk_norm_after_rotation and rotation is not None:
            return Norm(head_dim, spec.norm_eps)
        return None

    def block(self, layer: str, index: int) -> FeedForward:
        shape, names = self.spec.shape, self.spec.names
        experts = shape.experts
        if experts is not None and index not in experts.dense_layers:
            mixture = self.mixture(layer)
            return self._beside(layer, mixture) if self.spec.mlp_beside_experts else mixture
        inner, sparsity = shape.intermediate_size, 0.0
        if self.spec.layers:
            sparsity = self.spec.layers[index].sparsity
        mlp = self.mlp(layer, names.gate_up, names.down, inner, bias=shape.mlp_bias)
        if sparsity and isinstance(mlp, GatedMlp):
            return replace(mlp, combine=sparse_gating(self.spec.activation, sparsity))
        return mlp

    def _beside(self, layer: str, mixture: MixtureOfExperts) -> MlpBesideExperts:
        shape, names = self.spec.shape, self.spec.names
        outputs = layer + names.post_mlp_norm
        inputs = f"{layer}pre_feedforward_layernorm"
        return MlpBesideExperts(
            self.norm(inputs, shape.hidden_size),
            self.mlp(layer, names.gate_up, names.down, shape.intermediate_size),
            self.norm(f"{outputs}_1", shape.hidden_size),
            self.norm(f"{inputs}_2", shape.hidden_size),
            mixture,
            self.norm(f"{outputs}_2", shape.hidden_size),
        )
