"""Pipe messages between rank 0 and the tensor-parallel workers: pickle, with tensors as raw bytes."""

from __future__ import annotations

import io
import pickle
from multiprocessing.connection import Connection
from typing import Any

import torch


class Channel:
    """One end of a pipe for picklable values; received tensors are moved to `device`."""

    def __init__(self, connection: Connection, device: torch.device) -> None:
        self._connection = connection
        self._device = device

    def send(self, value: object) -> None:
        """Send a value; raise `OSError` where the other end is closed."""
        self.send_packed(pack(value))

    def send_packed(self, message: bytes) -> None:
        """`send` of a value that `pack` has serialized."""
        self._connection.send_bytes(message)

    def receive(self) -> Any:
        """Wait for a value; raise `EOFError` or `OSError` where the other end is closed."""
        return _Unpickler(io.BytesIO(self._connection.recv_bytes()), self._device).load()

    def close(self) -> None:
        self._connection.close()


def pack(value: object) -> bytes:
    """Serialize a value to a message."""
    buffer = io.BytesIO()
    _Pickler(buffer, pickle.HIGHEST_PROTOCOL).dump(value)
    return buffer.getvalue()


class _Pickler(pickle.Pickler):
    """Pickles tensors as raw bytes: torch's own reduction writes a zip archive for each."""

    def persistent_id(self, obj: object) -> tuple[str, tuple[int, ...], bytes] | None:
        if not isinstance(obj, torch.Tensor):
            return None
        data = obj.detach().cpu().contiguous().view(-1).view(torch.uint8)
        return str(obj.dtype).removeprefix("torch."), tuple(obj.shape), data.numpy().tobytes()


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, device: torch.device) -> None:
        super().__init__(file)
        self._device = device

    def persistent_load(self, pid: Any) -> torch.Tensor:
        name, shape, data = pid
        dtype = getattr(torch, name)
        if not data:
            return torch.empty(shape, dtype=dtype, device=self._device)
        return torch.frombuffer(bytearray(data), dtype=dtype).view(shape).to(self._device)
