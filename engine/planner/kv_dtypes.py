"""KV-cache dtypes: bytes per element, quantization scales included, exact for vectors of several widths."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from ...quant.base.errors import BadInput
from ...quant.families.shapes import ModelShape
from .probed_shape import ElementBytes, ProbedShape


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
        if isinstance(shape, ProbedShape):
            return self._of_layers(shape)
        vector = shape.latent.cached_elements if shape.latent else shape.head_dim
        return self.vector_bytes(vector) / vector

    def _of_layers(self, shape: ProbedShape) -> Fraction:
        """The mean over a token's vectors, and the bytes of each width; a latent's RoPE part has no scale."""
        by_width: dict[int, Fraction] = {}
        latent = shape.latent
        for t in shape.growing:
            if latent and t.heads == 1 and t.width == latent.kv_rank:
                by_width[t.width] = self.vector_bytes(latent.cached_elements) - self.rope_bytes(
                    latent.rope_dim
                )
            elif latent and t.heads == 1 and t.width == latent.rope_dim:
                by_width[t.width] = self.rope_bytes(t.width)
            elif t.is_float:
                by_width[t.width] = self.vector_bytes(t.width)
        vectors = [(Fraction(t.heads, t.stride), t.width) for t in shape.growing if t.is_float]
        elements = sum(count * width for count, width in vectors)
        if not elements:
            return Fraction(self.block_bytes, self.block)
        total = sum(count * by_width[width] for count, width in vectors)
        return ElementBytes(Fraction(total) / elements, by_width)

    def rope_bytes(self, width: int) -> Fraction:
        """Bytes of the RoPE part of a latent, whose scale is counted with the latent."""
        return Fraction(self.block_bytes * width, self.block)

    def vector_bytes(self, width: int) -> Fraction:
        """Bytes of one vector: a key or a value of one head, a latent, or an indexer's key.

        Raises:
            BadInput: the width does not divide into the dtype's blocks.
        """
        if width % self.block:
            raise BadInput(
                f"--kv-dtype {self.name} stores blocks of {self.block} elements, which do not divide "
                f"the model's vectors of {width}: choose another"
            )
        return Fraction(self.block_bytes * width, self.block) + self.scale_bytes


class LatentKvDtype(KvDtype):
    """vLLM's fp8_ds_mla: 512 elements of a latent in fp8 with 4 float32 scales, 64 of RoPE in bfloat16; an
    indexer's key in fp8 with a float32 scale per 128 (vllm/v1/attention/backends/mla)."""

    __slots__ = ()

    def bytes_per_element(self, shape: ModelShape) -> Fraction:
        """Exact bytes per element of a model with such latents.

        Raises:
            BadInput: the model caches no latent of 512 + 64.
        """
        if shape.latent is None or shape.latent.cached_elements != 576:
            raise BadInput(
                f"--kv-dtype {self.name} holds latents of 512 + 64 elements, which this model does not "
                "cache: choose another"
            )
        return super().bytes_per_element(shape)

    def rope_bytes(self, width: int) -> Fraction:
        """Bytes of the RoPE part, in bfloat16."""
        return Fraction(2 * width)

    def vector_bytes(self, width: int) -> Fraction:
        """Bytes of one vector.

        Raises:
            BadInput: the vector is no latent of 512 + 64, and no key of an indexer.
        """
        if width == 576:
            return Fraction(656)
        if width == 128:
            return Fraction(132)
        raise BadInput(
            f"--kv-dtype {self.name} holds latents of 512 + 64 elements, and this model's vectors have "
            f"{width}: choose another"
        )


KV_DTYPES = {
    dtype.name: dtype
    for dtype in (
        KvDtype("bf16", 1, 2, description="2 bytes"),
        KvDtype("f16", 1, 2, description="2 bytes"),
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
        LatentKvDtype(
            "fp8_ds_mla",
            1,
            1,
            description="656 bytes per latent of 576: fp8, float32 scales, bf16 RoPE",
        ),
        KvDtype("nvfp4", 16, 9, description="half a byte, and an fp8 scale per 16"),
        KvDtype("q8_0", 32, 34, description="34 bytes per 32"),
        KvDtype("q5_1", 32, 24, description="24 bytes per 32"),
        KvDtype("q4_0", 32, 18, description="18 bytes per 32"),
    )
}

VLLM_NAMES = {
    "bfloat16": "bf16",
    "float16": "f16",
    "fp16": "f16",
    "fp8_e4m3": "fp8",
    "fp8_e5m2": "fp8",
    "int8_per_token_head": "int8",
}
"""vLLM's names of dtypes that have another name here; a name that both share is not listed."""

OF_ENGINE = {"bfloat16": "bf16", "float32": "float32", "fp8": "fp8_per_token_head", "int8": "int8"}
"""KV dtypes by the names of llmopt's engine. Its fp8 has a scale per token and head; other engines' fp8
has one per layer."""


def kv_dtype(name: str) -> KvDtype:
    """The KV dtype of that name, or of vLLM's name for it.

    Raises:
        BadInput: an unknown dtype.
    """
    name = VLLM_NAMES.get(name, name)
    if name not in KV_DTYPES:
        raise BadInput(f"no KV dtype {name!r}: choose {', '.join(KV_DTYPES)}")
    return KV_DTYPES[name]
