"""KV-cache dtypes: bytes per element, quantization scales included."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from ....quant.base.errors import BadInput
from .shapes import ModelShape


@dataclass(frozen=True, slots=True)
class KvDtype:
    """A KV-cache dtype.

    `block` elements of a head take `block_bytes`, block scales included; `scale_bytes` are added once per
    vector (a key or a value of one head, or a latent).
    """

    name: str
    block: int
    block_bytes: int
    scale_bytes: int = 0
    description: str = ""

    def bytes_per_element(self, shape: ModelShape) -> Fraction:
        """Exact bytes per element, with scales amortized over their elements.

        Raises:
            BadInput: the model's vectors do not divide into the dtype's blocks.
        """
        vector = shape.latent.cached_elements if shape.latent else shape.head_dim
        if vector % self.block:
            raise BadInput(
                f"--kv-dtype {self.name} stores blocks of {self.block} elements, which do not divide "
                f"the model's vectors of {vector}: choose another"
            )
        return Fraction(self.block_bytes, self.block) + Fraction(self.scale_bytes, vector)


KV_DTYPES = {
    dtype.name: dtype
    for dtype in (
        KvDtype("bf16", 1, 2, description="2 bytes"),
        KvDtype("float32", 1, 4, description="4 bytes"),
        KvDtype("fp8", 1, 1, description="1 byte"),
        KvDtype(
            "fp8_per_token_head",
            1,
            1,
            scale_bytes=4,
            description="1 byte, and a float32 scale per token and head",
        ),
        KvDtype(
            "int8",
            1,
            1,
            scale_bytes=4,
            description="1 byte, and a float32 scale per token and head",
        ),
        KvDtype("nvfp4", 16, 9, description="half a byte, and an fp8 scale per 16"),
        KvDtype("q8_0", 32, 34, description="34 bytes per 32"),
        KvDtype("q5_1", 32, 24, description="24 bytes per 32"),
        KvDtype("q4_0", 32, 18, description="18 bytes per 32"),
    )
}

OF_ENGINE = {"bfloat16": "bf16", "float32": "float32", "fp8": "fp8_per_token_head", "int8": "int8"}
"""KV dtypes by the names of llmopt's engine. Its fp8 has a scale per token and head; other engines' fp8
has one per layer."""


def kv_dtype(name: str) -> KvDtype:
    """The KV dtype of that name.

    Raises:
        BadInput: an unknown dtype.
    """
    if name not in KV_DTYPES:
        raise BadInput(f"no KV dtype {name!r}: choose {', '.join(KV_DTYPES)}")
    return KV_DTYPES[name]
