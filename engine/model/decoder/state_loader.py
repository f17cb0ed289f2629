"""Loading of what mixes a layer's tokens with a constant state: short convolution, delta net, Mamba 2."""

from __future__ import annotations

import torch

from ....quant.families.spec_parts import (
    DeltaNetSpec,
    Mamba2Spec,
    ShortConvSpec,
    StateMixer,
)
from ..layers.mixers import GatedDeltaNet, Mamba2, ShortConvolution
from ..layers.projection import Projection
from ..spec.spec import ModelSpec
from .reader import CheckpointReader

_EXACT = torch.float32


def load_state_mixer(
    reader: CheckpointReader, spec: ModelSpec, kind: StateMixer, layer: str, state: int
) -> ShortConvolution | GatedDeltaNet | Mamba2:
    """Load the mixer of the layer with prefix `layer`; `state` is the index of its first state."""
    prefix = f"{layer}{spec.names.state_mixer}."
    if isinstance(kind, ShortConvSpec):
        return _short_convolution(reader, spec, kind, prefix, state)
    if isinstance(kind, DeltaNetSpec):
        return _delta_net(reader, spec, kind, prefix, state)
    return _mamba2(reader, spec, kind, prefix, state)


def _short_convolution(
    reader: CheckpointReader, spec: ModelSpec, kind: ShortConvSpec, prefix: str, state: int
) -> ShortConvolution:
    hidden, bias = spec.shape.hidden_size, kind.bias
    return ShortConvolution(
        reader.projection([f"{prefix}in_proj"], hidden, [3 * hidden], bias=bias),
        reader.projection([f"{prefix}out_proj"], hidden, [hidden], bias=bias),
        reader.tensor(f"{prefix}conv.weight", hidden, 1, kind.kernel).squeeze(1),
        reader.tensor(f"{prefix}conv.bias", hidden) if bias else None,
        state,
    )


def _delta_net(
    reader: CheckpointReader, spec: ModelSpec, kind: DeltaNetSpec, prefix: str, state: int
) -> GatedDeltaNet:
    hidden, heads = spec.shape.hidden_size, kind.num_value_heads
    mixed = 2 * kind.keys_width + kind.values_width
    return GatedDeltaNet(
        kind,
        _delta_net_input(reader, kind, prefix, hidden),
        reader.projection([f"{prefix}out_proj"], kind.values_width, [hidden], bias=False),
        reader.tensor(f"{prefix}conv1d.weight", mixed, 1, kind.kernel).squeeze(1),
        reader.tensor(f"{prefix}A_log", heads, dtype=_EXACT),
        reader.tensor(f"{prefix}dt_bias", heads, dtype=_EXACT),
        reader.tensor(f"{prefix}norm.weight", kind.value_dim),
        spec.norm_eps,
        state,
    )


def _delta_net_input(
    reader: CheckpointReader, kind: DeltaNetSpec, prefix: str, hidden: int
) -> Projection:
    heads, mixed = kind.num_value_heads, 2 * kind.keys_width + kind.values_width
    if kind.by_head:
        parts = {"in_proj_qkvz": mixed + kind.values_width, "in_proj_ba": 2 * heads}
    else:
        parts = {
            "in_proj_qkv": mixed,
            "in_proj_z": kind.values_width,
            "in_proj_b": heads,
            "in_proj_a": heads,
        }
    modules = [prefix + name for name in parts]
    return reader.projection(modules, hidden, list(parts.values()), bias=False)


def _mamba2(
    reader: CheckpointReader, spec: ModelSpec, kind: Mamba2Spec, prefix: str, state: int
) -> Mamba2:
    hidden, heads, channels = spec.shape.hidden_size, kind.num_heads, kind.conv_width
    wide = kind.width + channels + heads
    norm = reader.tensor(f"{prefix}norm.weight", kind.width)
    return Mamba2(
        kind,
        reader.projection([f"{prefix}in_proj"], hidden, [wide], bias=kind.bias),
        reader.projection([f"{prefix}out_proj"], kind.width, [hidden], bias=kind.bias),
        reader.tensor(f"{prefix}conv1d.weight", channels, 1, kind.kernel).squeeze(1),
        reader.tensor(f"{prefix}conv1d.bias", channels) if kind.conv_bias else None,
        -reader.tensor(f"{prefix}A_log", heads, dtype=_EXACT).exp(),
        reader.tensor(f"{prefix}dt_bias", heads, dtype=_EXACT),
        reader.tensor(f"{prefix}D", heads, dtype=_EXACT),
        norm.view(kind.num_groups, -1),
        spec.norm_eps,
        state,
    )
