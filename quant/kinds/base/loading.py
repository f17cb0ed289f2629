"""`LoaderRules`: what vLLM's kernels and transformers' converters take of a kind's weights.

`quant/plan/vllm_rules.py` and `transformers_rules.py` say from which versions the rules are, and ask these
for each weight; a kind that overrides nothing is loaded by llmopt alone.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

EXPERTS = ".experts."
# Split over ranks along the inputs; all other linears along the outputs.
_ROW_PARALLEL = ("o_proj", "down_proj", "w2", "out_proj", "dense", "fc2")


@dataclass(frozen=True, slots=True)
class RankMatrix:
    """A matrix as vLLM holds it on one rank: fused along the outputs, then split.

    Attributes:
        module: the first linear in it.
        parts: outputs of each linear in it, on the rank.
        ranks: that it is split over.
    """

    module: str
    parts: tuple[int, ...]
    in_features: int
    ranks: int

    @classmethod
    def of(cls, module: str, outputs: Collection[int], in_features: int, ranks: int) -> RankMatrix:
        """The part of one of `ranks`; a width that they do not divide is one that no group divides either."""
        if module.endswith(_ROW_PARALLEL):
            part = in_features // ranks if in_features % ranks == 0 else 1
            return cls(module, tuple(outputs), part, ranks)
        parts = tuple(out // ranks if out % ranks == 0 else 1 for out in outputs)
        return cls(module, parts, in_features, ranks)

    @property
    def row_parallel(self) -> bool:
        """Whether ranks split it along the inputs."""
        return self.module.endswith(_ROW_PARALLEL)

    @property
    def out_features(self) -> int:
        """Outputs on a rank."""
        return sum(self.parts)


class LoaderRules:
    """The rules of other loaders for one kind; these are those of a kind that no other loader reads.

    Attributes:
        merges_without_codes: whether transformers keeps weights without codes that it merges with others.
    """

    merges_without_codes: bool = False

    def vllm_kernel(self, scheme: Any, matrix: RankMatrix, format_name: str) -> tuple[bool, str]:
        """Whether vLLM has a kernel for a matrix, and its name or the violated rule."""
        return False, f"no kernel for such codes in the format {format_name}"

    def vllm_tried(self, scheme: Any, format_name: str) -> bool:
        """Whether vLLM for CPU loaded a language model of such weights."""
        return False

    def vllm_tried_with_images(self, scheme: Any) -> bool:
        """Whether it loaded an image-text model of such weights in compressed-tensors."""
        return False

    def merged_right(self, scheme: Any) -> bool:
        """Whether transformers dequantizes such a weight before it merges it with others."""
        return False

    def transformers_needs(self, scheme: Any) -> str:
        """What its reader of compressed-tensors needs for such weights; empty: nothing."""
        return ""
