"""Messages from rank 0 to the tensor-parallel workers: pickle by pipe; tensors of a GPU go by NCCL."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch


class Message(NamedTuple):
    """A serialized value.

    Attributes:
        on_device: its tensors on a GPU, contiguous, which follow by broadcasts: the host waits for none.
    """

    content: bytes
    on_device: list[torch.Tensor]


class Channel:
    """One end of a pipe for picklable values; received tensors are moved to `device`.

    `broadcast`: takes rank 0's values of a tensor, in place.
    """

    def __init__(
        self,
        connection: Connection,
        device: torch.device,
        broadcast: Callable[[torch.Tensor], None] | None = None,
    ) -> None:
        self._connection = connection
        self._device = device
        self.broadcast = broadcast

    def send(self, value: object) -> None:
        """Send a value without tensors on a GPU; raise `OSError` where the other end is closed."""
        self.send_packed(pack(value).content)

    def send_packed(self, content: bytes) -> None:
        """`send` of a value that `pack` has serialized."""
        self._connection.send_bytes(content)

    def receive(self) -> Any:
        """Wait for a value; raise `EOFError` or `OSError` where the other end is closed."""
        unpickler = _Unpickler(io.BytesIO(self._connection.recv_bytes()), self._device)
        value = unpickler.load()
        for tensor in unpickler.on_device:
            assert self.broadcast is not None, "tensors on a GPU before the group is connected"
            self.broadcast(tensor)
        return value

    def close(self) -> None:
        self._connection.close()


def pack(value: object) -> Message:
    """Serialize a value to a message."""
    buffer = io.BytesIO()
    pickler = _Pickler(buffer, pickle.HIGHEST_PROTOCOL)
    pickler.dump(value)
    return Message(buffer.getvalue(), pickler.on_device)


class _Pickler(pickle.Pickler):
    """Pickles tensors as raw bytes: torch's own reduction writes a zip archive for each."""

    def __init__(self, file: io.BytesIO, protocol: int) -> None:
        super().__init__(file, protocol)
        self.on_device: list[torch.Tensor] = []

    def persistent_id(self, obj: object) -> tuple[str, tuple[int, ...], bytes | None] | None:
        if not isinstance(obj, torch.Tensor):
            return None
        name, shape = str(obj.dtype).removeprefix("torch."), tuple(obj.shape)
        if obj.device.type == "cuda":
            if not obj.numel():
                return name, shape, b""
            self.on_device.append(obj.detach().contiguous())
            return name, shape, None
        data = obj.detach().cpu().contiguous().view(-1).view(torch.uint8)
        return name, shape, data.numpy().tobytes()


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, device: torch.device) -> None:
        super().__init__(file)
        self._device = device
        self.on_device: list[torch.Tensor] = []

    def persistent_load(self, pid: Any) -> torch.Tensor:
        name, shape, data = pid
        dtype = getattr(torch, name)
        if not data:
            empty = torch.empty(shape, dtype=dtype, device=self._device)
            if data is None:
                self.on_device.append(empty)
            return empty
        return torch.frombuffer(bytearray(data), dtype=dtype).view(shape).to(self._device)
