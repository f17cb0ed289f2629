"""The scheme of lookup tables and sparse weights (SqueezeLLM)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ....base.errors import BadInput
from ...base.scheme import Scheme


@dataclass(frozen=True, slots=True)
class LookupScheme(Scheme):
    """A lookup table per output channel, and a sparse float matrix (SqueezeLLM, arXiv:2306.07629). Codes of
    `bits`; `sparse_fraction` of the weights are kept in 16 bits."""

    kind_name: ClassVar[str] = "lookup"

    bits: int
    sparse_fraction: float = 0.0

    def __post_init__(self) -> None:
        if self.bits not in (2, 3, 4, 8):
            raise BadInput(f"{self.bits}-bit tables are not supported: choose 2, 3, 4 or 8")
        if not 0 <= self.sparse_fraction < 0.5:
            raise BadInput(
                f"a sparse fraction of {self.sparse_fraction} means nothing: give 0 to 0.5"
            )

    def bits_per_weight(self, out_features: int, in_features: int) -> float:
        return self.bits + 16 * 2**self.bits / in_features + 48 * self.sparse_fraction

    @property
    def label(self) -> str:
        sparse = f" s{self.sparse_fraction:.2%}" if self.sparse_fraction else ""
        return f"lookup{self.bits}{sparse}"
