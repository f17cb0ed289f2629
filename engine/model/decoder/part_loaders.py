"""Loading of the parts that some families have, and of the token embedding, which a tied LM head shares.

Multi-head latent attention with its up-projections apart, what mixes tokens with a constant state,
alternating updates (Gemma 3n), per-layer embeddings (Gemma 3n and 4).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import torch

from ....quant.families.shapes import Latent
from ....quant.families.spec_parts import (
    AltUpSpec,
    DeltaNetSpec,
    Mamba2Spec,
    ShortConvSpec,
    StateMixer,
)
from ...kernels.attention.batch import AttentionRule
from ...kernels.elementwise.recurrence import DeltaWeights, MambaWeights
from ...kernels.linear.linear import OneDnnLinear
from ...kernels.linear.native_linear import LooksUpRows
from ..layers.altup import AltUp, AltUpStreams, Laurel, PerLayerEmbedding, PerLayerInput
from ..layers.attention import LatentAttention, Rotation
from ..layers.embedding import EmbeddingTable, PackedEmbedding, TokenEmbedding
from ..layers.mixers import GatedDeltaNet, Mamba2, ShortConvolution
from ..layers.mlp import ACTIVATIONS, GatedMlp, PlainMlp, gating
from ..layers.norm import Norm
from ..layers.parallel import Shard, WeightSlice
from ..layers.projection import Projection
from ..layers.spec import ModelSpec
from .reader import CheckpointReader

_EXACT = torch.float32
_LATENT_EPS = 1e-6
"""DeepSeek's `rms_norm_eps` does not apply to these norms: they use their class's default epsilon."""


@dataclass(frozen=True, slots=True)
class PartLoader:
    """Loads parts of a decoder under its family's tensor names, which begin with `base`."""

    reader: CheckpointReader
    spec: ModelSpec
    base: str
    dtype: torch.dtype
    shard: Shard | None

    def embedding(self, name: str, *, tied: bool) -> TokenEmbedding:
        """Load the embedding [vocab, hidden]: packed, if a kernel looks up its rows, else floats. A tied
        head's floats are only prepacked for its GEMM if rows can be looked up there; ranks have a table."""
        reader, shard, dtype = self.reader, self.shard, self.dtype
        vocab, hidden = self.spec.shape.vocab_size, self.spec.shape.hidden_size
        packed = reader.packed_table(name, vocab, hidden) if shard is None else None
        if packed is not None and isinstance(packed.kernel, LooksUpRows):
            return PackedEmbedding(packed, packed.kernel, hidden, dtype)
        table = reader.weight(name, vocab, hidden)
        if not tied or shard is not None:
            return EmbeddingTable(table, dtype)
        head = reader.stacked([table], None)
        rows = head.kernel.rows() if isinstance(head.kernel, OneDnnLinear) else head.kernel
        if isinstance(rows, LooksUpRows):
            return PackedEmbedding(head, rows, hidden, dtype)
        return EmbeddingTable(table, dtype)

    def latent_attention(self, layer: str, latent: Latent, rotation: Rotation) -> LatentAttention:
        """Load the attention of the layer with prefix `layer`; of a shard, that rank's heads."""
        reader, spec, shard = self.reader, self.spec, self.shard
        shape, prefix = spec.shape, f"{layer}self_attn."
        hidden, heads = shape.hidden_size, shape.num_heads
        wide, rank = heads * latent.query_dim, latent.kv_rank
        local_heads = slice(0, heads) if shard is None else shard.heads(shape)
        into, out_of = (None, None) if shard is None else shard.latent(shape, latent)

        def linear(name: str, width: int, out: int, part: WeightSlice | None = None) -> Projection:
            return reader.projection([prefix + name], width, [out], bias=False, weight_slice=part)

        cached, into_latent = latent.cached_elements, "kv_a_proj_with_mqa"
        query_norm = query_up = None
        if latent.query_rank is None:
            query, down = linear("q_proj", hidden, wide, into), linear(into_latent, hidden, cached)
        else:
            # Stacked where both are unquantized: blocks of a quantized weight may straddle the two.
            names, down = [prefix + name for name in ("q_a_proj", into_latent)], None
            if any(reader.is_quantized(name) for name in names):
                query = linear("q_a_proj", hidden, latent.query_rank)
                down = linear(into_latent, hidden, cached)
            else:
                outs = latent.query_rank, cached
                query = reader.projection(names, hidden, outs, bias=False)
            query_norm = self._norm(f"{prefix}q_a_layernorm", latent.query_rank, _LATENT_EPS)
            query_up = linear("q_b_proj", latent.query_rank, wide, into)
        both = heads * (latent.nope_dim + latent.value_dim)
        expand = reader.dense(f"{prefix}kv_b_proj", both, rank).view(heads, -1, rank)[local_heads]
        return LatentAttention(
            num_heads=local_heads.stop - local_heads.start,
            nope_dim=latent.nope_dim,
            query=query,
            query_norm=query_norm,
            query_up=query_up,
            latent=down,
            latent_norm=self._norm(f"{prefix}kv_a_layernorm", rank, _LATENT_EPS),
            key_up=expand[:, : latent.nope_dim].clone(),
            value_up=expand[:, latent.nope_dim :].clone(),
            output=linear("o_proj", heads * latent.value_dim, hidden, out_of),
            rule=AttentionRule(
                spec.attention_scale, window=shape.windows[0], num_sink_tokens=spec.num_sink_tokens
            ),
            rotation=rotation,
            kv_scales=reader.kv_scales(layer, 1),
        )

    def _norm(self, module: str, size: int, eps: float | None = None) -> Norm:
        weight = self.reader.tensor(f"{module}.weight", size)
        return Norm(size, self.spec.norm_eps if eps is None else eps, weight)

    def state_mixer(
        self, kind: StateMixer, layer: str, state: int
    ) -> ShortConvolution | GatedDeltaNet | Mamba2:
        """Load the mixer of the layer with prefix `layer`; `state` is the index of its first state."""
        reader, hidden = self.reader, self.spec.shape.hidden_size
        prefix = f"{layer}{self.spec.names.state_mixer}."
        if isinstance(kind, ShortConvSpec):
            bias = kind.bias
            return ShortConvolution(
                reader.projection([f"{prefix}in_proj"], hidden, [3 * hidden], bias=bias),
                reader.projection([f"{prefix}out_proj"], hidden, [hidden], bias=bias),
                reader.tensor(f"{prefix}conv.weight", hidden, 1, kind.kernel).squeeze(1),
                reader.tensor(f"{prefix}conv.bias", hidden) if bias else None,
                state,
            )
        if isinstance(kind, DeltaNetSpec):
            return self._delta_net(kind, prefix, state)
        return self._mamba2(kind, prefix, state)

    def _delta_net(self, kind: DeltaNetSpec, prefix: str, state: int) -> GatedDeltaNet:
        reader, hidden, heads = self.reader, self.spec.shape.hidden_size, kind.num_value_heads
        mixed = 2 * kind.keys_width + kind.values_width
        parts = {"in_proj_qkvz": mixed + kind.values_width, "in_proj_ba": 2 * heads}
        if not kind.by_head:
            parts = {"in_proj_qkv": mixed, "in_proj_z": kind.values_width}
            parts |= {"in_proj_b": heads, "in_proj_a": heads}
        modules = [prefix + name for name in parts]
        return GatedDeltaNet(
            kind,
            reader.projection(modules, hidden, list(parts.values()), bias=False),
            reader.projection([f"{prefix}out_proj"], kind.values_width, [hidden], bias=False),
            reader.tensor(f"{prefix}conv1d.weight", mixed, 1, kind.kernel).squeeze(1),
            DeltaWeights(
                reader.tensor(f"{prefix}A_log", heads, dtype=_EXACT),
                reader.tensor(f"{prefix}dt_bias", heads, dtype=_EXACT),
                reader.tensor(f"{prefix}norm.weight", kind.value_dim),
                self.spec.norm_eps,
            ),
            state,
        )

    def _mamba2(self, kind: Mamba2Spec, prefix: str, state: int) -> Mamba2:
        reader, hidden = self.reader, self.spec.shape.hidden_size
        heads, channels = kind.num_heads, kind.conv_width
        wide = kind.width + channels + heads
        norm = reader.tensor(f"{prefix}norm.weight", kind.width)
        return Mamba2(
            kind,
            reader.projection([f"{prefix}in_proj"], hidden, [wide], bias=kind.bias),
            reader.projection([f"{prefix}out_proj"], kind.width, [hidden], bias=kind.bias),
            reader.tensor(f"{prefix}conv1d.weight", channels, 1, kind.kernel).squeeze(1),
            reader.tensor(f"{prefix}conv1d.bias", channels) if kind.conv_bias else None,
            MambaWeights(
                -reader.tensor(f"{prefix}A_log", heads, dtype=_EXACT).exp(),
                reader.tensor(f"{prefix}dt_bias", heads, dtype=_EXACT),
                reader.tensor(f"{prefix}D", heads, dtype=_EXACT),
                norm.view(kind.num_groups, -1),
                self.spec.norm_eps,
            ),
            state,
        )

    def streams(self, altup: AltUpSpec) -> AltUpStreams:
        hidden, others = self.spec.shape.hidden_size, range(altup.num_streams - 1)
        load = partial(
            self.reader.projection, in_features=hidden, out_features=[hidden], bias=False
        )
        into, out_of = (
            [load([f"{self.base}{name}.{i}"]) for i in others]
            for name in ("altup_projections", "altup_unembed_projections")
        )
        return AltUpStreams(into, out_of)

    def altup(self, altup: AltUpSpec, layer: str) -> tuple[AltUp, Laurel]:
        """Load what the layer with prefix `layer` does to the streams, and its residual."""
        reader, hidden = self.reader, self.spec.shape.hidden_size
        count, rank = altup.num_streams, altup.laurel_rank
        prefix, laurel = f"{layer}altup.", f"{layer}laurel."
        scale = f"{prefix}correct_output_scale"
        learned = reader.tensor(scale, hidden) if scale in reader else None
        update = AltUp(
            altup.active,
            reader.projection([f"{prefix}modality_router"], hidden, [count], bias=False),
            self._norm(f"{prefix}router_norm", hidden),
            hidden**-1.0,
            reader.projection([f"{prefix}prediction_coefs"], count, [count * count], bias=False),
            reader.projection([f"{prefix}correction_coefs"], count, [count], bias=False),
            learned if altup.scales_output else None,
        )
        residual = Laurel(
            reader.projection([f"{laurel}linear_left"], hidden, [rank], bias=False),
            reader.projection([f"{laurel}linear_right"], rank, [hidden], bias=False),
            self._norm(f"{laurel}post_laurel_norm", hidden),
        )
        return update, residual

    def per_layer_embedding(self) -> PerLayerEmbedding:
        """Load the inputs of all layers."""
        reader, spec, base = self.reader, self.spec, self.base
        width, hidden = spec.per_layer_width, spec.shape.hidden_size
        total = spec.shape.num_layers * width
        return PerLayerEmbedding(
            reader.weight(f"{base}embed_tokens_per_layer.weight", spec.per_layer_vocab, total),
            # transformers rounds the factor to the model's dtype.
            float(torch.tensor(math.sqrt(width), dtype=self.dtype)),
            reader.projection([f"{base}per_layer_model_projection"], hidden, [total], bias=False),
            hidden**-0.5,
            self._norm(f"{base}per_layer_projection_norm", width),
            is_short=spec.per_layer_vocab < spec.shape.vocab_size,
        )

    def per_layer_input(self, layer: str, index: int) -> PerLayerInput:
        reader, hidden, width = self.reader, self.spec.shape.hidden_size, self.spec.per_layer_width
        return PerLayerInput(
            index,
            reader.projection([f"{layer}per_layer_input_gate"], hidden, [width], bias=False),
            reader.projection([f"{layer}per_layer_projection"], width, [hidden], bias=False),
            self._norm(f"{layer}post_per_layer_input_norm", hidden),
            ACTIVATIONS[self.spec.activation],
        )

    def mlp(
        self,
        prefix: str,
        gate_up: tuple[str, ...],
        down: str,
        inner: int,
        *,
        bias: bool = False,
        whole: bool = False,
        hidden: int | None = None,
    ) -> GatedMlp | PlainMlp:
        """Load the MLP of width `inner`: this rank's shard, or all if `whole`; `hidden`: the model's."""
        shape, activation = self.spec.shape, self.spec.activation
        hidden, stacked = hidden or shape.hidden_size, 2 if shape.gated_mlp else 1
        outs = [inner] * stacked if len(gate_up) == stacked else [stacked * inner]
        slices: tuple[WeightSlice | None, WeightSlice | None] = None, None
        if self.shard is not None and not whole:
            slices = self.shard.gate_up(inner, len(gate_up), stacked), self.shard.down(inner)
        load = partial(self.reader.projection, bias=bias, transposed=self.spec.names.transposed)
        modules = [prefix + name for name in gate_up]
        into = load(modules, hidden, outs, weight_slice=slices[0])
        out_of = load([prefix + down], inner, [hidden], weight_slice=slices[1])
        if not shape.gated_mlp:
            return PlainMlp(into, out_of, ACTIVATIONS[activation])
        return GatedMlp(into, out_of, gating(activation, self.reader.rows(inner)))
