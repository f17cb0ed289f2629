"""Rows of a step whose token embeddings are replaced: the placeholder tokens of images."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, eq=False)
class EmbeddedRows:
    """Embeddings of a vision tower for some tokens of a step.

    Attributes:
        rows: int64 [rows], indices of the step's tokens.
        embeddings: [rows, hidden], which replace theirs.
        deepstack: [rows, hidden] each, added to the hidden states after the layer of that index (Qwen3-VL).
    """

    rows: torch.Tensor
    embeddings: torch.Tensor
    deepstack: tuple[torch.Tensor, ...] = ()

    def replace(self, hidden: torch.Tensor) -> torch.Tensor:
        """Token embeddings [tokens, hidden] with those of the images in their places."""
        return hidden.index_copy(0, self.rows, self.embeddings.to(hidden.dtype))

    def add_deepstack(self, layer: int, hidden: torch.Tensor) -> torch.Tensor:
        """The output [tokens, hidden] of a layer with its level of the deepstack added."""
        return hidden.index_add(0, self.rows, self.deepstack[layer].to(hidden.dtype))
