"""Loading of alternating updates and learned augmented residuals (Gemma 3n)."""

from __future__ import annotations

from ....quant.families.spec_parts import AltUpSpec
from ..layers.altup import AltUp, AltUpStreams, Laurel
from ..layers.norm import Norm
from ..spec.spec import ModelSpec
from .reader import CheckpointReader


def load_streams(
    reader: CheckpointReader, spec: ModelSpec, altup: AltUpSpec, base: str
) -> AltUpStreams:
    """Load the projections between embedding, streams and output, below the decoder's prefix `base`."""
    hidden, others = spec.shape.hidden_size, range(altup.num_streams - 1)
    into, out_of = (
        [reader.projection([f"{base}{name}.{i}"], hidden, [hidden], bias=False) for i in others]
        for name in ("altup_projections", "altup_unembed_projections")
    )
    return AltUpStreams(into, out_of)


def load_altup(
    reader: CheckpointReader, spec: ModelSpec, altup: AltUpSpec, layer: str
) -> tuple[AltUp, Laurel]:
    """Load what the layer with prefix `layer` does to the streams, and its residual."""
    hidden, count, rank = spec.shape.hidden_size, altup.num_streams, altup.laurel_rank
    prefix, laurel = f"{layer}altup.", f"{layer}laurel."
    scale = f"{prefix}correct_output_scale"
    learned = reader.tensor(scale, hidden) if scale in reader else None
    update = AltUp(
        altup.active,
        reader.projection([f"{prefix}modality_router"], hidden, [count], bias=False),
        _norm(reader, spec, f"{prefix}router_norm"),
        hidden**-1.0,
        reader.projection([f"{prefix}prediction_coefs"], count, [count * count], bias=False),
        reader.projection([f"{prefix}correction_coefs"], count, [count], bias=False),
        learned if altup.scales_output else None,
    )
    residual = Laurel(
        reader.projection([f"{laurel}linear_left"], hidden, [rank], bias=False),
        reader.projection([f"{laurel}linear_right"], rank, [hidden], bias=False),
        _norm(reader, spec, f"{laurel}post_laurel_norm"),
    )
    return update, residual


def _norm(reader: CheckpointReader, spec: ModelSpec, name: str) -> Norm:
    hidden = spec.shape.hidden_size
    return Norm(hidden, spec.norm_eps, reader.tensor(f"{name}.weight", hidden))
