"""E8P lattice codes between Hadamard transforms (QuIP#): tensor, the grid of one weight, and kind.

The grid has vectors of 8 transformed weights, each the nearest point of the codebook; error feedback over it
is QuIP#'s block LDLQ. A point and its residual cannot be told from their sum.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import torch

from ...base.errors import BadInput
from ..base.grid import Parameters
from ..base.incoherence import (
    HadamardTransform,
    Incoherence,
    TransformedGrid,
    TransformedKind,
    TransformedTensor,
    seed_of,
    spread_evenly,
    whole_width,
)
from .codebook import DIM, MULTIPLE, Codes, nearest, search_operations, values_of
from .scheme import E8pScheme


@dataclass(frozen=True, slots=True)
class E8pTensor(TransformedTensor):
    """`w = diag(sv) V (scale Q) Uᵀ diag(su)`, `Q` `[out, in]` the points of the codes, `U` and `V` Hadamard.

    Attributes:
        codes: int16 `[out, in / 8]`, of E8P.
        su: float16 `[in]`, signs and scales of inputs.
        sv: float16 `[out]`, of outputs.
        scale: float32, of the whole weight `[]` or of each row of `Q` `[out]`.
        scheme: bits.
        residual: `[out, in / 8]`, of what E8P leaves over: uint8 with 3 bits, int16 with 4, None with 2.
        left, right: float32, the odd factors of `U` and `V`; None where a width is a power of two.
    """

    codes: torch.Tensor
    su: torch.Tensor
    sv: torch.Tensor
    scale: torch.Tensor
    scheme: E8pScheme
    residual: torch.Tensor | None = None
    left: torch.Tensor | None = None
    right: torch.Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.sv), len(self.su)

    @property
    def transforms(self) -> Incoherence:
        return Incoherence(
            self.su.float(),
            self.sv.float(),
            HadamardTransform(self.in_features, self.left),
            HadamardTransform(self.out_features, self.right),
        )

    def inner(self, rows: slice = slice(None)) -> torch.Tensor:
        """The points of some rows of codes, scaled: float32 `[rows, in]`."""
        residual = None if self.residual is None else self.residual[rows].flatten()
        stored = Codes(self.codes[rows].flatten(), residual)
        values = values_of(stored, self.scheme.bits).view(-1, self.in_features)
        scale = self.scale if self.scale.dim() == 0 else self.scale[rows, None]
        return values.mul_(scale)

    def with_scales(self, inputs: torch.Tensor, outputs: torch.Tensor) -> E8pTensor:
        return replace(self, su=inputs.half(), sv=outputs.half())

    def rows(self, rows: slice) -> E8pTensor:
        """All, or BadInput: a Hadamard transform mixes all outputs."""
        if rows.indices(self.out_features) != (0, self.out_features, 1):
            raise BadInput(
                f"{self.scheme.label} weights cannot be divided along their outputs, which one Hadamard "
                "transform mixes: choose another method"
            )
        return self


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


class E8pKind(TransformedKind[E8pScheme]):
    """Points of E8P."""

    @property
    def search_operations(self) -> float:
        return 2 * search_operations(
            self.scheme.bits
        )  # with feedback, and without it for the report

    def blank(self, out_features: int, in_features: int, scale_dtype: torch.dtype) -> E8pTensor:
        codes = torch.zeros(out_features, in_features // DIM, dtype=torch.int16)
        residual = {2: None, 3: codes.to(torch.uint8), 4: codes}[self.scheme.bits]
        su, sv = (torch.ones(size).half() for size in (in_features, out_features))
        left, right = (whole_width(size).factor for size in (in_features, out_features))
        return E8pTensor(codes, su, sv, torch.ones(()), self.scheme, residual, left, right)

    def grid_of(self, weight: torch.Tensor, name: str) -> E8pGrid:
        return E8pGrid.of(weight, self.scheme, name)


KIND = E8pKind
