"""Gemma 3n's and 4's additions: per-layer embeddings, alternating updates (AltUp), LAuReL."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from .norm import Norm
from .projection import AdapterRows, Projection, Weights


@dataclass(frozen=True, slots=True)
class PerLayerEmbedding:
    """The inputs of all layers: rows of a table, added to a projection of the token's embedding. `table`
    [vocabulary, layers * width] is scaled, the projection normed too. `is_short`: the last tokens of the
    vocabulary have no row: theirs is the first (Gemma 3n)."""

    table: torch.Tensor
    table_scale: float
    projection: Projection
    projection_scale: float
    norm: Norm
    is_short: bool = False

    @property
    def weight_bytes(self) -> int:
        return self.projection.weight_bytes + self.norm.weight_bytes

    def __call__(self, token_ids: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Inputs [tokens, layers, width] of int64 [tokens] ids and their embeddings [tokens, hidden]."""
        width = self.norm.size
        if self.is_short:
            token_ids = token_ids.where(token_ids < len(self.table), 0)
        rows = functional.embedding(token_ids, self.table).to(hidden.dtype) * self.table_scale
        projected = self.projection(hidden) * self.projection_scale
        normed = self.norm(projected.view(len(hidden), -1, width))
        return (normed + rows.view_as(normed)) * 2.0**-0.5


@dataclass(frozen=True, slots=True)
class PerLayerInput(Weights):
    """`norm(projection(activation(gate x) * input))`, what one layer adds to the residual `x`."""

    index: int
    gate: Projection
    projection: Projection
    norm: Norm
    activation: Callable[[torch.Tensor], torch.Tensor]

    def __call__(
        self, x: torch.Tensor, inputs: torch.Tensor, adapters: AdapterRows
    ) -> torch.Tensor:
        gated = self.activation(self.gate(x, adapters)) * inputs[:, self.index]
        return self.norm(self.projection(gated, adapters))


_LEAST_SQUARE = 1e-5  # mean square of a projected stream at least


@dataclass(frozen=True, slots=True)
class AltUpStreams(Weights):
    """Residual streams [streams, tokens, hidden]: the embedding and projections of it, of one magnitude.

    Attributes:
        into, out_of: projections of all streams but the first: from the embedding, and to the output.

    Source: Baykal et al., "Alternating Updates for Efficient Transformers" (arXiv:2301.13310).
    """

    into: Sequence[Projection]
    out_of: Sequence[Projection]

    def split(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.stack([hidden, *(_like(into(hidden), hidden) for into in self.into)])

    def merge(self, streams: torch.Tensor) -> torch.Tensor:
        """The mean of the streams, [tokens, hidden]."""
        first, *others = streams
        pairs = zip(self.out_of, others, strict=True)
        return torch.stack([first, *(_like(out(x), first) for out, x in pairs)]).mean(dim=0)


@dataclass(frozen=True, slots=True)
class AltUp(Weights):
    """A layer's update of the streams: predict all of them, compute one, and correct all by its error.

    Attributes:
        active: index of the stream that the layer computes.
        router: hidden → streams, of the stream's norm times `router_scale`.
        prediction: streams → streams * streams; correction: streams → streams.
        output_scale: [hidden], on the corrected stream that the per-layer input reads; None: 1.
    """

    active: int
    router: Projection
    router_norm: Norm
    router_scale: float
    prediction: Projection
    correction: Projection
    output_scale: torch.Tensor | None

    def predict(self, streams: torch.Tensor, adapters: AdapterRows) -> torch.Tensor:
        """The streams as they would be without the layer, [streams, tokens, hidden]."""
        weights = self.prediction(self._route(streams[self.active], adapters), adapters)
        weights = weights.unflatten(-1, (len(streams), len(streams)))
        return torch.einsum("jth,tij->ith", streams, weights) + streams

    def correct(
        self, predicted: torch.Tensor, computed: torch.Tensor, adapters: AdapterRows
    ) -> torch.Tensor:
        """The predicted streams moved by what the computed one [tokens, hidden] differs from its own."""
        weights = self.correction(self._route(computed, adapters), adapters) + 1.0
        error = computed - predicted[self.active]
        return predicted + error * weights.T[:, :, None]

    def scaled(self, computed: torch.Tensor) -> torch.Tensor:
        return computed if self.output_scale is None else computed * self.output_scale

    def _route(self, x: torch.Tensor, adapters: AdapterRows) -> torch.Tensor:
        routed = self.router(self.router_norm(x) * self.router_scale, adapters)
        return routed.float().tanh().to(x.dtype)


@dataclass(frozen=True, slots=True)
class Laurel(Weights):
    """Low-rank residual: `x + norm(right(left(x)))` (Menghani et al., "LAuReL", arXiv:2411.07501)."""

    left: Projection
    right: Projection
    norm: Norm

    def __call__(self, x: torch.Tensor, adapters: AdapterRows) -> torch.Tensor:
        return x + self.norm(self.right(self.left(x, adapters), adapters))


def _like(x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    target = other.square().mean(dim=-1, keepdim=True).sqrt()
    return x * target / x.square().mean(dim=-1, keepdim=True).clamp(min=_LEAST_SQUARE).sqrt()
