"""The device of a quantization: where a layer is run and solved; what is between layers stays on the host."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from .errors import BadInput

HOST = torch.device("cpu")
KINDS = ("cpu", "cuda")


def device_of(asked: str) -> torch.device:
    """The device that `--device` names: `cpu`, `cuda` or `cuda:1`.

    Raises:
        BadInput: there is no such device here.
    """
    try:
        device = torch.device(asked)
    except RuntimeError:
        device = None
    if device is None or device.type not in KINDS:
        raise BadInput(f"--device {asked}: choose cpu, cuda or cuda:N")
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= count:
            built = "is built without CUDA" if torch.version.cuda is None else f"sees {count} GPUs"
            raise BadInput(f"--device {asked}: torch {torch.__version__} {built}: take cpu")
    return device


def creating_on(device: torch.device) -> AbstractContextManager[object]:
    """A context in which tensors that name no device are created on `device`; none for the host."""
    return nullcontext() if device == HOST else device
