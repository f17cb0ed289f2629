"""The scheme of 4-bit floats (NVFP4, MXFP4)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from ....base.errors import BadInput
from ...base.scheme import Activations, Scheme

FP4_BLOCKS = {"nvfp4": 16, "mxfp4": 32}


@dataclass(frozen=True, slots=True)
class Fp4Scheme(Scheme):
    """4-bit floats (e2m1) with one scale for each small block of input channels.

    Attributes:
        kind: `nvfp4`: blocks of 16, e4m3 scales in units of one float32 scale of the whole weight (NVIDIA);
            `mxfp4`: blocks of 32, scales that are powers of two (OCP Microscaling Formats 1.0).
        activations: None: 16-bit activations (W4A16); else inputs of the same kind (W4A4).
    """

    kind_name: ClassVar[str] = "fp4"
    fuses_scales: ClassVar[bool] = True

    kind: Literal["nvfp4", "mxfp4"]
    activations: Activations | None = None
    bits: int = 4

    def __post_init__(self) -> None:
        if self.kind not in FP4_BLOCKS:
            raise BadInput(f"there are no {self.kind!r} weights: choose {' or '.join(FP4_BLOCKS)}")
        if self.activations is not None and self.activations.kind != self.kind:
            raise BadInput(
                f"{self.kind} weights go with inputs in {self.kind} or 16 bits, not "
                f"{self.activations.kind}"
            )

    @property
    def block_size(self) -> int:
        return FP4_BLOCKS[self.kind]

    @property
    def ggml_type(self) -> str | None:
        return "MXFP4" if self.kind == "mxfp4" and self.activations is None else None

    @property
    def has_float8(self) -> bool:
        return self.kind == "nvfp4"

    @property
    def scale_group(self) -> int:
        return self.block_size

    def bits_per_weight(self, out_features: int, in_features: int) -> float:
        whole = 32 / (out_features * in_features) if self.kind == "nvfp4" else 0
        return 4 + 8 / self.block_size + whole

    @property
    def label(self) -> str:
        return self.kind if self.activations is None else f"{self.kind} {self.activations.label}"
