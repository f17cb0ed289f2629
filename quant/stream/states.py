"""What is carried from layer to layer for a set of samples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ..calibration.image_inputs import Images


@dataclass(frozen=True, slots=True)
class States:
    """The tensors that enter a layer.

    Attributes:
        token_ids: int64 `[samples, length]`.
        tensors: `hidden` of a plain chain; else by number of layer and tensor what earlier layers returned.
            The samples are the first dimension of each; of a vision tower's, their numbers come first in the
            names.
        images: of each sample; empty where none has any.
    """

    token_ids: torch.Tensor
    tensors: dict[str, torch.Tensor]
    images: Images = ()

    def __len__(self) -> int:
        return len(self.token_ids)

    def stored(self, name: str) -> dict[str, torch.Tensor]:
        """The tensors under names that begin with `name`, for a file."""
        return {f"{name}.{key}": tensor for key, tensor in self.tensors.items()}

    @classmethod
    def restored(
        cls,
        name: str,
        token_ids: torch.Tensor,
        stored: Mapping[str, torch.Tensor],
        images: Images = (),
    ) -> States:
        """Those that `stored` gave."""
        start = f"{name}."
        return cls(
            token_ids,
            {
                key.removeprefix(start): tensor.clone()
                for key, tensor in stored.items()
                if key.startswith(start)
            },
            images,
        )

    def put(self, rows: slice | torch.Tensor, tensors: Mapping[str, torch.Tensor]) -> None:
        """Write what is carried for some samples, by name, samples first."""
        for name, tensor in tensors.items():
            self.tensors[name][rows] = tensor

    def finite(self) -> bool:
        """Whether all floats are; checks minimum and maximum, which takes no copy."""
        return all(
            bool(torch.isfinite(torch.stack(torch.aminmax(tensor))).all())
            for tensor in self.tensors.values()
            if tensor.numel() and tensor.is_floating_point()
        )
