"""Devices: choice of device and dtype, and asynchronous copies through pinned memory."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence
from functools import cache
from typing import Any, TypeVar

import numpy as np
import torch

from ...base.errors import BadInput
from ...base.processor import computes_in_bf16
from ...quant.base.device import cuda_problem, has_nvidia_gpu
from ...quant.model.checkpoint import Checkpoint

CheckpointT = TypeVar("CheckpointT", bound=Checkpoint)
_log = logging.getLogger(__name__)


def choose_device(name: str) -> torch.device:
    """Device of a name; "auto" is CUDA where a GPU computes, else says why not. BadInput: it is unusable."""
    if name == "auto":
        problem = cuda_problem() if has_nvidia_gpu() else ""
        if problem:
            say_on_cpu(problem)
        return torch.device("cuda" if problem is None else "cpu")
    device = torch.device(name)
    if device.type == "cuda" and (problem := cuda_problem(device.index or 0)) is not None:
        raise BadInput(f"device {name!r}: {problem}")
    if device.type == "mps" and not torch.backends.mps.is_available():
        built = "is built without MPS" if not torch.backends.mps.is_built() else "sees no Apple GPU"
        raise BadInput(f"device {name!r}: this torch ({torch.__version__}) {built}; take cpu")
    return device


@cache
def say_on_cpu(reason: str) -> None:
    _log.warning("on the CPU, as its GPU cannot be used: %s", reason)


def enter_device(device: torch.device) -> None:
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """The dtype of that name; "auto" is bfloat16 where the device computes in it, float32 elsewhere."""
    if name != "auto":
        return {"bfloat16": torch.bfloat16, "float32": torch.float32}[name]
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float32
    if device.type == "mps":  # Metal has bfloat16 from macOS 14 on
        return torch.bfloat16 if torch.backends.mps.is_macos_or_newer(14, 0) else torch.float32
    has_bf16 = torch.backends.mkldnn.is_available() and computes_in_bf16()
    return torch.bfloat16 if has_bf16 else torch.float32


def to_device(values: np.ndarray, device: torch.device) -> torch.Tensor:
    """`values` on the device. On a CPU the tensor shares their memory."""
    tensor = torch.from_numpy(values)
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def packed(lists: Sequence[Sequence[int]], device: torch.device) -> list[torch.Tensor]:
    """Each list as int64 on the device, in one copy, aligned to 16 bytes: Triton specializes for that."""
    values: list[int] = []
    bounds: list[tuple[int, int]] = []
    for items in lists:
        bounds.append((len(values), len(values) + len(items)))
        values.extend(items)
        if len(items) % 2:
            values.append(0)
    whole = to_device(np.array(values, dtype=np.int64), device)
    return [whole[begin:end] for begin, end in bounds]


def pinned_bytes(count: int, owner: object) -> torch.Tensor:
    """Pinned memory, until `owner` is gone. What torch pins it rounds up to a power of two."""
    memory = torch.empty(count, dtype=torch.uint8, device="cpu")
    runtime: Any = torch.cuda.cudart()
    torch.cuda.check_error(runtime.cudaHostRegister(memory.data_ptr(), count, 0))
    weakref.finalize(owner, lambda: runtime.cudaHostUnregister(memory.data_ptr()))
    return memory


class PinnedStaging:
    """Copies to a GPU through two pinned buffers, of which one is filled while the other is sent."""

    BUFFER_BYTES = 32 << 20

    def __init__(self, device: torch.device) -> None:
        self._device, self._turn = device, 0
        self._buffers = [
            torch.empty(self.BUFFER_BYTES, dtype=torch.uint8, device="cpu", pin_memory=True)
            for _ in range(2)
        ]
        self._sent: list[torch.cuda.Event | None] = [None, None]

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor on the GPU, in its own dtype; kernels that are launched next read what it holds."""
        out = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device)
        octets = (whole.reshape(-1).view(torch.uint8) for whole in (tensor, out))
        parts = (flat.split(self.BUFFER_BYTES) for flat in octets)
        for part, offset in zip(*parts, strict=True):
            buffer, sent = self._buffers[self._turn][: len(part)], self._sent[self._turn]
            if sent is not None:
                sent.synchronize()
            offset.copy_(buffer.copy_(part), non_blocking=True)
            sent = self._sent[self._turn] = torch.cuda.Event()
            sent.record()
            self._turn = 1 - self._turn
        return out


def placed_on(device: torch.device, checkpoint: CheckpointT) -> CheckpointT:
    """The checkpoint, of which a GPU unpacks what it is sent as it is stored; itself on another device."""
    return checkpoint.placed(PinnedStaging(device)) if device.type == "cuda" else checkpoint


class HostCopy:
    """An asynchronous copy of a tensor to the host."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor, self._arrived = tensor, None
        if tensor.device.type == "cuda":
            self._tensor = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._tensor.copy_(tensor, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    def wait(self) -> torch.Tensor:
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._tensor
