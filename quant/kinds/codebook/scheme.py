"""The scheme of codes into a fixed table of 16 values (bitsandbytes' nf4, fp4)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from ....base.errors import BadInput
from ...base.scheme import Scheme

CODEBOOK_BLOCKS = (32, 64, 128, 256, 512, 1024, 2048, 4096)


@dataclass(frozen=True, slots=True)
class CodebookScheme(Scheme):
    """4-bit codes into one fixed codebook of 16 values, one absmax per block of weights (bitsandbytes).

    Attributes:
        kind: name of the codebook: `nf4` (quantiles of a normal distribution) or `fp4`.
        block_size: consecutive weights, in row-major order across rows, that share an absmax.
        double_quant: True if the absmax values are themselves quantized to 8 bits.
    """

    kind_name: ClassVar[str] = "codebook"

    kind: Literal["nf4", "fp4"]
    block_size: int = 64
    double_quant: bool = False
    bits: int = 4

    def __post_init__(self) -> None:
        if self.kind not in ("nf4", "fp4"):
            raise BadInput(f"there is no table {self.kind!r}: choose nf4 or fp4")
        if self.block_size not in CODEBOOK_BLOCKS:
            sizes = ", ".join(str(size) for size in CODEBOOK_BLOCKS)
            raise BadInput(f"blocks of {self.block_size} weights are none of {sizes}")

    def bits_per_weight(self, out_features: int, in_features: int) -> float:
        per_block = 8 + 32 / 256 if self.double_quant else 32
        return 4 + per_block / self.block_size

    @property
    def scale_group(self) -> int:
        return self.block_size

    def run_length(self, in_features: int) -> int:
        return self.block_size if in_features % self.block_size == 0 else in_features

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Scheme | None:
        if not (config.get("load_in_4bit") or config.get("_load_in_4bit")):
            return None
        double_quant = bool(config.get("bnb_4bit_use_double_quant"))
        return cls(config.get("bnb_4bit_quant_type", "fp4"), double_quant=double_quant)

    @classmethod
    def nearest_to(cls, other: Scheme) -> Iterator[tuple[int, Scheme]]:
        scheme = cls("nf4")
        yield scheme.rank_near(other), scheme

    @property
    def label(self) -> str:
        return f"{self.kind} b{self.block_size}" + (" double" if self.double_quant else "")
