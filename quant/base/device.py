"""The device of a quantization: where a layer is run and solved; what is between layers stays on the host."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from .device_name import device_names
from .errors import BadInput

HOST = torch.device("cpu")


def device_of(asked: str) -> torch.device:
    """The device that `--device` names: `cpu`, `cuda` or `cuda:1`.

    Raises:
        BadInput: there is no such device here.
    """
    device_names(asked)
    device = torch.device(asked)
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= count:
            built = "is built without CUDA" if torch.version.cuda is None else f"sees {count} GPUs"
            raise BadInput(f"--device {asked}: torch {torch.__version__} {built}: take cpu")
    return device


def devices_of(asked: str) -> tuple[torch.device, ...]:
    """The devices that `--device` names, with commas: the first runs the layers, and all of them solve.

    Raises:
        BadInput: one of them is not here, is named twice, or is of another kind than the first.
    """
    devices = tuple(device_of(name) for name in device_names(asked))
    if len({device.type for device in devices}) > 1:
        raise BadInput(f"--device {asked}: name devices of one kind")
    numbers = [device.index or 0 for device in devices]
    if devices[0] != HOST and len({*numbers}) < len(numbers):
        raise BadInput(f"--device {asked}: name each device once")
    return devices


def creating_on(device: torch.device) -> AbstractContextManager[object]:
    """A context in which tensors that name no device are created on `device`; none for the host."""
    return nullcontext() if device == HOST else device
