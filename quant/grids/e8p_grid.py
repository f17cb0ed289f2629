"""The grid of E8P codes: vectors of 8 transformed weights, each the nearest point of a lattice codebook.

GPTQ's error feedback over it, in vectors of 8 channels, is QuIP#'s block LDLQ. A point and its residual
cannot be told from their sum, so that codes are kept while solving; the weights are transformed already.
"""

from __future__ import annotations

import zlib

import torch

from ..base.errors import BadInput
from ..base.scheme import E8pScheme
from ..e8p.codebook import DIM
from ..e8p.packing import MULTIPLE
from ..e8p.search import Codes, nearest, values_of
from ..tensors.e8p import E8pTensor
from ..trellis.hadamard import HadamardTransform, whole_width
from ..trellis.incoherence import Incoherence, spread_evenly
from .base import Grid, Parameters

# Standard deviation of a normal source that has the least error, by bits (`opt_scale` in QuIP#; that of 4
# bits is 1.03 there, which has a tenth more error behind the exact search).
_DEVIATIONS = {2: 1.03, 3: 0.98, 4: 0.94}


class E8pGrid(Grid):
    """The grid of one transformed weight `[out, in]`, whose codes it keeps."""

    vector = DIM
    rows_alone = False

    def __init__(self, scheme: E8pScheme, transforms: Incoherence):
        self.scheme, self.transforms = scheme, transforms
        inputs, outputs = len(transforms.inputs), len(transforms.outputs)
        self.group = inputs
        self.codes = torch.zeros(inputs // DIM, outputs, dtype=torch.int32)
        self.residual = torch.zeros_like(self.codes)

    def fit(self, values: torch.Tensor, importance: torch.Tensor | None = None) -> Parameters:
        return ()

    def columns(self, parameters: Parameters) -> E8pGrid:
        return self

    def errors(
        self, targets: torch.Tensor, weights: torch.Tensor, first: int, *, out: torch.Tensor
    ) -> None:
        """See `Columns.errors`."""
        torch.sub(weights, self._rounded(targets, first), out=out)

    def round(self, values: torch.Tensor, parameters: Parameters) -> torch.Tensor:
        return self._rounded(values.flatten(1).T, 0).T.unflatten(1, values.shape[1:])

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

    def _rounded(self, targets: torch.Tensor, first: int) -> torch.Tensor:
        """The points nearest to `targets` `[channels, out]` from channel `first` on; keeps their codes."""
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
    grid = E8pGrid(scheme, transforms_of(weight, scheme, name))
    values = grid.transforms.forward(weight)
    return grid.tensor(grid.round(values.unsqueeze(1), ()), ())


def transforms_of(weight: torch.Tensor, scheme: E8pScheme, name: str) -> Incoherence:
    """The transforms of a weight `[out, in]`, whose signs are seeded by its name.

    Raises:
        BadInput: inputs that the codes' words do not divide.
    """
    outputs, inputs = weight.shape
    if inputs % MULTIPLE:
        raise BadInput(
            f"{name} has {inputs} inputs: E8P codes need a multiple of {MULTIPLE}; --ignore it, or choose "
            "another method"
        )
    return spread_evenly(
        weight,
        _DEVIATIONS[scheme.bits],
        zlib.crc32(name.encode()),
        whole_width(inputs),
        whole_width(outputs),
    )
