"""Per-layer embeddings: each layer adds a gated input of the token to the residual (Gemma 3n and 4)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional

from .norm import Norm
from .projection import AdapterRows, Projection


@dataclass(frozen=True, slots=True)
class PerLayerEmbedding:
    """The inputs of all layers: rows of a table, added to a projection of the token's embedding.

    Attributes:
        table: [vocabulary, layers * width], scaled by `table_scale`.
        projection: hidden → layers * width, scaled by `projection_scale` and normed for each layer.
        is_short: the last tokens of the vocabulary have no row: theirs is the first (Gemma 3n).
    """

    table: torch.Tensor
    table_scale: float
    projection: Projection
    projection_scale: float
    norm: Norm
    is_short: bool = False

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that a step reads: all but the table, of which it reads rows."""
        return self.projection.weight_bytes + self.norm.weight_bytes

    def __call__(self, token_ids: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Inputs [tokens, layers, width] of int64 [tokens] ids and their embeddings [tokens, hidden]."""
        width = self.norm.size
        if self.is_short:
            token_ids = token_ids.where(token_ids < len(self.table), 0)
        rows = functional.embedding(token_ids, self.table) * self.table_scale
        projected = self.projection(hidden) * self.projection_scale
        normed = self.norm(projected.view(len(hidden), -1, width))
        return (normed + rows.view_as(normed)) * 2.0**-0.5


@dataclass(frozen=True, slots=True)
class PerLayerInput:
    """`norm(projection(activation(gate x) * input))`, what one layer adds to the residual `x`."""

    index: int
    gate: Projection
    projection: Projection
    norm: Norm
    activation: Callable[[torch.Tensor], torch.Tensor]

    @property
    def weight_bytes(self) -> int:
        """Bytes of its weights."""
        return self.gate.weight_bytes + self.projection.weight_bytes + self.norm.weight_bytes

    def __call__(
        self, x: torch.Tensor, inputs: torch.Tensor, adapters: AdapterRows
    ) -> torch.Tensor:
        gated = self.activation(self.gate(x, adapters)) * inputs[:, self.index]
        return self.norm(self.projection(gated, adapters))
