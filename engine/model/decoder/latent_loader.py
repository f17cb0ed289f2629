"""Loading of multi-head latent attention, with its up-projections apart, as they are absorbed (DeepSeek)."""

from __future__ import annotations

from ....quant.families.shapes import Latent
from ...kernels.attention.batch import AttentionRule
from ..layers.attention import LatentAttention, Rotation
from ..layers.norm import Norm
from ..layers.parallel import Shard, WeightSlice
from ..layers.projection import Projection
from ..spec.spec import ModelSpec
from .reader import CheckpointReader


def load_latent_attention(
    reader: CheckpointReader,
    spec: ModelSpec,
    layer: str,
    latent: Latent,
    rotation: Rotation,
    shard: Shard | None,
) -> LatentAttention:
    """Load the attention of the layer with prefix `layer`; with `shard`, that rank's heads."""
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
        query, down = _down(reader, prefix, hidden, (latent.query_rank, cached))
        query_norm = _norm(reader, f"{prefix}q_a_layernorm", latent.query_rank)
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
        latent_norm=_norm(reader, f"{prefix}kv_a_layernorm", rank),
        key_up=expand[:, : latent.nope_dim].clone(),
        value_up=expand[:, latent.nope_dim :].clone(),
        output=linear("o_proj", heads * latent.value_dim, hidden, out_of),
        rule=AttentionRule(
            spec.attention_scale, window=shape.windows[0], num_sink_tokens=spec.num_sink_tokens
        ),
        rotation=rotation,
        kv_scales=reader.kv_scales(layer, 1),
    )


def _down(
    reader: CheckpointReader, prefix: str, hidden: int, out_features: tuple[int, int]
) -> tuple[Projection, Projection | None]:
    """The projections to the queries' rank and to the latent. Where they are unquantized the first is both,
    stacked, and the second None: blocks of a quantized weight may straddle the two."""
    names = [prefix + name for name in ("q_a_proj", "kv_a_proj_with_mqa")]
    if not any(reader.is_quantized(name) for name in names):
        return reader.projection(names, hidden, out_features, bias=False), None
    query, latent = (
        reader.projection([name], hidden, [out], bias=False)
        for name, out in zip(names, out_features, strict=True)
    )
    return query, latent


def _norm(reader: CheckpointReader, module: str, size: int) -> Norm:
    # DeepSeek's `rms_norm_eps` does not apply to these: they use their class's default epsilon.
    return Norm(size, 1e-6, reader.tensor(f"{module}.weight", size))
