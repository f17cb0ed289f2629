"""What a model reads of a calibration sample besides its token ids: pixels, grids, token types."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True, slots=True, eq=False)
class ImageInputs:
    """The processor's tensors of one sample; empty for a sample of text alone.

    Attributes:
        tensors: arguments of the wrapped model's forward by name, such as `pixel_values`.
        num_images: how many images they are of.
    """

    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)
    num_images: int = 0


Images = tuple[ImageInputs, ...]
"""Of each sample; empty where no sample has images."""


def with_images(token_ids: torch.Tensor, images: Images) -> tuple[torch.Tensor, Images]:
    """The samples that have images, `[samples, length]` token ids and their inputs."""
    rows = [row for row, each in enumerate(images) if each.num_images]
    return token_ids[rows], tuple(images[row] for row in rows)


def first_with_images(images: Sequence[ImageInputs]) -> int | None:
    """Number of the first sample that has images; None: none has."""
    return next((row for row, each in enumerate(images) if each.num_images), None)
