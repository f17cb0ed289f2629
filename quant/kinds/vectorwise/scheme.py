"""The scheme of LLM.int8()."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from ...base.scheme import Activations, Scheme


@dataclass(frozen=True, slots=True)
class VectorwiseScheme(Scheme):
    """LLM.int8() (arXiv:2208.07339): row-wise int8; outlier channels beyond `threshold` in 16 bits."""

    kind_name: ClassVar[str] = "vectorwise"

    threshold: float = 6.0
    bits: int = 8

    @property
    def activations(self) -> Activations:  # pyright: ignore[reportIncompatibleVariableOverride]
        return Activations("int8")

    @property
    def outlier_threshold(self) -> float:
        return self.threshold

    def bits_per_weight(self, out_features: int, in_features: int) -> float:
        return 8 + 32 / in_features

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Scheme | None:
        return cls() if config.get("load_in_8bit") or config.get("_load_in_8bit") else None

    @classmethod
    def nearest_to(cls, other: Scheme) -> Iterator[tuple[int, Scheme]]:
        scheme = cls()
        yield scheme.rank_near(other), scheme

    @property
    def label(self) -> str:
        return f"llm.int8 t{self.threshold:g}"
