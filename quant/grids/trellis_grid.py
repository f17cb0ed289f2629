"""The grid of trellis codes: tiles of 16 × 16 transformed weights, each the nearest cyclic path of states.

Where the other grids know each weight's points, this one's depend on the neighbours': a tile is a vector of
16 input channels for each 16 outputs, which a Viterbi search rounds as a whole. That is QTIP's LDLQ once
GPTQ's error feedback goes over it, in vectors of 16 channels. The weights are transformed already
(`quant/trellis/incoherence.py`), so that nothing is fitted.
"""

from __future__ import annotations

import zlib

import torch

from ..base.errors import BadInput
from ..base.scheme import TrellisScheme
from ..tensors.trellis import TrellisTensor
from ..trellis.codebook import codebook
from ..trellis.hadamard import BLOCK
from ..trellis.incoherence import Incoherence, incoherence
from ..trellis.tiles import LENGTH, TILE, from_sequences, pack_states, to_sequences
from ..trellis.viterbi import nearest_states, values_of
from .base import Grid, Parameters


class TrellisGrid(Grid):
    """The grid of one transformed weight `[out, in]`, whose states it keeps."""

    vector = TILE
    rows_alone = False

    def __init__(self, scheme: TrellisScheme, transforms: Incoherence):
        self.scheme, self.transforms = scheme, transforms
        inputs, outputs = len(transforms.inputs), len(transforms.outputs)
        self.group = inputs
        self.states = torch.zeros(inputs // TILE, outputs // TILE, LENGTH, dtype=torch.int32)

    def fit(self, values: torch.Tensor, importance: torch.Tensor | None = None) -> Parameters:
        return ()

    def columns(self, parameters: Parameters) -> TrellisGrid:
        return self

    def errors(
        self, targets: torch.Tensor, weights: torch.Tensor, first: int, *, out: torch.Tensor
    ) -> None:
        """See `Columns.errors`."""
        torch.sub(weights, self._rounded(targets, first), out=out)

    def round(self, values: torch.Tensor, parameters: Parameters) -> torch.Tensor:
        return self._rounded(values.flatten(1).T, 0).T.unflatten(1, values.shape[1:])

    def tensor(self, values: torch.Tensor, parameters: Parameters) -> TrellisTensor:
        return TrellisTensor(
            pack_states(self.states, self.scheme.bits),
            self.transforms.inputs.half(),
            self.transforms.outputs.half(),
            self.scheme,
        )

    def _rounded(self, targets: torch.Tensor, first: int) -> torch.Tensor:
        """The values nearest to `targets` `[channels, out]` from channel `first` on; keeps their states."""
        sequences = to_sequences(targets)
        states = self.states[first // TILE : (first + len(targets)) // TILE]
        live = (
            sequences.abs().amax(dim=2) > 0
        )  # tiles of channels that are always zero cost no search
        nearest = nearest_states(sequences[live], self.scheme.bits, self.scheme.codebook)
        states[live] = nearest.to(states.device)
        return from_sequences(values_of(states, self.scheme.codebook)).to(targets)


def round_to_trellis(
    weight: torch.Tensor, scheme: TrellisScheme, *, name: str = "the weight"
) -> TrellisTensor:
    """Transform a weight `[out, in]` and round it to the nearest paths, without data.

    Raises:
        BadInput: a width that the transforms' blocks do not divide.
    """
    grid = TrellisGrid(scheme, transforms_of(weight, scheme, name))
    values = grid.transforms.forward(weight)
    return grid.tensor(grid.round(values.unsqueeze(1), ()), ())


def transforms_of(weight: torch.Tensor, scheme: TrellisScheme, name: str) -> Incoherence:
    """The transforms of a weight `[out, in]`, whose signs are seeded by its name.

    Raises:
        BadInput: a width that the transforms' blocks do not divide.
    """
    if weight.shape[0] % BLOCK or weight.shape[1] % BLOCK:
        raise BadInput(
            f"{name} is {weight.shape[0]} × {weight.shape[1]}: trellis codes have Hadamard transforms "
            f"of {BLOCK} channels, which do not divide it"
        )
    deviation = float(codebook(scheme.codebook).astype("float64").std())
    return incoherence(weight, deviation, scheme.bits, zlib.crc32(name.encode()))
