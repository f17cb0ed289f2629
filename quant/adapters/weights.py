"""Weights of a PEFT LoRA adapter by module, checked against the linears that they target."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from ..base.errors import BadInput
from .settings import LoraSettings

WEIGHTS_NAME = "adapter_model.safetensors"
_PREFIX = "base_model.model."
_SUFFIXES = (
    ".lora_A.weight",
    ".lora_B.weight",
    ".lora_magnitude_vector",
    ".lora_magnitude_vector.weight",
)


class LoraPair(NamedTuple):
    """LoRA A and B: `y += x @ down.T @ up.T`; float32 [rank, in], and [out, rank] with the scale in it."""

    down: torch.Tensor
    up: torch.Tensor


class AdapterWeights:
    """The tensors of an adapter folder, by the modules that they target.

    Raises:
        BadInput: a file that is missing or damaged, a tensor that is no LoRA weight of a linear, or a module
            that the settings do not target.
    """

    def __init__(self, folder: Path, settings: LoraSettings) -> None:
        self.path = folder / WEIGHTS_NAME
        self.settings = settings
        self._tensors = _read(self.path)
        self.modules = sorted({self._module_of(name) for name in self._tensors})
        if not self.modules:
            raise BadInput(f"{self.path} holds no tensor")
        for module in self.modules:
            if not settings.targets_module(module):
                raise BadInput(
                    f"{settings.path}: target_modules does not name {module}, which has weights"
                )

    def pair(self, module: str, out_features: int, in_features: int) -> LoraPair:
        """A and B of a module.

        Raises:
            BadInput: naming the tensor that is missing or misshapen.
        """
        rank = self.settings.rank_of(module)
        down = self._tensor(f"{module}.lora_A.weight", (rank, in_features), rank)
        up = self._tensor(f"{module}.lora_B.weight", (out_features, rank), rank)
        return LoraPair(down, up * self.settings.scale_of(module))

    def magnitude(self, module: str, out_features: int) -> torch.Tensor:
        """DoRA's magnitude of each output channel, float32 [out].

        Raises:
            BadInput: missing or misshapen.
        """
        name = f"{module}.lora_magnitude_vector"
        if f"{_PREFIX}{name}" not in self._tensors:
            name = f"{name}.weight"
        return self._tensor(name, (out_features,), self.settings.rank_of(module))

    def _tensor(self, name: str, shape: tuple[int, ...], rank: int) -> torch.Tensor:
        tensor = self._tensors.get(f"{_PREFIX}{name}")
        if tensor is None:
            raise BadInput(f"{self.path} lacks {_PREFIX}{name}")
        if tuple(tensor.shape) != shape or not tensor.is_floating_point():
            raise BadInput(
                f"{self.path}: {_PREFIX}{name} is {tensor.dtype} {tuple(tensor.shape)}, but the model and "
                f"r = {rank} in {self.settings.path.name} make it floats of {shape}"
            )
        return tensor.float()

    def _module_of(self, name: str) -> str:
        for suffix in _SUFFIXES:
            if name.startswith(_PREFIX) and name.endswith(suffix):
                return name.removeprefix(_PREFIX).removesuffix(suffix)
        raise BadInput(f"{self.path}: {name} is not a lora_A or lora_B weight of a linear")


def _read(path: Path) -> Mapping[str, torch.Tensor]:
    if not path.is_file():
        other = path.with_suffix(".bin")
        hint = f": {other.name} is a pickle, save it as safetensors" if other.is_file() else ""
        raise BadInput(f"{path} is missing{hint}")
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise BadInput(
            f"{path} is cut off or damaged ({error}): fetch or write it again"
        ) from error
