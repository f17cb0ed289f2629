"""The scheme of ggml's block types."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from ....base.errors import BadInput
from ...base.scheme import Scheme

_BLOCK_TYPES = (
    "Q4_0 32 18 2, Q4_1 32 20 3, Q5_0 32 22 6, Q5_1 32 24 7, Q8_0 32 34 8, Q2_K 256 84 10, Q3_K 256 110 11, "
    "Q4_K 256 144 12, Q5_K 256 176 13, Q6_K 256 210 14, IQ1_S 256 50 19, IQ1_M 256 56 29, IQ2_XXS 256 66 16, "
    "IQ2_XS 256 74 17, IQ2_S 256 82 22, IQ3_XXS 256 98 18, IQ3_S 256 110 21, IQ4_NL 32 18 20, "
    "IQ4_XS 256 136 23, MXFP4 32 17 39"
)
_ROWS = [(name, *map(int, numbers)) for name, *numbers in map(str.split, _BLOCK_TYPES.split(","))]
GGUF_BLOCKS = {name: (weights, size) for name, weights, size, _ in _ROWS}
"""Weights in a block and its bytes, from ggml's block structs."""
BLOCK_NUMBERS = {name: number for name, _, _, number in _ROWS}
"""ggml's numbers of the types."""


@dataclass(frozen=True, slots=True)
class GgufScheme(Scheme):
    """One of ggml's block quantization types, by its name in capitals, such as `Q4_K`."""

    kind_name: ClassVar[str] = "gguf"
    searches_ranges: ClassVar[bool] = True

    type: str

    def __post_init__(self) -> None:
        if self.type not in GGUF_BLOCKS:
            raise BadInput(
                f"GGUF type {self.type!r} is not supported: choose one of {', '.join(GGUF_BLOCKS)}"
            )

    @property
    def block(self) -> tuple[int, int]:
        return GGUF_BLOCKS[self.type]

    @property
    def bits(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return next(int(letter) for letter in self.type if letter.isdigit())

    def bits_per_weight(self, out_features: int, in_features: int) -> float:
        weights, num_bytes = self.block
        return num_bytes * 8 / weights

    @property
    def ggml_type(self) -> str:
        return self.type

    @property
    def scale_group(self) -> int:
        return 16 if self.type in ("Q2_K", "Q3_K", "Q6_K") else 32

    def run_length(self, in_features: int) -> int:
        return 32

    @classmethod
    def nearest_to(cls, other: Scheme) -> Iterator[tuple[int, Scheme]]:
        if other.kind_name == "fp4":  # of ggml's types of as many bits this errs least
            yield 0, cls("IQ4_NL")
        for scheme in (cls("Q4_0"), cls("Q8_0")):
            yield scheme.rank_near(other), scheme

    @property
    def label(self) -> str:
        return self.type
