"""Checkpoints of draft heads (Medusa, EAGLE): config.json and one file of weights."""

from __future__ import annotations

import pickle
from pathlib import Path

import torch

from ...quant.base.errors import BadInput
from ...quant.model.checkpoint import SINGLE_NAME, Checkpoint, read_json

FILES = (SINGLE_NAME, "medusa_lm_head.safetensors", "medusa_lm_head.pt", "pytorch_model.bin")
"""File names of published heads, in order of precedence."""


class HeadsCheckpoint(Checkpoint):
    """A `Checkpoint` of draft heads. They are small: all tensors are read at once.

    Raises:
        BadInput: a file is missing, cut off, or holds something other than named tensors.
    """

    def __init__(self, folder: Path | str) -> None:
        self.folder = self.path = Path(folder)
        self.config = read_json(self.folder / "config.json")
        path = next((p for name in FILES if (p := self.folder / name).is_file()), None)
        if path is None:
            raise BadInput(f"{self.folder} has no heads: none of {', '.join(FILES)} is there")
        self._tensors = _tensors(path)
        self.shard_of = dict.fromkeys(self._tensors, path.name)

    def tensor(self, name: str) -> torch.Tensor:
        """One tensor, on the CPU."""
        if name not in self._tensors:
            raise BadInput(f"{self.folder} has no tensor {name!r}")
        return self._tensors[name]

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor."""
        return tuple(self.tensor(name).shape)


def _tensors(path: Path) -> dict[str, torch.Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        tensors = torch.load(path, map_location="cpu", weights_only=True)
    except (SafetensorError, OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise BadInput(f"{path} is cut off or damaged: {reason}") from error
    if not isinstance(tensors, dict) or not all(
        isinstance(x, torch.Tensor) for x in tensors.values()
    ):
        raise BadInput(f"{path} does not hold named tensors")
    return tensors
