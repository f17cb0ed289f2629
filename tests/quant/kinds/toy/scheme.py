"""The scheme of the toy kind: signs, and one magnitude for each output channel (Rastegari et al., 2016)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from llmopt.quant.base.scheme import Scheme


@dataclass(frozen=True, slots=True)
class ToyScheme(Scheme):
    kind_name: ClassVar[str] = "toy"

    bits: int = 1

    @property
    def label(self) -> str:
        return "toy1"

    def bits_per_weight(self, out_features: int, in_features: int) -> float:
        return 1 + 16 / in_features

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Scheme:
        return cls()

    @classmethod
    def nearest_to(cls, other: Scheme) -> Iterator[tuple[int, Scheme]]:
        yield 2, cls()
