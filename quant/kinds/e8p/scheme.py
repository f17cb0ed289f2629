"""The scheme of E8 lattice codes (QuIP#)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from ....base.errors import BadInput
from ...base.scheme import Scheme


@dataclass(frozen=True, slots=True)
class E8pScheme(Scheme):
    """Points of the E8 lattice for 8 weights each, between Hadamard transforms (QuIP#), with float16 scales.

    Tseng et al., "QuIP#: Even Better LLM Quantization with Hadamard Incoherence and Lattice Codebooks", ICML
    2024 (arXiv:2402.04396).

    Attributes:
        bits: 2: E8P; 3 and 4: with a second code of 8 or 16 bits for what it leaves over.
    """

    kind_name: ClassVar[str] = "e8p"

    bits: int

    def __post_init__(self) -> None:
        if self.bits not in (2, 3, 4):
            raise BadInput(f"{self.bits}-bit E8P codes are not supported: choose 2, 3 or 4")

    def bits_per_weight(self, out_features: int, in_features: int) -> float:
        """Bits of codes and scales, and of the float32 factors of transforms of odd widths."""
        factors = sum(odd * odd for n in (out_features, in_features) if (odd := n // (n & -n)) > 1)
        scales = 16 * (out_features + in_features) + 32
        return self.bits + (scales + 32 * factors) / (out_features * in_features)

    @classmethod
    def nearest_to(cls, other: Scheme) -> Iterator[tuple[int, Scheme]]:
        yield 1, cls(min(max(2, other.bits), 4))

    @property
    def label(self) -> str:
        """Short form, such as `e8p2`."""
        return f"e8p{self.bits}"
