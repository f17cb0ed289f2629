"""Loading of per-layer embeddings: the table and its projection, and what each layer does with its input."""

from __future__ import annotations

import math

import torch

from ..layers.altup import PerLayerEmbedding, PerLayerInput
from ..layers.mlp import ACTIVATIONS
from ..layers.norm import Norm
from ..spec.spec import ModelSpec
from .reader import CheckpointReader


def load_per_layer_embedding(
    reader: CheckpointReader, spec: ModelSpec, base: str, dtype: torch.dtype
) -> PerLayerEmbedding:
    """Load the inputs of all layers, below the decoder's prefix `base`."""
    shape, width = spec.shape, spec.per_layer_width
    total = shape.num_layers * width
    table = reader.tensor(f"{base}embed_tokens_per_layer.weight", spec.per_layer_vocab, total)
    return PerLayerEmbedding(
        table,
        # transformers rounds the factor to the model's dtype.
        float(torch.tensor(math.sqrt(width), dtype=dtype)),
        reader.projection(
            [f"{base}per_layer_model_projection"], shape.hidden_size, [total], bias=False
        ),
        shape.hidden_size**-0.5,
        Norm(width, spec.norm_eps, reader.tensor(f"{base}per_layer_projection_norm.weight", width)),
        is_short=spec.per_layer_vocab < shape.vocab_size,
    )


def load_per_layer_input(
    reader: CheckpointReader, spec: ModelSpec, layer: str, index: int
) -> PerLayerInput:
    """Load what the layer with prefix `layer` does with its input."""
    hidden, width = spec.shape.hidden_size, spec.per_layer_width
    norm = reader.tensor(f"{layer}post_per_layer_input_norm.weight", hidden)
    return PerLayerInput(
        index,
        reader.projection([f"{layer}per_layer_input_gate"], hidden, [width], bias=False),
        reader.projection([f"{layer}per_layer_projection"], width, [hidden], bias=False),
        Norm(hidden, spec.norm_eps, norm),
        ACTIVATIONS[spec.activation],
    )
