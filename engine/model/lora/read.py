"""Loading of PEFT LoRA checkpoints: A and B matrices, checked against the linears that they target."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from safetensors import SafetensorError, safe_open

from ....quant.base.errors import BadInput
from ...config.adapters import LoraSettings

WEIGHTS_NAME = "adapter_model.safetensors"
_PREFIX = "base_model.model."


class LinearShape(Protocol):
    """Shape of a linear that an adapter targets."""

    @property
    def in_features(self) -> int: ...

    @property
    def out_features(self) -> int: ...


class LoraPair(NamedTuple):
    """LoRA A and B: `y += x @ down.T @ up.T`; float32 [rank, in], and [out, rank] with the scale in it."""

    down: torch.Tensor
    up: torch.Tensor


def read_adapter(
    folder: Path, linears: Mapping[str, LinearShape], bases: Sequence[str]
) -> dict[str, LoraPair]:
    """An adapter's LoRA pairs by target linear, a key of `linears`.

    `bases` are prefixes that a checkpoint may put before those names.

    Raises:
        BadInput: naming the file, and the field or tensor that is missing, misshapen or not supported.
    """
    settings = LoraSettings.read(folder)
    tensors = _tensors(folder / WEIGHTS_NAME)
    pairs: dict[str, LoraPair] = {}
    for module in sorted({_module_of(folder, name) for name in tensors}):
        candidates = [module.removeprefix(base) for base in bases if module.startswith(base)]
        linear = next((name for name in candidates if name in linears), None)
        if linear is None:
            raise BadInput(
                f"{folder / WEIGHTS_NAME}: {module} is no linear of this model that can take an adapter"
            )
        if not settings.targets_module(module):
            raise BadInput(
                f"{settings.path}: target_modules does not name {module}, which has weights"
            )
        pairs[linear] = _pair(folder, module, tensors, settings, linears[linear])
    if not pairs:
        raise BadInput(f"{folder / WEIGHTS_NAME} holds no tensor")
    return pairs


def _pair(
    folder: Path,
    module: str,
    tensors: Mapping[str, torch.Tensor],
    settings: LoraSettings,
    linear: LinearShape,
) -> LoraPair:
    rank, matrices = settings.rank_of(module), []
    shapes = {"A": (rank, linear.in_features), "B": (linear.out_features, rank)}
    for side, shape in shapes.items():
        name = f"{_PREFIX}{module}.lora_{side}.weight"
        tensor = tensors.get(name)
        if tensor is None:
            raise BadInput(f"{folder / WEIGHTS_NAME} lacks {name}")
        if tuple(tensor.shape) != shape or not tensor.is_floating_point():
            raise BadInput(
                f"{folder / WEIGHTS_NAME}: {name} is {tensor.dtype} {tuple(tensor.shape)}, but the model "
                f"and r = {rank} in {settings.path.name} make it floats of {shape}"
            )
        matrices.append(tensor.float())
    return LoraPair(matrices[0], matrices[1] * settings.scale_of(module))


def _module_of(folder: Path, name: str) -> str:
    for suffix in (".lora_A.weight", ".lora_B.weight"):
        if name.startswith(_PREFIX) and name.endswith(suffix):
            return name.removeprefix(_PREFIX).removesuffix(suffix)
    raise BadInput(f"{folder / WEIGHTS_NAME}: {name} is not a lora_A or lora_B weight of a linear")


def _tensors(path: Path) -> dict[str, torch.Tensor]:
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
