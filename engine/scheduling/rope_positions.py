"""Multimodal RoPE positions (M-RoPE): temporal, height and width of each token of a prompt with images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Axes = tuple[Sequence[int], Sequence[int], Sequence[int]]
"""Temporal, height and width positions of the same tokens."""


@dataclass(frozen=True, slots=True)
class RopePositions:
    """Positions of a sequence's tokens, which differ from their indices from its first image on.

    The tokens of an image have its grid of positions, and text goes on behind the largest of them. A slot of
    the KV cache is found by a token's index, as ever.

    Attributes:
        axes: of the prompt's tokens.
        delta: position less index of every token behind the prompt, on all three axes.

    Source: Wang et al., "Qwen2-VL" (arXiv:2409.12191), section 2.1.
    """

    axes: Axes
    delta: int

    def of(self, indices: Sequence[int]) -> Axes:
        """The positions of the tokens of these indices."""
        count, delta = len(self.axes[0]), self.delta
        temporal, height, width = (
            [axis[i] if i < count else i + delta for i in indices] for axis in self.axes
        )
        return temporal, height, width
