"""The scheme of trellis codes (QTIP, EXL3)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from ....base.errors import BadInput
from ...base.scheme import Scheme

TRELLIS_CODEBOOKS = ("3inst", "mcg", "mul1")


@dataclass(frozen=True, slots=True)
class TrellisScheme(Scheme):
    """Trellis codes of weights between Hadamard transforms (QTIP, arXiv:2406.11235, in EXL3's form). Each
    weight adds `bits` to its tile's state, whose value `codebook` computes: 3inst, mcg or mul1."""

    kind_name: ClassVar[str] = "trellis"
    searched_widths: ClassVar[tuple[tuple[int, ...], ...]] = (tuple(range(1, 9)),)

    bits: int
    codebook: str = "mul1"

    def __post_init__(self) -> None:
        if self.bits not in range(1, 9):
            raise BadInput(f"{self.bits}-bit trellises are not supported: choose 1 to 8")
        if self.codebook not in TRELLIS_CODEBOOKS:
            raise BadInput(
                f"there is no codebook {self.codebook!r}: choose {', '.join(TRELLIS_CODEBOOKS)}"
            )

    def bits_per_weight(self, out_features: int, in_features: int) -> float:
        return self.bits + 16 / out_features + 16 / in_features

    def at_width(self, bits: int, group_size: int) -> TrellisScheme:
        return replace(self, bits=bits)

    @classmethod
    def nearest_to(cls, other: Scheme) -> Iterator[tuple[int, Scheme]]:
        yield 1, cls(other.bits)

    @property
    def label(self) -> str:
        return f"trellis{self.bits} {self.codebook}"
