"""E8P lattice codes between Hadamard transforms (QuIP#)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from ..base.errors import BadInput
from ..e8p.search import Codes, values_of
from ..kinds.e8p.scheme import E8pScheme
from ..trellis.hadamard import HadamardTransform
from ..trellis.incoherence import Incoherence
from .transformed import TransformedTensor


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
