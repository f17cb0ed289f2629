"""The scheme of E8 lattice codes (QuIP#)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from ....base.errors import BadInput
from ...base.scheme import Scheme


@dataclass(frozen=True, slots=True)
class E8pScheme(Scheme):
    """Points of the E8 lattice for 8 weights each, between Hadamard transforms (QuIP#, arXiv:2402.04396): E8P
    with 2 bits, with 3 and 4 a second code of 8 or 16 bits for what it leaves over."""

    kind_name: ClassVar[str] = "e8p"

    bits: int

    def __post_init__(self) -> None:
        if self.bits not in (2, 3, 4):
            raise BadInput(f"{self.bits}-bit E8P codes are not supported: choose 2, 3 or 4")

    def bits_per_weight(self, out_features: int, in_features: int) -> float:
        factors = sum(odd * odd for n in (out_features, in_features) if (odd := n // (n & -n)) > 1)
        scales = 16 * (out_features + in_features) + 32
        return self.bits + (scales + 32 * factors) / (out_features * in_features)

    @classmethod
    def nearest_to(cls, other: Scheme) -> Iterator[tuple[int, Scheme]]:
        yield 1, cls(min(max(2, other.bits), 4))

    @property
    def label(self) -> str:
        return f"e8p{self.bits}"
