"""Asynchronous copies between host and device, through pinned memory."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch


def to_device(values: np.ndarray, device: torch.device) -> torch.Tensor:
    """`values` on the device. On a CPU the tensor shares their memory."""
    tensor = torch.from_numpy(values)
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def packed(lists: Sequence[Sequence[int]], device: torch.device) -> list[torch.Tensor]:
    """Each list as int64 on the device, all in one copy.

    Each is aligned to 16 bytes, for which Triton specializes: so a kernel is compiled once.
    """
    values: list[int] = []
    bounds: list[tuple[int, int]] = []
    for items in lists:
        bounds.append((len(values), len(values) + len(items)))
        values.extend(items)
        if len(items) % 2:
            values.append(0)
    whole = to_device(np.array(values, dtype=np.int64), device)
    return [whole[begin:end] for begin, end in bounds]


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
        """Synchronize; returns the tensor on the host."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._tensor
