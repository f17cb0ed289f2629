"""The grid of trellis codes: tiles of 16 × 16 transformed weights, each the nearest cyclic path of states.

Where the other grids know each weight's points, this one's depend on the neighbours': a tile is a vector of
16 input channels for each 16 outputs, which a Viterbi search rounds as a whole. Error feedback over it is
QTIP's LDLQ.
"""

from __future__ import annotations

from typing import Self

import torch

from ..base.errors import BadInput
from ..base.scheme import SUPPORTED_BITS
from ..kinds.integer.scheme import IntScheme
from ..kinds.trellis.scheme import TrellisScheme
from ..tensors.trellis import TrellisTensor
from ..trellis.codebook import codebook
from ..trellis.hadamard import BLOCK
from ..trellis.incoherence import Incoherence, incoherence
from ..trellis.tiles import LENGTH, TILE, from_sequences, pack_states, to_sequences
from ..trellis.viterbi import nearest_states, values_of
from .base import Parameters
from .int_grid import round_to_nearest
from .transformed_grid import TransformedGrid, seed_of


class TrellisGrid(TransformedGrid[TrellisScheme, TrellisTensor]):
    """The paths of a trellis, for a weight whose transforms are of blocks of 128 channels."""

    vector = TILE

    def __init__(self, scheme: TrellisScheme, transforms: Incoherence):
        super().__init__(scheme, transforms)
        inputs, outputs = len(transforms.inputs), len(transforms.outputs)
        self.states = torch.zeros(inputs // TILE, outputs // TILE, LENGTH, dtype=torch.int32)

    @classmethod
    def of(cls, weight: torch.Tensor, scheme: TrellisScheme, name: str) -> Self:
        if weight.shape[0] % BLOCK or weight.shape[1] % BLOCK:
            raise BadInput(
                f"{name} is {weight.shape[0]} × {weight.shape[1]}: trellis codes have Hadamard transforms "
                f"of {BLOCK} channels, which do not divide it"
            )
        deviation = float(codebook(scheme.codebook).astype("float64").std())
        return cls(scheme, incoherence(weight, deviation, scheme.bits, seed_of(name)))

    def tensor(self, values: torch.Tensor, parameters: Parameters) -> TrellisTensor:
        return TrellisTensor(
            pack_states(self.states, self.scheme.bits),
            self.transforms.inputs.half(),
            self.transforms.outputs.half(),
            self.scheme,
        )

    def nearest_values(self, targets: torch.Tensor, first: int) -> torch.Tensor:
        sequences = to_sequences(targets)
        states = self.states[first // TILE : (first + len(targets)) // TILE].zero_()
        live = sequences.abs().amax(dim=2) > 0  # no search for channels that are always zero
        nearest = nearest_states(sequences[live], self.scheme.bits, self.scheme.codebook)
        states[live] = nearest.to(states.device)
        return from_sequences(values_of(states, self.scheme.codebook)).to(targets)

    def yardstick(self, weight: torch.Tensor) -> torch.Tensor:
        """Rounding to nearest on asymmetric integers of as many bits, in groups of 128.

        The nearest path of a trellis would take as long as the method.
        """
        bits = next(bits for bits in SUPPORTED_BITS if bits >= self.scheme.bits)
        return round_to_nearest(weight, IntScheme(bits, 128, False), torch.float16).dequantize()


def round_to_trellis(
    weight: torch.Tensor, scheme: TrellisScheme, *, name: str = "the weight"
) -> TrellisTensor:
    """Transform a weight `[out, in]` and round it to the nearest paths, without data.

    Raises:
        BadInput: a width that the transforms' blocks do not divide.
    """
    return TrellisGrid.of(weight, scheme, name).nearest(weight)
