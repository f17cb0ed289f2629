"""The scheme of 8-bit floats (e4m3)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

from ....base.errors import BadInput
from ...base.scheme import Activations, Scheme

BLOCK = 128
_FLOAT_GRANULARITIES = ("tensor", "channel", "block")


@dataclass(frozen=True, slots=True)
class FloatScheme(Scheme):
    """8-bit floating-point weights (e4m3), with a scale for the weight, an output channel or 128 × 128."""

    kind_name: ClassVar[str] = "float"

    granularity: Literal["tensor", "channel", "block"]
    activations: Activations | None = None
    bits: int = 8

    def __post_init__(self) -> None:
        if self.granularity not in _FLOAT_GRANULARITIES:
            raise BadInput(
                f"an fp8 scale for each {self.granularity} means nothing: "
                f"choose one of {', '.join(_FLOAT_GRANULARITIES)}"
            )

    def scale_shape(self, out_features: int, in_features: int) -> tuple[int, int]:
        if self.granularity == "tensor":
            return 1, 1
        if self.granularity == "channel":
            return out_features, 1
        return -(-out_features // BLOCK), -(-in_features // BLOCK)

    def bits_per_weight(self, out_features: int, in_features: int) -> float:
        rows, columns = self.scale_shape(out_features, in_features)
        return 8 + 32 * rows * columns / (out_features * in_features)

    @property
    def has_float8(self) -> bool:
        return True

    @property
    def scale_group(self) -> int:
        return BLOCK if self.granularity == "block" else 0

    @classmethod
    def nearest_to(cls, other: Scheme) -> Iterator[tuple[int, Scheme]]:
        for scheme in (cls("block", Activations("fp8", "group128")), cls("block")):
            yield scheme.rank_near(other), scheme

    @property
    def label(self) -> str:
        text = f"fp8 {self.granularity}"
        return text if self.activations is None else f"{text} {self.activations.label}"
