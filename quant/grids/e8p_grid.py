"""The grid of E8P codes: vectors of 8 transformed weights, each the nearest point of a lattice codebook.

Error feedback over it is QuIP#'s block LDLQ. A point and its residual cannot be told from their sum.
"""

from __future__ import annotations

from typing import Self

import torch

from ..base.errors import BadInput
from ..e8p.codebook import DIM
from ..e8p.packing import MULTIPLE
from ..e8p.search import Codes, nearest, values_of
from ..kinds.e8p.scheme import E8pScheme
from ..tensors.e8p import E8pTensor
from ..trellis.hadamard import HadamardTransform, whole_width
from ..trellis.incoherence import Incoherence, spread_evenly
from .base import Parameters
from .transformed_grid import TransformedGrid, seed_of

# Standard deviation of a normal source that has the least error, by bits (`opt_scale` in QuIP#; that of 4
# bits is 1.03 there, which has a tenth more error behind the exact search).
_DEVIATIONS = {2: 1.03, 3: 0.98, 4: 0.94}


class E8pGrid(TransformedGrid[E8pScheme, E8pTensor]):
    """The points of E8P, for a weight whose inputs are transformed as a whole, and so are its outputs."""

    vector = DIM

    def __init__(self, scheme: E8pScheme, transforms: Incoherence):
        super().__init__(scheme, transforms)
        inputs, outputs = len(transforms.inputs), len(transforms.outputs)
        self.codes = torch.zeros(inputs // DIM, outputs, dtype=torch.int32)
        self.residual = torch.zeros_like(self.codes)

    @classmethod
    def of(cls, weight: torch.Tensor, scheme: E8pScheme, name: str) -> Self:
        outputs, inputs = weight.shape
        if inputs % MULTIPLE:
            raise BadInput(
                f"{name} has {inputs} inputs: E8P codes need a multiple of {MULTIPLE}; --ignore it, or "
                "choose another method"
            )
        turns = whole_width(inputs), whole_width(outputs)
        deviation = _DEVIATIONS[scheme.bits]
        return cls(scheme, spread_evenly(weight, deviation, seed_of(name), *turns))

    def tensor(self, values: torch.Tensor, parameters: Parameters) -> E8pTensor:
        bits, sides = self.scheme.bits, self.transforms
        stored = {3: torch.uint8, 4: torch.int16}
        turns = sides.turn_inputs, sides.turn_outputs
        left, right = (turn.factor for turn in turns if isinstance(turn, HadamardTransform))
        return E8pTensor(
            self.codes.T.contiguous().to(torch.int16),
            sides.inputs.half(),
            sides.outputs.half(),
            torch.ones(()),
            self.scheme,
            None if bits == 2 else self.residual.T.contiguous().to(stored[bits]),
            left,
            right,
        )

    def nearest_values(self, targets: torch.Tensor, first: int) -> torch.Tensor:
        vectors = targets.unflatten(0, (-1, DIM)).transpose(1, 2).reshape(-1, DIM)
        found = nearest(vectors, self.scheme.bits)
        places = slice(first // DIM, (first + len(targets)) // DIM)
        for kept, codes in zip((self.codes, self.residual), found, strict=True):
            if codes is not None:
                kept[places] = codes.view(-1, targets.shape[1]).to(kept.device)
        values = values_of(Codes(*found), self.scheme.bits)
        return values.view(-1, targets.shape[1], DIM).transpose(1, 2).flatten(0, 1)


def round_to_e8p(weight: torch.Tensor, scheme: E8pScheme, *, name: str = "the weight") -> E8pTensor:
    """Transform a weight `[out, in]` and round it to the nearest points, without data.

    Raises:
        BadInput: inputs that the codes' words do not divide.
    """
    return E8pGrid.of(weight, scheme, name).nearest(weight)
