"""Trellis-coded weights between Hadamard transforms (EXL3)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from ..kinds.trellis.scheme import TrellisScheme
from ..trellis.incoherence import Incoherence
from ..trellis.tiles import TILE, from_sequences, unpack_states
from ..trellis.viterbi import values_of
from .transformed import TransformedTensor


@dataclass(frozen=True, slots=True)
class TrellisTensor(TransformedTensor):
    """`w = (diag(suh) H Q H diag(svh))ᵀ`, with `Q` `[in, out]` the values of the trellis' states.

    Attributes:
        trellis: int16 `[in / 16, out / 16, 16 * bits]`, packed states of tiles.
        suh: float16 `[in]`, signs and scales of inputs.
        svh: float16 `[out]`, of outputs.
        scheme: bits and codebook.
    """

    trellis: torch.Tensor
    suh: torch.Tensor
    svh: torch.Tensor
    scheme: TrellisScheme

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.svh), len(self.suh)

    @property
    def transforms(self) -> Incoherence:
        return Incoherence(self.suh.float(), self.svh.float())

    def inner(self) -> torch.Tensor:
        """See `TransformedTensor`: the values of the states."""
        parts = self.trellis.split(max(1, 2**20 // (self.out_features * TILE)))
        states = (unpack_states(part, self.scheme.bits) for part in parts)
        values = [from_sequences(values_of(part, self.scheme.codebook)) for part in states]
        return torch.cat(values).T.contiguous()

    def with_scales(self, inputs: torch.Tensor, outputs: torch.Tensor) -> TrellisTensor:
        return replace(self, suh=inputs.half(), svh=outputs.half())

    def rows(self, rows: slice) -> TrellisTensor:
        start, stop, _ = rows.indices(self.out_features)
        tiles = self.trellis[:, start // TILE : -(-stop // TILE)]
        return replace(self, trellis=tiles, svh=self.svh[rows])
